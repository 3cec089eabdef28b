-- A worker's slot in a prefix index that has a Redis of its own.
-- KEYS: owners, sequences, seen, past, last   ARGV: slot, owner (worker@epoch:nonce; the nonce differs with each process and registration),
-- "claim" | "keep" | "leave"; forget_ms, kept_ms; with "claim" the slot and the owner that this worker claimed before, if any
-- -> claim: "ok"; or, if nodes may still name this slot for an earlier owner (the registry was emptied or rolled back since), the highest
--    slot that was ever claimed. The worker then registers above it.
--    keep: the highest slot that was ever claimed, or "lost" if this Redis does not have the claim. leave: "ok" or "lost"
-- A repeated claim succeeds, because the answer to the first one may have been lost.
local SWEPT = 16
local call = redis.call
local slot, owner, what = ARGV[1], ARGV[2], ARGV[3]
local t = call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local last = tonumber(call('GET', KEYS[5]) or 0)
local function drop(one)
  call('HDEL', KEYS[1], one)
  call('HDEL', KEYS[2], one)
  call('ZREM', KEYS[3], one)
  call('ZADD', KEYS[4], now, one)
end
if call('HGET', KEYS[1], slot) ~= owner then
  if what ~= 'claim' then return 'lost' end
  if call('ZSCORE', KEYS[3], slot) or call('ZSCORE', KEYS[4], slot) then return last end
  call('HSET', KEYS[1], slot, owner)
  if tonumber(slot) > last then call('SET', KEYS[5], slot) end
  if ARGV[6] and call('HGET', KEYS[1], ARGV[6]) == ARGV[7] then drop(ARGV[6]) end
elseif what == 'leave' then
  drop(slot)
  return 'ok'
end
call('ZADD', KEYS[3], now, slot)
-- The slots of workers that were killed, and slots that no node names any more.
local silent = call('ZRANGE', KEYS[3], '-inf', now - ARGV[4], 'BYSCORE', 'LIMIT', 0, SWEPT)
for i = 1, #silent do drop(silent[i]) end
local gone = call('ZRANGE', KEYS[4], '-inf', now - ARGV[5], 'BYSCORE', 'LIMIT', 0, SWEPT)
for i = 1, #gone do call('ZREM', KEYS[4], gone[i]) end
return what == 'keep' and last or 'ok'
