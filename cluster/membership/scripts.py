"""The registry's scripts (Redis ≥ 6.2). Times are Redis's: clocks of machines are never compared."""

from __future__ import annotations

from importlib import resources

# In front of every script: the sets of candidates, and `tag`, the prefix of all keys.
SETS = resources.files("cluster.membership").joinpath("sets.lua").read_text()
_HEAD = (
    SETS
    + """
local tag = string.sub(KEYS[1], 1, -8)
-- The worker that a registration is of, and its facts, are removed from the candidates.
local function no_candidate(id, registration, forget)
  local epoch = string.match(registration, '"epoch": ?"(%x+)"')
  local name = epoch and id .. '@' .. epoch
  local facts = name and redis.call('HGET', KEYS[8], name)
  if not facts then return end
  exit(tag, name, facts)
  if forget then redis.call('HDEL', KEYS[8], name) end
end
"""
)

# KEYS: members leases status slots owners drains sequences facts generation
# ARGV: worker_id name(worker@epoch) registration status process "exit" | "stay" | "" (it drains; does not) facts above
# → slot, greater than `above`: a prefix index apart remembers slots that this Redis may have forgotten. A worker that
# registers again gets a new slot, so index entries under its old one are stale at once. A request to drain an earlier
# process of this name is deleted.
REGISTER = (
    _HEAD
    + """
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  no_candidate(ARGV[1], old, true)
  local last = string.match(old, '"slot": ?(%d+)')
  if last then
    redis.call('HDEL', KEYS[5], last)
    redis.call('HDEL', KEYS[7], last)
  end
end
local slot, above = redis.call('INCR', KEYS[4]), tonumber(ARGV[8] or 0)
if slot <= above then
  slot = above + 1
  redis.call('SET', KEYS[4], slot)
end
local registration = string.gsub(ARGV[3], '"slot": ?0', '"slot": ' .. slot, 1)
redis.call('HSET', KEYS[1], ARGV[1], registration)
redis.call('ZADD', KEYS[2], ms, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
redis.call('HSET', KEYS[5], slot, ARGV[2])
local drain = redis.call('HGET', KEYS[6], ARGV[1])
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[6], ARGV[1], ARGV[5] .. ':' .. ARGV[6])
elseif drain and string.match(drain, '^[^:]*') ~= ARGV[5] then
  redis.call('HDEL', KEYS[6], ARGV[1])
end
local facts = with_slot(ARGV[7], slot)
redis.call('HSET', KEYS[8], ARGV[2], facts)
if redis.call('HEXISTS', KEYS[6], ARGV[1]) == 0 then enter(tag, ARGV[2], facts) end
changed(tag)
return slot
"""
)

# Same keys   ARGV: worker_id name slot status
# → "exit" | "stay" (it is to drain), "" renewed, false: register again (Redis lost it or a part of it, was rolled back, or
# another epoch has the name). A worker that was found dead is a candidate again.
RENEW = (
    _HEAD
    + """
if redis.call('HGET', KEYS[5], ARGV[3]) ~= ARGV[2] then return false end
local registration, epoch = redis.call('HGET', KEYS[1], ARGV[1]), string.match(ARGV[2], '[^@]*$')
if not registration or not string.find(registration, '"' .. epoch .. '"', 1, true) then return false end
local facts, drain = redis.call('HGET', KEYS[8], ARGV[2]), redis.call('HGET', KEYS[6], ARGV[1])
if not facts then return false end
if not drain and not is_in(tag, ARGV[2], facts) then
  enter(tag, ARGV[2], facts)
  changed(tag)
end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[2], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
return string.match(drain or '', '[^:]*$')
"""
)

# Same keys   ARGV: worker_id name slot
LEAVE = (
    _HEAD
    + """
if redis.call('HGET', KEYS[5], ARGV[3]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[3])
redis.call('HDEL', KEYS[7], ARGV[3])
redis.call('HDEL', KEYS[6], ARGV[1])
local facts = redis.call('HGET', KEYS[8], ARGV[2])
if facts then exit(tag, ARGV[2], facts) end
redis.call('HDEL', KEYS[8], ARGV[2])
changed(tag)
return 1
"""
)

# Same keys   ARGV: worker_id "exit" | "stay"
# → 0 not registered, 1 marked, 2 was marked already. It gets no more requests from now on.
DRAIN = (
    _HEAD
    + """
local registration = redis.call('HGET', KEYS[1], ARGV[1])
if not registration then return 0 end
local process = string.match(registration, '"process": ?"([^"]*)"') or ''
local old = redis.call('HGET', KEYS[6], ARGV[1])
if old and string.match(old, '^[^:]*') == process then return 2 end
redis.call('HSET', KEYS[6], ARGV[1], process .. ':' .. ARGV[2])
no_candidate(ARGV[1], registration, false)
changed(tag)
return 1
"""
)

_ALL = (
    _HEAD
    + """
redis.call('HDEL', KEYS[1], '')
local FORGOTTEN = 64  -- dead workers in one call; the others are answered as dead
-- After a failover the clock may be behind: a lease that lies in the future would not run out for as long.
local function lower(ms)
  local ahead = redis.call('ZRANGE', KEYS[2], string.format('(%.0f', ms), '+inf', 'BYSCORE', 'LIMIT', 0, 256)
  for i = 1, #ahead do redis.call('ZADD', KEYS[2], ms, ahead[i]) end
end
local function describe(out, id, registration, seen)
  out[#out + 1] = id
  out[#out + 1] = registration
  out[#out + 1] = seen
  out[#out + 1] = redis.call('HGET', KEYS[3], id) or '{}'
  out[#out + 1] = string.match(redis.call('HGET', KEYS[6], id) or '', '[^:]*$')
end
local function all(forget_after)
  local now = redis.call('TIME')
  local ms = now[1] * 1000 + math.floor(now[2] / 1000)
  lower(ms)
  local forgotten = 0
  local out = {ms, tonumber(redis.call('GET', KEYS[4]) or '0') or 0}
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local id = all[i]
    local seen = tonumber(redis.call('ZSCORE', KEYS[2], id) or '0')
    if ms - seen > forget_after and forgotten < FORGOTTEN then
      forgotten = forgotten + 1
      local slot = string.match(all[i + 1], '"slot": ?(%d+)')
      no_candidate(id, all[i + 1], true)
      redis.call('HDEL', KEYS[1], id)
      redis.call('ZREM', KEYS[2], id)
      redis.call('HDEL', KEYS[3], id)
      redis.call('HDEL', KEYS[6], id)
      if slot then
        redis.call('HDEL', KEYS[5], slot)
        redis.call('HDEL', KEYS[7], slot)
      end
    else
      describe(out, id, all[i + 1], seen)
    end
  end
  -- Leases whose registrations were lost: nothing else would end them, and for one that is overdue routers read all again.
  local old = redis.call('ZRANGE', KEYS[2], '-inf', ms - forget_after - 1, 'BYSCORE', 'LIMIT', 0, FORGOTTEN)
  for i = 1, #old do
    if redis.call('HEXISTS', KEYS[1], old[i]) == 0 then redis.call('ZREM', KEYS[2], old[i]) end
  end
  if forgotten > 0 then changed(tag) end
  return out
end
"""
)

# Same keys   ARGV: forget_after_ms
# → now_ms, the last slot assigned, then worker_id, registration, last renewal ms, status, "exit" | "stay" | "" (drains?)
# for each. Workers dead for long are deleted. The first call has no effect on a master, but a replica refuses it: a router
# must not act on the view of a server that was demoted.
READ = _ALL + "return all(tonumber(ARGV[1]))"

# Same keys   ARGV: worker_ids
# → READ's answer about these, without what is not registered
NAMED = (
    _ALL
    + """
local now = redis.call('TIME')
local out = {now[1] * 1000 + math.floor(now[2] / 1000), tonumber(redis.call('GET', KEYS[4]) or '0') or 0}
lower(out[1])
for i = 1, #ARGV do
  local registration = redis.call('HGET', KEYS[1], ARGV[i])
  if registration then
    describe(out, ARGV[i], registration, tonumber(redis.call('ZSCORE', KEYS[2], ARGV[i]) or '0'))
  end
end
return out
"""
)

# Same keys   ARGV: forget_after_ms, the generation that was read last ('': none), age_ms of an overdue lease
# → the generation, then READ's answer if it is another one; else false, now_ms, and worker_id and last renewal of each
# overdue lease
LOOK = (
    _ALL
    + """
local generation = redis.call('GET', KEYS[9]) or ''
if generation == '' or generation ~= ARGV[2] then
  local out = all(tonumber(ARGV[1]))
  return {redis.call('GET', KEYS[9]) or '', out}
end
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
lower(ms)
return {generation, false, ms, redis.call('ZRANGE', KEYS[2], '-inf', ms - ARGV[3], 'BYSCORE', 'WITHSCORES')}
"""
)
