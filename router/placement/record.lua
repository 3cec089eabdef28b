-- The prefix index in a Redis of its own: the blocks that are expected at the workers of a placement. cluster/index/tree.lua is put in
-- front.
-- KEYS: owners   ARGV: prefix of the index's keys, chain, predict_ms and ttl_ms (8-byte doubles, packed), feeds of the index, '1' if nodes
-- that are there expire as before, slots…
local chain, now = ARGV[2], now_ms()
local predict, ttl = struct.unpack('>dd', ARGV[3])
local slots = {unpack(ARGV, 6)}
insert(ARGV[1], chain, slots, #chain / 8, false, now + predict, now + ttl, nil, ARGV[5] == '1', ARGV[4] == 'predicted')
