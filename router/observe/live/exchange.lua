-- KEYS: router_reports   ARGV: router_id report forget_after_ms
-- Stores this router's report (empty: it leaves); returns id, age in ms and report of every router.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now) .. ARGV[2])
end
local reports = redis.call('HGETALL', KEYS[1])
local out = {}
for i = 1, #reports, 2 do
  local at, report = string.match(reports[i + 1], '^(%d+) (.*)$')
  if not at or now - tonumber(at) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], reports[i])
  else
    out[#out + 1] = reports[i]
    out[#out + 1] = now - tonumber(at)
    out[#out + 1] = report
  end
end
return out
