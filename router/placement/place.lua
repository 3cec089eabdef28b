-- One placement: match, score, charge, record. One call per dispatch attempt.
-- KEYS: owners, load, routers, calls, chg:<router>:<run>, drains, answers:<router>, facts, leases
-- ARGV:
--   1   prefix of the index's keys
--   2   router
--   3   chain: packed index keys of the prompt's full blocks
--   4   tokens
--   5   page size
--   6   output tokens that are expected
--   7   mode of local prefill (at the decode worker): never | fallback | auto | always
--   8   random number
--   9   a, 10 b: of the cost model
--   11  token_bytes
--   12  bandwidths: bytes per second of pairs that share a clique, a host, a rack, a zone, nothing (8-byte doubles, packed)
--   13  per_token: seconds that a resident token adds to a decode step
--   14  feeds of the index
--   15  ttl_ms of index entries, 16 predict_ms of those that a placement predicts
--   17  rate: prefill tokens per second
--   18  priority class: high | normal | batch
--   19  target and 20 deadline of the first token (seconds, 0 = none)
--   21  run of the router, 22 number of the call, 23 lease_ms of the router
--   24  transfer id
--   25  age_ms of a lease from which a worker is suspect, 26 dead
--   27  packed charge that a former call for the same placement has made, and this one replaces; '': none
--   28  KV group whose sets (sets.lua) the candidates are read from, or where they follow: '' these are all, and nobody reads
--       the sets; '-' some of many
--   29  number of prefill candidates; with a group 1, or 0: none is wanted
--   with a group: 30 names of prefill workers to pass over and 31 of decode workers, each behind a zero byte; 32 how many
--       prefill workers, 33 decode workers these are; 34 how many prefill workers, 35 decode workers the router sees
--   without: 30 slots of the candidates, decode workers first (4-byte numbers, packed), 31 capacities of the decode workers
--       (8-byte doubles, packed), numbers of the candidates' 32 places, 33 racks and 34 zones (a byte each, 0: unknown), 35 what
--       the place of each shares (a byte each: 1 a clique, 2 a host), 36… their fields of `load`
-- -> one packed ANSWER: number of the call, cached tokens at the worker that prefills, at the decode worker, uncached tokens,
--    cost, terms…, prefill worker ('' = the decode worker prefills), a zero byte, decode worker
--    or a list: -3, seconds to the first token: too late, or -4: the best is leaving or has left, read the membership again, or
--    -5: Redis has a later run of this router, or -6: no live worker of a role is among the candidates that the sets
--    name, or -7: the router no longer waits for this call, or has charged the attempt by itself,
--    or -8: the sets hold fewer than half of the workers that the router sees. Then nothing was charged. Calls without a decode worker (-1) or without a pair (-2) are not made.
-- now_ms and insert are those of cluster/index/tree.lua, walk, holders and covered those of walk.lua; sets.lua and charges.lua
-- are in front, too.
-- A repeated call gets its former answer, unless the router has made ANSWERS others since.
-- Candidates live in flat arrays, by index: a table for each of 128 would cost more than all the rest.
local prefix, router, chain = ARGV[1], ARGV[2], ARGV[3]
local L, page, out = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local mode, random = ARGV[7], tonumber(ARGV[8])
local a, b = tonumber(ARGV[9]), tonumber(ARGV[10])
local token_bytes, per_token = tonumber(ARGV[11]), tonumber(ARGV[13])
local feeds, ttl, predict = ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[16])
local rate = tonumber(ARGV[17])
local life, number, lease = tonumber(ARGV[21]), tonumber(ARGV[22]), tonumber(ARGV[23])
local priority_class, target, deadline = ARGV[18], tonumber(ARGV[19]), tonumber(ARGV[20])
local transfer_id, group = ARGV[24], ARGV[28]
local small = group == ''
local listed = small or group == '-'
local bandwidths = {struct.unpack('>ddddd', ARGV[12])}
local LISTED = 36
local ANSWERS = 256
local ANSWER = '>I8I4I4I4dddddd'
local BEST = 8  -- of each role that are paired with each other
local HEADS = 8  -- of each set
-- Where the best pair costs WORTH_LOOKING times what it would without a hand-off, the first WIDE of each set are looked at, once:
-- rare where networks are fast beside prefill. Where they are slow it would be most placements of long prompts: after each such
-- look that has found no pair beyond a tie better, half as many of the router's calls look, one of eight at least.
local WIDE, WORTH_LOOKING, MOST_IN_VAIN = 32, 1.5, 3
local HOLDERS = 8  -- of the prefix, of both roles
local TRIES = 16  -- of pairs whose workers turn out to be gone
local TIE = 1.05
-- One call of eight refreshes the time to live of the nodes that it passes, and looks at SWEPT of their slots for dead owners:
-- a hot node is passed often, and the reports of those that have computed the prompt refresh it too.
local tends = random < 1 / 8
local SWEPT = 16
local call, byte, sub = redis.call, string.byte, string.sub

-- The answer of call n is kept with n in field n % ANSWERS: never more than ANSWERS, even if some calls are refused.
local told = call('HMGET', KEYS[7], 'run', 'from', number % ANSWERS, 'in_vain')
local former_in_vain = tonumber(told[4] or 0)  -- wide looks in a row, up to MOST_IN_VAIN
local latest, kept = tonumber(told[1] or 0), told[3]
if life < latest then return {-5} end
if life > latest then
  call('DEL', KEYS[7])
elseif kept and struct.unpack('>I8', kept) == number then
  return kept
elseif number < tonumber(told[2] or 0) then
  return {-7}
end

call('INCR', KEYS[4])
local function refused(answer)
  call('DECR', KEYS[4])
  return answer
end
local now = now_ms()
local tag = sub(KEYS[2], 1, -5)
local records = feeds ~= 'reported' and #chain > 0

-- Recording walks the same nodes again, and further: it sets when they expire.
local expire_at = tends and not records and now + ttl
local nodes, seen_nodes = walk(prefix, chain, now, expire_at, KEYS[1], tends and SWEPT or 0, listed and 256 or 32)
