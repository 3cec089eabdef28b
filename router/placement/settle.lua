-- A router's absolute table of charges, with its lease: applies new - old, so whatever was lost heals here.
-- KEYS: load, routers, chg:<router>, answers:<router>, runs
-- ARGV: router, lease_ms, run (0: none yet), number of this table, number of the oldest placement still awaited,
--       then (field, amount) pairs
-- -> a new run if it had none (the table is not applied); 0: applied, now or before, or older than the applied one;
--    -1: Redis has a later run of this router (not applied).
-- answers: run, settled (number of the last table), from (placements below it are void), then answers by number
local run, number = tonumber(ARGV[3]), tonumber(ARGV[4])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local known = redis.call('HMGET', KEYS[4], 'run', 'settled')
local latest = tonumber(known[1] or 0)
if run == 0 then
  local given = math.max(redis.call('INCR', KEYS[5]), latest + 1)
  redis.call('SET', KEYS[5], given)
  redis.call('DEL', KEYS[4])
  redis.call('HSET', KEYS[4], 'run', given)
  redis.call('ZADD', KEYS[2], 'NX', now + tonumber(ARGV[2]), ARGV[1])
  return given
end
if run < latest then return -1 end
if run > latest then
  redis.call('DEL', KEYS[4])
elseif number <= tonumber(known[2] or 0) then
  return 0
end
redis.call('HSET', KEYS[4], 'run', run, 'settled', number, 'from', ARGV[5])
-- One value above 64 bytes makes Redis store `load` as a hash table: in a listpack each lookup would be a linear search.
redis.call('HSET', KEYS[1], '', string.rep('0', 65))
local function add(field, amount)
  if redis.call('HINCRBY', KEYS[1], field, amount) == 0 then redis.call('HDEL', KEYS[1], field) end
end
local fresh = {}
for i = 6, #ARGV, 2 do fresh[ARGV[i]] = tonumber(ARGV[i + 1]) end
local old = redis.call('HGETALL', KEYS[3])
for i = 1, #old, 2 do
  local field, before = old[i], tonumber(old[i + 1])
  local after = fresh[field] or 0
  if after ~= before then add(field, after - before) end
  if after == 0 then redis.call('HDEL', KEYS[3], field) else redis.call('HSET', KEYS[3], field, after) end
  fresh[field] = nil
end
for field, amount in pairs(fresh) do
  if amount ~= 0 then
    add(field, amount)
    redis.call('HSET', KEYS[3], field, amount)
  end
end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
-- Of routers whose lease has run out, one table a call.
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1]
if dead then
  local tag = string.gsub(KEYS[3], 'chg:.*$', '')
  local left = redis.call('HGETALL', tag .. 'chg:' .. dead)
  for i = 1, #left, 2 do add(left[i], -tonumber(left[i + 1])) end
  redis.call('DEL', tag .. 'chg:' .. dead, tag .. 'answers:' .. dead)
  redis.call('ZREM', KEYS[2], dead)
end
return 0
