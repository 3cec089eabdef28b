-- KEYS: owners, sequences   ARGV: prefix, slot, owner (worker@epoch; with an index_url as in claim.lua), sequence, ttl_ms, then (held, chain) pairs
-- -> 'ok' | 'register' | the sequence number to resend from | {how many of the chains were taken}: the rest is to be sent under
-- the same number, so that a batch of deep chains does not hold Redis. A batch that is repeated is applied again until it is whole.
local NODES = 512  -- looked at in a call, or those of one chain
local prefix, slot, owner, sequence, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST = 6  -- of the pairs
if redis.call('HGET', KEYS[1], slot) ~= owner then return 'register' end
local expected = tonumber(redis.call('HGET', KEYS[2], slot) or '1')
-- No effect, but refused: by a replica, whose 'ok' would lose the batch, and by a full Redis, which the index may not fill more.
redis.call('HSET', KEYS[2], slot, expected)
if sequence > expected then return expected end
if sequence == expected then
  local now, slots, visited = now_ms(), {slot}, 0
  for i = FIRST, #ARGV, 2 do
    visited = visited + insert(prefix, ARGV[i + 1], slots, tonumber(ARGV[i]), true, 0, now + ttl_ms)
    if visited >= NODES and i + 2 < #ARGV then return {(i - FIRST) / 2 + 1} end
  end
  redis.call('HSET', KEYS[2], slot, expected + 1)
end
return 'ok'
