-- Charges a request to its tenant's buckets, takes another router's charge over, or returns the time until it may be retried.
-- KEYS: as in records.lua
-- ARGV: requests a minute, tokens a minute (0 = no limit), tokens expected,
--       owner, again (1: another router may have charged it), tokens its client holds, ms the record is kept
-- -> {0, 0, taken over}, or {1 = requests | 2 = tokens, milliseconds until there is room, 0}; then nothing was charged
-- A bucket holds what has been used and leaks a minute's worth a minute: an empty Redis forgives, and a limit that
-- changes counts at once. A request under a key without one of the limits leaves that bucket as it is.
local MAX_ROUTERS = 16  -- that one charge may be taken over by: a client goes through each router twice at most
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local expected, owner, again = tonumber(ARGV[3]), ARGV[4], ARGV[5] == '1'
local held, kept_ms = tonumber(ARGV[6]), tonumber(ARGV[7])
if limits[2] == 0 then expected = 0 end  -- what the bucket is charged

local record = call('HMGET', KEYS[2], 'owner', 'charged', 'times', 'prompt')
local before, charged, times = record[1], tonumber(record[2]) or 0, tonumber(record[3]) or 0
if was_applied('settle:' .. owner) or was_applied('charge:' .. owner) then
  return {0, 0, (before == owner and times > 0) and 1 or 0}
end
local taken = again and before and before ~= 'done' and times < MAX_ROUTERS
local costs = {1, expected}
if taken then
  costs[1] = times > 0 and 1 or 0  -- free once: a router died; a ticket that is replayed pays each time
  if before == '' then
    -- The router before has settled what it used. That pays for the prompt and the tokens that the client resumes with;
    -- what it does not resume with is made again, and charged again: one ticket must not run a request many times.
    charged = held > 0 and math.min(charged, (tonumber(record[4]) or 0) + held) or 0
    if held == 0 then costs[1] = 1 end
  end
  costs[2] = math.max(0, expected - charged)
end

local buckets = read_buckets()
local used = {0, 0}
for i = 1, 2 do
  if limits[i] > 0 then
    local at = buckets[i].at or now
    if at > now then  -- after a failover to a Redis whose clock is behind, nothing would leak until it caught up
      at = now
      write_bucket(i, buckets[i].used, now)
    end
    used[i] = math.max(0, buckets[i].used - (now - at) * limits[i] / 60000)
    -- What is larger than a whole bucket is let in when the bucket is empty, and paid for afterwards.
    local over = used[i] + math.min(costs[i], limits[i]) - limits[i]
    -- Half an answer is never refused: it was let in. Neither is what costs nothing, also where more than all is used.
    if costs[i] > 0 and over > 0.001 and not taken then
      -- The tenant may have used far more under a key with a higher limit. The bucket then expires before that much would
      -- have leaked at this key's rate.
      local ends = tonumber(call('ZSCORE', KEYS[3], KEYS[1]) or 0)
      local wait = math.ceil(over * 60000 / limits[i])
      return {i, ends > now and math.min(wait, ends - now) or wait, 0}
    end
  end
end
local expire = 1000
for i = 1, 2 do
  if limits[i] > 0 then
    used[i] = used[i] + costs[i]
    expire = math.max(expire, math.ceil(used[i] * 60000 / limits[i]) + 1000)
    write_bucket(i, used[i], now)
  end
end
applied('charge:' .. owner)
keep_buckets(expire, limits)

if taken then
  -- -1: taken without a token, and its request is charged already
  local with = held == 0 and costs[1] == 1 and -1 or held
  if before ~= '' then call('HSET', KEYS[2], 'taken:' .. before, with) end
  call('HSET', KEYS[2], 'owner', owner, 'charged', charged + costs[2], 'times', times + 1)
else
  -- A request of the same name and prompt that is charged already is another one: it settles by what it remembers.
  call('HSET', KEYS[2], 'owner', owner, 'charged', expected, 'times', 0)
end
keep(KEYS[2], kept_ms)
return {0, 0, taken and 1 or 0}
