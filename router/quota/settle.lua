-- Corrects a charge by what the request has really used.
-- KEYS: quota:<tenant>   ARGV: requests to give back, tokens to give back (negative: more was used), tokens a minute
-- A bucket that has run empty meanwhile takes only what was used beyond the estimate.
local kept = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local more = -tonumber(ARGV[2])
if not kept[3] then
  if more <= 0 then return 0 end
  local t = redis.call('TIME')
  kept = {'0', '0', t[1] * 1000 + math.floor(t[2] / 1000)}
end
local used = math.max(0, tonumber(kept[2]) + more)
redis.call('HSET', KEYS[1], 'requests', tostring(math.max(0, tonumber(kept[1]) - tonumber(ARGV[1]))),
  'tokens', tostring(used), 'at', kept[3])
local expire = math.max(60000, math.ceil(used * 60000 / math.max(1, tonumber(ARGV[3])))) + 1000
redis.call('PEXPIRE', KEYS[1], expire)
return 0
