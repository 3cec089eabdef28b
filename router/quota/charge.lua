-- Charges a request to its tenant's buckets, or says when it may come again.
-- KEYS: quota:<tenant>   ARGV: requests a minute, tokens a minute (0 = no limit), tokens expected
-- -> {0, 0}, or {1 = requests | 2 = tokens, milliseconds until there is room}; then nothing was charged
-- A bucket holds what has been used and leaks a minute's worth a minute: an empty Redis forgives, and a limit that
-- changes counts at once.
local call = redis.call
local t = call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local costs = {1, tonumber(ARGV[3])}
local kept = call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(kept[3]) or now))
local used = {tonumber(kept[1]) or 0, tonumber(kept[2]) or 0}
for i = 1, 2 do
  if limits[i] > 0 then
    used[i] = math.max(0, used[i] - passed * limits[i] / 60000)
    -- What is larger than a whole bucket is let in when the bucket is empty, and paid for afterwards.
    local over = used[i] + math.min(costs[i], limits[i]) - limits[i]
    if over > 0.001 then return {i, math.ceil(over * 60000 / limits[i])} end
  else
    used[i] = 0
  end
end
local expire = 1000
for i = 1, 2 do
  if limits[i] > 0 then
    used[i] = used[i] + costs[i]
    expire = math.max(expire, math.ceil(used[i] * 60000 / limits[i]) + 1000)
  end
end
call('HSET', KEYS[1], 'requests', tostring(used[1]), 'tokens', tostring(used[2]), 'at', now)
call('PEXPIRE', KEYS[1], expire)
return {0, 0}
