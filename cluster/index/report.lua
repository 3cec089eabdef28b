-- KEYS: owners, sequences   ARGV: prefix, slot, name(worker@epoch), sequence, ttl_ms, then (held, chain) pairs
-- -> 'ok' | 'register' | the sequence number to resend from
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return 'register' end
local sequence = tonumber(ARGV[4])
local expected = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '1')
-- No effect, but refused: by a replica, whose 'ok' would lose the batch, and by a full Redis, which the index may not fill more.
redis.call('HSET', KEYS[2], ARGV[2], expected)
if sequence > expected then return expected end
if sequence == expected then
  local now, slots = now_ms(), {ARGV[2]}
  for i = 6, #ARGV, 2 do
    insert(ARGV[1], ARGV[i + 1], slots, tonumber(ARGV[i]), true, 0, now + tonumber(ARGV[5]))
  end
  redis.call('HSET', KEYS[2], ARGV[2], expected + 1)
end
return 'ok'
