-- The prefix index in a Redis of its own: which workers hold how much of a prompt. cluster/index/tree.lua and walk.lua are put in
-- front; walked.lua and held.lua come behind.
-- KEYS: owners   ARGV: prefix of the index's keys, chain, feeds of the index, random number and ttl_ms (8-byte doubles, packed), slots of
-- the candidates (4-byte numbers, packed), or '' where control takes them from its sets
local prefix, chain, feeds = ARGV[1], ARGV[2], ARGV[3]
local random, ttl = struct.unpack('>dd', ARGV[4])
local listed, now = #ARGV[5] > 0, now_ms()
