-- One placement: match, score, charge, record. One call per dispatch attempt.
-- KEYS: owners, load, routers, calls, chg:<router>:<run>, drains, answers:<router>
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
--   25  number of prefill candidates
--   26  number of candidates
--   27  the decode workers' capacities (tokens; 8-byte doubles, packed)
--   28  slots (4-byte numbers, packed)
--   29  runs of candidates of one place: number of the place, index of its last candidate (4-byte numbers, packed)
--   30  of every place: what its workers share (1 an NVLink clique, 2 a host), the numbers of its rack and zone (0 = unknown)
--   31… for every candidate its field of `load`, then, where decode workers may prefill, theirs for that
-- -> prefill index (0 = the decode worker prefills), decode index, cached tokens at the worker that prefills, at the decode worker, uncached
--    tokens, cost, terms…
--    or -3, seconds to the first token: too late, or -4: the best is leaving or has left, read the membership again, or
--    -5: the router no longer waits for this call; then nothing was charged. Calls without candidates (-1) or without a
--    pair of them (-2) are not made.
-- now_ms, match and insert are those of cluster/index/tree.lua, pack_charge, count and apply those of charges.lua, which
-- script_source() puts in front.
-- A repeated call gets its former answer, unless the router has made ANSWERS others since.
-- Candidates live in flat arrays, by index: a table for each of 128 would cost more than all the rest.
local prefix, router, chain = ARGV[1], ARGV[2], ARGV[3]
local L, page, out = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local mode, random = ARGV[7], tonumber(ARGV[8])
local a, b = tonumber(ARGV[9]), tonumber(ARGV[10])
local token_bytes, per_token = tonumber(ARGV[11]), tonumber(ARGV[13])
local feeds, ttl, predict = ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[16])
local rate, np, total = tonumber(ARGV[17]), tonumber(ARGV[25]), tonumber(ARGV[26])
local life, number, lease = tonumber(ARGV[21]), tonumber(ARGV[22]), tonumber(ARGV[23])
local priority_class, target, deadline = ARGV[18], tonumber(ARGV[19]), tonumber(ARGV[20])
local AT_ONCE = 4000  -- values: Lua's stack takes 8,000
local function numbers(kind, packed, size)
  if #packed <= AT_ONCE * size then return {struct.unpack('>' .. string.rep(kind, #packed / size), packed)} end
  local all = {}
  for at = 1, #packed, AT_ONCE * size do
    local part = string.sub(packed, at, at + AT_ONCE * size - 1)
    local some = {struct.unpack('>' .. string.rep(kind, #part / size), part)}
    for i = 1, #part / size do all[#all + 1] = some[i] end
  end
  return all
end
local capacities, slots, runs = numbers('d', ARGV[27], 8), numbers('I4', ARGV[28], 4), numbers('I4', ARGV[29], 4)
local bandwidths, places = numbers('d', ARGV[12], 8), numbers('I4', ARGV[30], 4)
local transfer_id = ARGV[24]
local LOADS = 30
local ANSWERS = 256
local BEST = 8
local TIE = 1.05
local SWEPT = 4  -- slots of dead workers looked for in a call; a hot node is visited often
local call = redis.call

-- The answer of call n is kept with n in field n % ANSWERS: never more than ANSWERS, even if some calls are refused.
local told = call('HMGET', KEYS[7], 'run', 'from', number % ANSWERS)
local latest, kept = tonumber(told[1] or 0), told[3] and cmsgpack.unpack(told[3])
if life < latest then return {-5} end
if life > latest then
  call('DEL', KEYS[7])
elseif kept and kept[1] == number then
  return kept[2]
elseif number < tonumber(told[2] or 0) then
  return {-5}
end
if call('HEXISTS', KEYS[5], transfer_id) == 1 then return {-5} end  -- the router has placed it by itself meanwhile

call('INCR', KEYS[4])
if total == np then return {-1} end
local now = now_ms()
local records = feeds ~= 'reported' and #chain > 0

-- Recording walks the same nodes again, and further: it sets when they expire.
local cover, labels = match(prefix, chain, now, not records and now + ttl, KEYS[1], SWEPT)

-- What waits at prefill workers, what lives at decode workers (and waits, where they prefill): one call.
local may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and np == 0)
local loads
if #ARGV <= AT_ONCE then
  loads = call('HMGET', KEYS[2], unpack(ARGV, LOADS + 1))
else
  loads = {}
  for at = LOADS + 1, #ARGV, AT_ONCE do
    local some = call('HMGET', KEYS[2], unpack(ARGV, at, math.min(at + AT_ONCE - 1, #ARGV)))
    for i = 1, #some do loads[#loads + 1] = some[i] end
  end
end

local function prefill_seconds(u) return a * u + b * u * (L - u / 2) end
local ship_rate = token_bytes / math.max(unpack(bandwidths))  -- at its best: whom it is paired with is not known yet

-- The best few of a role in one pass (most candidates are worse than all of them), and the best of every place.
local score, place_of, run = {}, {}, 1
local function best(first, last)
  local chosen, size, by_place, bound = {}, 0, {}, math.huge
  local score, place_of = score, place_of  -- Lua reads a function's own locals faster than its surroundings'
  local i = first
  while i <= last do
    local place, run_end, top, top_score = runs[run], runs[run + 1], i, math.huge
    for at = i, run_end do
      local s = score[at]
      place_of[at] = place
      if s < top_score then top, top_score = at, s end
      if s < bound then
        if size < BEST then size = size + 1 end
        local k = size
        while k > 1 and s < score[chosen[k - 1]] do
          chosen[k] = chosen[k - 1]
          k = k - 1
        end
        chosen[k] = at
        if size == BEST then bound = score[chosen[BEST]] end
      end
    end
    by_place[place] = top
    i, run = run_end + 1, run + 2
  end
  local among = {}
  for k = 1, size do among[chosen[k]] = true end
  return chosen, among, by_place
end

local hits, wait = {}, {}  -- hits: of those that hold something
local function hit(i) return hits[i] or 0 end
local cold = prefill_seconds(L)
for i = 1, np do
  local load = loads[i]
  local seconds = load and load / rate or 0
  if seconds < 0 then seconds = 0 end
  local blocks = cover[slots[i]]
  wait[i] = seconds
  if blocks then
    local held = math.min(blocks * page, L - 1)
    hits[i], score[i] = held, seconds + prefill_seconds(L - held)
  else
    score[i] = seconds + cold
  end
end
local living = {}
local longest, longest_hit = np + 1, 0
local cold_ship, need = L * ship_rate, L + out
for i = np + 1, total do
  local load = loads[i]
  load = load and load + 0 or 0  -- a number without a call
  if load < 0 then load = 0 end
  local penalty, lack = per_token * load, need + load - capacities[i - np]
  if lack > 0 then penalty = penalty + 1 + lack / math.max(1, capacities[i - np]) end
  living[i], wait[i] = load, penalty
  local blocks = cover[slots[i]]
  if blocks then
    local held = math.min(blocks * page, L - 1)
    hits[i], score[i] = held, penalty + (L - held) * ship_rate
    if held > longest_hit then longest, longest_hit = i, held end
  else
    score[i] = penalty + cold_ship
  end
end

local ps, among_ps, p_places = best(1, np)
local ds, among_ds, d_places = best(np + 1, total)
if not among_ds[longest] then
  ds[#ds + 1] = longest
  among_ds[longest] = true
end

-- Choices: prefill index (0 = local), decode index, seconds, seconds the hand-off adds.
local cp, cd, cost, shipping, choices = {}, {}, {}, {}, 0
local cheapest = math.huge
local function consider(p, d, seconds, ship)
  choices = choices + 1
  cp[choices], cd[choices], cost[choices], shipping[choices] = p, d, seconds, ship
  if seconds < cheapest then cheapest = seconds end
end
-- What a pair shares at least: 1 a clique, 2 a host, 3 a rack, 4 a zone, 5 nothing.
local function level(p, d)
  local a, b = 3 * place_of[p], 3 * place_of[d]
  if a == b then return places[a + 1] end
  if places[a + 2] > 0 and places[a + 2] == places[b + 2] then return 3 end
  return places[a + 3] > 0 and places[a + 3] == places[b + 3] and 4 or 5
end
-- ready: seconds until p has computed it, `compute` of them its own.
local function join(p, d, ready, compute)
  local ship = (L - hit(d)) * token_bytes / bandwidths[level(p, d)] - 0.9 * compute
  if ship < 0 then ship = 0 end
  consider(p, d, ready + wait[d] + ship, ship)
end
local function pair(p, d)
  local compute = prefill_seconds(L - hit(p))
  local ready = wait[p] + compute
  if ready + wait[d] <= cheapest * TIE then join(p, d, ready, compute) end
end
for i = 1, #ps do
  local p = ps[i]
  local compute = prefill_seconds(L - hit(p))
  local ready = wait[p] + compute
  for k = 1, #ds do  -- beyond the tie already, most of them: whatever the hand-off adds
    if ready + wait[ds[k]] <= cheapest * TIE then join(p, ds[k], ready, compute) end
  end
end
-- Those beside one of them, and a place's own best two, may win by lying together.
for i = 1, #ps do
  local d = d_places[place_of[ps[i]]]
  if d and not among_ds[d] then pair(ps[i], d) end
end
for k = 1, #ds do
  local p = p_places[place_of[ds[k]]]
  if p and not among_ps[p] then pair(p, ds[k]) end
end
for place, p in pairs(p_places) do
  local d = d_places[place]
  if d and not among_ps[p] and not among_ds[d] then pair(p, d) end
end
if may_local then
  for k = 1, #ds do
    local d = ds[k]
    local queue = tonumber(loads[total + d - np] or 0)
    -- Its own running batch waits for the chunks: prefill here costs those streams too.
    local slow = living[d] > 0 and 2 or 1
    consider(0, d, math.max(0, queue) / rate + slow * prefill_seconds(L - hit(d)) + wait[d], 0)
  end
end
if choices == 0 then return {-2} end

-- What lies within 5 % of the cheapest is a tie. Of equal times the one with most of the prompt cached costs the
-- cluster least; chance decides the rest.
local reuse, equal = -1, 0
local function reused(c) return (cp[c] > 0 and hit(cp[c]) or 0) + hit(cd[c]) end
local tied = {}
for c = 1, choices do
  if cost[c] <= cheapest * TIE then
    local cached = reused(c)
    if cached > reuse then reuse, equal = cached, 0 end
    if cached == reuse then
      equal = equal + 1
      tied[equal] = c
    end
  end
end
local pick = tied[1 + math.floor(random * equal)]
local p, d = cp[pick], cd[pick]

-- The view of the router that asks may be a moment old: a worker marked as draining gets no placement from that moment.
local winners = p > 0 and {d, p} or {d}
local names, ids, winner_slots = {}, {}, {}
for k = 1, #winners do
  names[k] = string.sub(ARGV[LOADS + winners[k]], 3)
  ids[k] = string.match(names[k], '^(.*)@')
  winner_slots[k] = string.format('%d', slots[winners[k]])
end
local owners, leaving = call('HMGET', KEYS[1], unpack(winner_slots)), call('HMGET', KEYS[6], unpack(ids))
for k = 1, #winners do
  if owners[k] ~= names[k] or leaving[k] then
    call('DECR', KEYS[4])
    return {-4}
  end
end

local at = p > 0 and p or d  -- who prefills
local u = L - hit(at)
local compute = prefill_seconds(u)
local pending = p > 0 and ARGV[LOADS + p] or ARGV[LOADS + total + d - np]
-- What waits there before this request: lower classes wait behind it. Their share is counted in fields of their own.
local waits = p > 0 and wait[p] or math.max(0, tonumber(loads[total + d - np] or 0)) / rate
local ahead = waits
if waits > 0 and priority_class ~= 'batch' then
  local own = priority_class == 'high' and 'high:' or 'batch:'
  local part = math.max(0, tonumber(call('HGET', KEYS[2], own .. pending) or 0)) / rate
  ahead = priority_class == 'high' and part or waits - part
end
-- Refusing helps only where waiting is what makes it late: an idle worker takes whatever comes, and a long prompt
-- may wait as long as it computes.
local first = ahead + compute + wait[d]
if (deadline > 0 and first > deadline and ahead > 0) or (target > 0 and first > target and ahead > compute) then
  return {-3, tostring(first)}
end

local class = CLASSES[priority_class]
count(class, u, L + out, string.sub(pending, 3), names[1])
apply(KEYS[2])
call('HSET', KEYS[5], transfer_id, pack_charge(class, u, L + out, string.sub(pending, 3), names[1]))
-- The lease expires the charges of a router that dies before it ever settles.
call('ZADD', KEYS[3], 'NX', now + lease, router .. ':' .. life)

if records then
  insert(prefix, chain, winner_slots, #chain / 8, false, now + predict, now + ttl, labels)
end

local answer = {
  p, d, hit(at), hit(d), u, tostring(cost[pick]), tostring(waits), tostring(compute),
  tostring(shipping[pick]), tostring(wait[d]), tostring(first),
}
call('HSET', KEYS[7], 'run', life, number % ANSWERS, cmsgpack.pack({number, answer}))
return answer
