-- Corrects a charge by what the request has really used.
-- KEYS: as in records.lua
-- ARGV: owner, tokens charged (where the record is gone), prompt tokens, output tokens used by all routers so far,
--       served (1), finished (1: nobody will go on with it), tokens a minute, certain (0: the charge may not have been applied)
-- A bucket that has run empty meanwhile takes only what was used beyond the estimate.
local LET_GO_MS = 60000  -- how long a client may take to go on elsewhere
local owner, prompt, output = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local served, finished = ARGV[5] == '1', ARGV[6] == '1'

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
  if not ours and ARGV[8] == '0' and not was_applied('charge:' .. owner) then return {} end
  requests = served and 0 or -1
  more = prompt + output - (ours and tonumber(record[2]) or tonumber(ARGV[2]))
  if ours and not finished then
    call('HSET', KEYS[2], 'owner', '', 'charged', prompt + output, 'prompt', prompt)
    keep(KEYS[2], LET_GO_MS)
  elseif ours and tonumber(record[3]) > 0 then
    call('HSET', KEYS[2], 'owner', 'done')  -- those it was taken from may not have settled yet
    keep(KEYS[2], LET_GO_MS)
  elseif ours then
    forget(KEYS[2])
  end
end

local kept = call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
if not kept[3] then
  if more <= 0 and requests <= 0 then return {} end
  kept = {'0', '0', now}
end
local used = math.max(0, tonumber(kept[2]) + more)
call('HSET', KEYS[1], 'requests', tostring(math.max(0, tonumber(kept[1]) + requests)),
  'tokens', tostring(used), 'at', kept[3])
keep(KEYS[1], math.max(60000, math.ceil(used * 60000 / math.max(1, tonumber(ARGV[7])))) + 1000)
return {}
