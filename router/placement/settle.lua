-- A router's absolute table of charges, with its lease: applies new - old, so whatever was lost heals here.
-- KEYS: load, routers, chg:<router>   ARGV: router, lease_ms, then (field, amount) pairs
-- One long value keeps Redis from storing `load` as a list, in which every placement would search for every worker.
redis.call('HSET', KEYS[1], '', string.rep('0', 65))
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local fresh = {}
for i = 3, #ARGV, 2 do fresh[ARGV[i]] = tonumber(ARGV[i + 1]) end
local old = redis.call('HGETALL', KEYS[3])
for i = 1, #old, 2 do
  local field, before = old[i], tonumber(old[i + 1])
  local after = fresh[field] or 0
  if after ~= before and redis.call('HINCRBY', KEYS[1], field, after - before) == 0 then
    redis.call('HDEL', KEYS[1], field)
  end
  if after == 0 then redis.call('HDEL', KEYS[3], field) else redis.call('HSET', KEYS[3], field, after) end
  fresh[field] = nil
end
for field, amount in pairs(fresh) do
  if amount ~= 0 then
    redis.call('HINCRBY', KEYS[1], field, amount)
    redis.call('HSET', KEYS[3], field, amount)
  end
end
-- Of routers whose lease has run out, one table a call.
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1]
if dead and dead ~= ARGV[1] then
  local table_key = string.gsub(KEYS[3], 'chg:.*$', '') .. 'chg:' .. dead
  local left = redis.call('HGETALL', table_key)
  for i = 1, #left, 2 do
    if redis.call('HINCRBY', KEYS[1], left[i], -tonumber(left[i + 1])) == 0 then
      redis.call('HDEL', KEYS[1], left[i])
    end
  end
  redis.call('DEL', table_key)
  redis.call('ZREM', KEYS[2], dead)
end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
return now
