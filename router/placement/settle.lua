-- A router reports which of its attempts have computed their prompt, which have ended, and which Redis does not have, with
-- its lease. sets.lua and charges.lua are put in front.
-- KEYS: load, routers, chg:<router>:<run>, answers:<router>, runs
-- ARGV:
--   1 router, 2 lease_ms, 3 run (0: none yet), 4 number of this call, 5 number of the oldest placement still awaited
--   6 cursor of a walk over the table ('': no walk)
--   7 number of prefilled ids, 8 number of released ids, then these ids, then (id, packed charge) pairs that are added
-- -> a new run if it had none (nothing else is done), or a list: status, fields that are no charges and were skipped,
--    whether tables of dead routers are left, cursor of the walk, ids…
--    status 0: applied, now or before, or older than what is applied; -1: Redis has a later run of this router;
--    -2: Redis has no table of this run. After -1 and -2 nothing was applied; the router takes a new run, and adds all its
--    charges.
-- answers: run, settled (number of the last call), before (the last run that settled before this one), from (placements
-- below it are void), then answers by number
-- routers: <router>:<run> -> when its lease ends; of a table that is being dropped, 0
local WALKED = 256  -- charges in one step of a walk
local SWEPT = 128  -- charges of dead routers dropped in a call; a small table is dropped whole
local AHEAD = 64  -- leases that are shortened in a call
local call = redis.call
local router, lease_ms, run, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local oldest_awaited, walk_from = ARGV[5], ARGV[6]
local prefilled, released = tonumber(ARGV[7]), tonumber(ARGV[8])
local FIRST = 9  -- of the ids
local t = call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local known = call('HMGET', KEYS[4], 'run', 'settled', 'before')
local latest = tonumber(known[1] or 0)
if run == 0 then
  local given = math.max(call('INCR', KEYS[5]), latest + 1)
  call('SET', KEYS[5], given)
  local before = tonumber(known[2] or 0) > 0 and latest or known[3] or 0
  call('DEL', KEYS[4])
  call('HSET', KEYS[4], 'run', given, 'settled', 0, 'before', before)
  call('ZADD', KEYS[2], now + lease_ms, router .. ':' .. given)
  return given
end
if run < latest then return {-1, 0, 0, ''} end
if run > latest or not known[2] then return {-2, 0, 0, ''} end

local skipped = 0
local function drop(table, id, packed)
  local class, prefill, decode, p, d = unpack_charge(packed)
  if class then
    count(class, -prefill, -decode, p, d)
  else
    skipped = skipped + 1
  end
  call('HDEL', table, id)
end

if number > tonumber(known[2]) then
  call('HSET', KEYS[4], 'settled', number, 'from', oldest_awaited)
  -- The run before ends here, not where the new one is given out: that call may be a late repetition.
  if known[2] == '0' then call('ZADD', KEYS[2], 'XX', 0, router .. ':' .. (known[3] or 0)) end
  for i = FIRST + prefilled + released, #ARGV, 2 do
    local before = call('HGET', KEYS[3], ARGV[i])
    if before then drop(KEYS[3], ARGV[i], before) end
    local class, prefill, decode, p, d = unpack_charge(ARGV[i + 1])
    count(class, prefill, decode, p, d)
    call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  end
  if prefilled > 0 then
    local held = call('HMGET', KEYS[3], unpack(ARGV, FIRST, FIRST + prefilled - 1))
    for i = 1, prefilled do
      if held[i] then
        local class, prefill, decode, p, d = unpack_charge(held[i])
        if not class then
          skipped = skipped + 1
        elseif prefill > 0 then
          count(class, -prefill, 0, p, d)
          call('HSET', KEYS[3], ARGV[FIRST + i - 1], pack_charge(class, 0, decode, p, d))
        end
      end
    end
  end
  if released > 0 then
    local first = FIRST + prefilled
    local held = call('HMGET', KEYS[3], unpack(ARGV, first, first + released - 1))
    for i = 1, released do
      if held[i] then drop(KEYS[3], ARGV[first + i - 1], held[i]) end
    end
  end
end
call('ZADD', KEYS[2], now + lease_ms, router .. ':' .. run)

-- The walk comes after the changes: what is released here is not shown as left over.
local cursor, ids = '', {}
if walk_from ~= '' then
  local step = call('HSCAN', KEYS[3], walk_from, 'COUNT', WALKED)
  cursor = step[1]
  for i = 1, #step[2], 2 do ids[#ids + 1] = step[2][i] end
  -- After a failover the clock may be behind: the lease of a dead router would not run out for as long.
  local ahead = call('ZRANGE', KEYS[2], string.format('(%.0f', now + lease_ms), '+inf', 'BYSCORE', 'LIMIT', 0, AHEAD)
  for i = 1, #ahead do call('ZADD', KEYS[2], now + lease_ms, ahead[i]) end
end

-- One value above 64 bytes makes Redis store `load` as a hash table: in a listpack each lookup would be a linear search.
call('HSET', KEYS[1], '', string.rep('0', 65))
local tag, facts = string.sub(KEYS[1], 1, -5), {}
apply(tag, facts)

-- Of a router whose lease has run out, some charges a call. Its run is forgotten first: if it returns, it takes a new one.
local dead, more = call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1], 0
if dead then
  local table = tag .. 'chg:' .. dead
  local name, its_run = string.match(dead, '^(.*):(%d+)$')
  local answers = tag .. 'answers:' .. (name or dead)
  if not name or redis.pcall('HGET', answers, 'run') == its_run then call('DEL', answers) end
  call('ZADD', KEYS[2], 'XX', 0, dead)
  -- What is dropped leaves empty buckets, which a scan from the start passes.
  local at, left = 0, {}
  repeat
    local step = redis.pcall('HSCAN', table, at, 'COUNT', SWEPT)
    if step.err then  -- no hash: it holds no charges
      call('DEL', table)
      break
    end
    at, left = step[1], step[2]
  until #left > 0 or at == '0'
  for i = 1, #left, 2 do
    local amount = tonumber(left[i + 1])  -- versions before charges had ids wrote amounts by field of `load`
    if amount then
      change(left[i], -amount)
      call('HDEL', table, left[i])
    else
      drop(table, left[i], left[i + 1])
    end
  end
  if call('EXISTS', table) == 0 then
    call('ZREM', KEYS[2], dead)
    dead = call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1]
  end
  more = dead and 1 or 0
  apply(tag, facts)
end

return {0, skipped, more, cursor, unpack(ids)}
