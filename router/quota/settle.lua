-- Corrects a charge by what the request has really used.
-- KEYS: as in records.lua
-- ARGV: owner, tokens charged (where the record is gone), prompt tokens, output tokens used by all routers so far,
--       served (1), finished (1: nobody will go on with it), tokens a minute, certain (0: the charge may not have been applied),
--       requests a minute
-- A bucket that has run empty meanwhile takes only what was used beyond the estimate. A bucket without a limit is left as it is.
local LET_GO_MS = 60000  -- how long a client may take to go on elsewhere
local owner, charged, prompt, output = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local served, finished, certain = ARGV[5] == '1', ARGV[6] == '1', ARGV[8] == '1'
local limits = {tonumber(ARGV[9]), tonumber(ARGV[7])}

if was_applied('settle:' .. owner) then return {} end
applied('settle:' .. owner)  -- also if nothing was charged: a charge that arrives after this is void

local record = call('HMGET', KEYS[2], 'owner', 'charged', 'times', 'taken:' .. owner)
local requests, more
if record[4] then
  -- Another router went on with it and settles our charge. Ours has used something more all the same: tokens that
  -- its client did not take along, or everything, if it took none.
  local held = tonumber(record[4])
  requests = (held == 0 and served) and 1 or 0
  more = held > 0 and math.max(0, output - held) or prompt + output
  call('HDEL', KEYS[2], 'taken:' .. owner)
else
  local ours = record[1] == owner
  if not ours and not certain and not was_applied('charge:' .. owner) then return {} end
  requests = served and 0 or -1
  more = prompt + output - (ours and tonumber(record[2]) or charged)
  if ours and not finished then
    call('HSET', KEYS[2], 'owner', '', 'charged', limits[2] > 0 and prompt + output or 0, 'prompt', prompt)
    keep(KEYS[2], LET_GO_MS)
  elseif ours and tonumber(record[3]) > 0 then
    call('HSET', KEYS[2], 'owner', 'done')  -- those it was taken from may not have settled yet
    keep(KEYS[2], LET_GO_MS)
  elseif ours then
    forget(KEYS[2])
  end
end

local buckets, changes, expire = read_buckets(), {requests, more}, nil
for i = 1, 2 do
  local bucket = buckets[i]
  if limits[i] > 0 and (bucket.at or changes[i] > 0) then
    local used = math.max(0, bucket.used + changes[i])
    write_bucket(i, used, bucket.at or now)
    expire = math.max(expire or 60000, math.ceil(used * 60000 / limits[i]))
  end
end
if expire then keep_buckets(expire + 1000, limits) end
return {}
