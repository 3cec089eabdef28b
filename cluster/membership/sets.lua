-- The sorted sets from which placement takes its candidates, by KV group:
--   set:<group>:p  prefill worker -> prompt tokens that wait there
--   set:<group>:r  decode worker  -> tokens resident there
--   set:<group>:f  decode worker  -> the same less its capacity: the one with most room first
--   set:<group>:l  decode worker  -> prompt tokens that wait there
-- and p and r of the workers of one place (p:<place>) and of one rack (p:rack:<rack>).
-- Members are worker_id@epoch. A worker is in its sets while it is registered, does not drain and is not dead. `load` is the
-- truth: scores are read from it where a worker enters, and follow it with XX, so that nothing brings back a worker that left.
-- facts: worker_id@epoch -> the packed form of cluster/membership/facts.py.
local FACTS = '>BBI4dc12c12c12Bc12'
local FACTS_FORMAT = 1
local NOWHERE = '000000000000'

-- The prefix of the sets' names, capacity, place, whether it prefills, rack (nil: unknown); nil: of another format.
local function sets_of(tag, facts)
  if string.byte(facts, 1) ~= FACTS_FORMAT then return nil end
  local _, _, _, capacity, place, rack, _, role, group = struct.unpack(FACTS, facts)
  return tag .. 'set:' .. group .. ':', capacity, place, role == 0, rack ~= NOWHERE and rack or nil
end

-- Sets the score of a worker in the sets of all, of its place and of its rack; how: 'XX' where it must be in them, or 'CH'.
local function score(set, place, rack, how, value, name)
  redis.call('ZADD', set, how, value, name)
  redis.call('ZADD', set .. ':' .. place, how, value, name)
  if rack then redis.call('ZADD', set .. ':rack:' .. rack, how, value, name) end
end

local function with_slot(facts, slot)
  return string.sub(facts, 1, 2) .. struct.pack('>I4', slot) .. string.sub(facts, 7)
end

local function enter_own(tag, name, facts)
  local set, capacity, place, prefills, rack = sets_of(tag, facts)
  if not set then return end
  local loads = redis.call('HMGET', tag .. 'load', 'p:' .. name, 'd:' .. name)
  local pending, resident = tonumber(loads[1] or 0), tonumber(loads[2] or 0)
  if prefills then
    score(set .. 'p', place, rack, 'CH', pending, name)
  else
    score(set .. 'r', place, rack, 'CH', resident, name)
    redis.call('ZADD', set .. 'f', resident - capacity, name)
    redis.call('ZADD', set .. 'l', pending, name)
  end
end

local function is_in(tag, name, facts)
  local set, _, _, prefills = sets_of(tag, facts)
  return not set or redis.call('ZSCORE', set .. (prefills and 'p' or 'r'), name)
end

local function exit(tag, name, facts)
  local set, _, place, prefills, rack = sets_of(tag, facts)
  if not set then return end
  local kind = prefills and 'p' or 'r'
  local from = {kind, kind .. ':' .. place, 'f', 'l', rack and kind .. ':rack:' .. rack}
  for i = 1, #from do redis.call('ZREM', set .. from[i], name) end
end

-- The load's field of a worker has a new value: 'p' what waits there, 'd' what is resident.
local function follow(tag, kind, name, facts, value)
  local set, capacity, place, prefills, rack = sets_of(tag, facts)
  if not set then
    return
  elseif kind == 'd' then
    score(set .. 'r', place, rack, 'XX', value, name)
    redis.call('ZADD', set .. 'f', 'XX', value - capacity, name)
  elseif prefills then
    score(set .. 'p', place, rack, 'XX', value, name)
  else
    redis.call('ZADD', set .. 'l', 'XX', value, name)
  end
end

-- Routers name the candidates of a fleet with at most so many workers of a role (MAX_LISTED in router/placement/
-- eligibility.py), and their placements leave the sets as they are.
local SMALL = 64

-- Puts a worker into its sets. Where the fleet is no longer small, all others are scored anew.
local function enter(tag, name, facts)
  enter_own(tag, name, facts)
  local set, _, _, prefills = sets_of(tag, facts)
  if not set then return end
  local own, other = set .. (prefills and 'p' or 'r'), set .. (prefills and 'r' or 'p')
  if redis.call('ZCARD', own) ~= SMALL + 1 or redis.call('ZCARD', other) > SMALL then return end
  for _, all in ipairs({own, other}) do
    for _, member in ipairs(redis.call('ZRANGE', all, 0, -1)) do
      local its = redis.call('HGET', tag .. 'facts', member)
      if its then enter_own(tag, member, its) end
    end
  end
end

-- The generation of the registry: another one whenever a worker comes, goes, drains or is found dead. It follows the clock,
-- so that a Redis that was emptied or rolled back never shows a former one again.
local function changed(tag)
  local t = redis.call('TIME')
  local before = tonumber(redis.call('GET', tag .. 'generation') or 0) or 0
  redis.call('SET', tag .. 'generation', string.format('%.0f', math.max(before + 1, t[1] * 1000000 + t[2])))
end
