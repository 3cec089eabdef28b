-- KEYS: router_reports   ARGV: router_id report forget_after_ms
-- Stores this router's report (empty: it leaves); returns id, age in ms and report of every router.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function store(id, report) redis.call('HSET', KEYS[1], id, string.format('%.0f ', now) .. report) end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  store(ARGV[1], ARGV[2])
end
local reports = redis.call('HGETALL', KEYS[1])
local out = {}
for i = 1, #reports, 2 do
  local at, report = string.match(reports[i + 1], '^(%d+) (.*)$')
  local age = at and now - tonumber(at)
  if not age or age > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], reports[i])
  else
    if age < 0 then  -- after a failover the clock may be behind: a router that has ended would be shown for as long
      age = 0
      store(reports[i], report)
    end
    out[#out + 1] = reports[i]
    out[#out + 1] = age
    out[#out + 1] = report
  end
end
return out
