-- One placement: match, score, charge, record. One call per dispatch attempt. Where the prefix index has a Redis of its own, this
-- scores and charges; match.lua and record.lua match and record there.
-- KEYS: owners, load, routers, calls, chg:<router>:<run>, drains, answers:<router>, facts, leases
-- ARGV:
--   1   prefix of the index's keys
--   2   router
--   3   chain: packed index keys of the prompt's full blocks; where the index has a Redis of its own, the answer of match.lua
--   4   NUMBERS, packed as 8-byte doubles: tokens, page size, output tokens that are expected, a random number, a and b of the
--       cost model, token_bytes, per_token (seconds that a resident token adds to a decode step), rate (prefill tokens per
--       second), ttl_ms of index entries, target and deadline of the first token (seconds, 0 = none), run of the router, number
--       of the call, predict_ms of index entries that a placement predicts, lease_ms of the router, age_ms of a lease from which
--       a worker is suspect and from which it is dead, whole (1: the worker that prefills computes each position, whatever it has
--       cached), alone (1: the attempt ends at a prefill worker, without a hand-off), bandwidths (bytes per second of pairs that
--       share a clique, a host, a rack, a zone, nothing)
--   5   mode of local prefill (at the decode worker): never | fallback | auto | always
--   6   feeds of the index: hybrid | reported | predicted, or kept: as predicted, and nothing is recorded
--   7   priority class: high | normal | batch
--   8   transfer id
--   9   packed charge that a former call for the same placement has made, and this one replaces; '': none
--   10  KV group whose sets (sets.lua) the candidates are read from. Where the candidates are arguments instead: '' if they are
--       all workers, so that the sets are not kept; '-' if they are some of many
--   11  number of prefill candidates; with a group 1 if a prefill worker is wanted, else 0
--   with a group: 12 names of prefill workers and 13 of decode workers to pass over, each behind a zero byte; 14 how many
--       prefill workers and 15 decode workers the router sees
--   without: 12 slots of the candidates, decode workers first (4-byte numbers, packed), 13 capacities of the decode workers
--       (8-byte doubles, packed), numbers of the candidates' 14 places, 15 racks and 16 zones (a byte each, 0: unknown), 17 what
--       the place of each shares (a byte each: 1 a clique, 2 a host), 18… their fields of `load`
-- -> one packed ANSWER: number of the call, cached tokens at the worker that prefills, at the decode worker, uncached tokens,
--    cost, terms…, prefill worker ('' = the decode worker prefills), a zero byte, decode worker
--    or a list, and nothing was charged: -3, seconds to the first token: too late; -4: the best worker is leaving or has left, the
--    router is to read the membership again; -5: Redis has a later run of this router; -6: no live worker of a role is among the
--    candidates that the sets name; -7: the router no longer waits for this call, or has charged the attempt by itself; -8: the
--    sets hold fewer than half of the workers that the router sees. Calls without a decode worker (-1) or without a pair (-2) are
--    not made.
-- In front of this file: cluster/index/tree.lua (now_ms, insert), walk.lua (walk, holders, covered), sets.lua, charges.lua. Behind it:
-- walked.lua, or matched.lua where the index has a Redis of its own; rate.lua, candidates.lua, choose.lua, charge.lua.
-- A repeated call gets its former answer, unless the router has made ANSWERS others since.
-- Candidates live in flat arrays, by index: a table for each of 128 would cost more than all the rest.
local prefix, router, chain = ARGV[1], ARGV[2], ARGV[3]
local NUMBERS = '>' .. string.rep('d', 25)
local L, page, out, random, a, b, token_bytes, per_token, rate, ttl, target, deadline, life, number, predict, lease, suspect, dead,
  whole, alone, to_clique, to_host, to_rack, to_zone, to_far = struct.unpack(NUMBERS, ARGV[4])
whole, alone = whole == 1, alone == 1
local bandwidths = {to_clique, to_host, to_rack, to_zone, to_far}
local mode, feeds, priority_class, transfer_id, replaces, group = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local small = group == ''
local listed = small or group == '-'
local LISTED = 18
-- Arguments 11 to 17 by name. Where they are listed, those of all candidates; else what bounds the candidates of the sets.
local num_prefill, argument = tonumber(ARGV[11]), nil
if listed then
  argument = {
    slots = ARGV[12], capacities = ARGV[13], places = ARGV[14], racks = ARGV[15], zones = ARGV[16], shares = ARGV[17],
  }
else
  argument = {without_prefill = ARGV[12], without_decode = ARGV[13], seen_prefill = ARGV[14], seen_decode = ARGV[15]}
end
local ANSWERS = 256
local ANSWER = '>I8I4I4I4dddddd'
local BEST = 8  -- of each role that are paired with each other
local HEADS = 8  -- of each set
-- Where the best pair costs WORTH_LOOKING times what it would without a hand-off, the first WIDE of each set are read too, once.
-- That is rare where networks are fast compared with prefill. Where they are slow it would be most placements of long prompts, so
-- each wide look that finds no clearly better pair halves the share of the router's calls that look, down to one of eight.
local WIDE, WORTH_LOOKING, MAX_IN_VAIN = 32, 1.5, 3
local HOLDERS = 8  -- of the prefix, of both roles
local TRIES = 16  -- of pairs whose workers turn out to be gone
local TIE = 1.05
local call, byte, sub = redis.call, string.byte, string.sub

-- The answer of call n is kept with n in field n % ANSWERS: never more than ANSWERS, even if some calls are refused.
local stored = call('HMGET', KEYS[7], 'run', 'from', number % ANSWERS, 'in_vain')
local former_in_vain = tonumber(stored[4] or 0)  -- wide looks in a row, up to MAX_IN_VAIN
local latest, kept = tonumber(stored[1] or 0), stored[3]
if life < latest then return {-5} end
if life > latest then
  call('DEL', KEYS[7])
elseif kept and struct.unpack('>I8', kept) == number then
  return kept
elseif number < tonumber(stored[2] or 0) then
  return {-7}
end

call('INCR', KEYS[4])
local function refused(answer)
  call('DECR', KEYS[4])
  return answer
end
local now = now_ms()
local tag = sub(KEYS[2], 1, -5)
