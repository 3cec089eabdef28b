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
--   27  KV group whose sets (sets.lua) the candidates are read from, or where they follow: '' these are all, and nobody reads
--       the sets; '-' some of many
--   28  number of prefill candidates; with a group 1, or 0: none is wanted
--   with a group: 29 names of prefill workers to pass over and 30 of decode workers, each behind a zero byte; 31 how many
--       prefill workers, 32 decode workers these are
--   without: 29 slots of the candidates, prefill workers first (4-byte numbers, packed), 30 their capacities (8-byte doubles,
--       packed), 31 their facts, 32… their fields of `load`
-- -> prefill worker ('' = the decode worker prefills), decode worker, cached tokens at the worker that prefills, at the
--    decode worker, uncached tokens, cost, terms…
--    or -3, seconds to the first token: too late, or -4: the best is leaving or has left, read the membership again, or
--    -5: the router no longer waits for this call, or -6: no live worker of a role is among the candidates that the sets
--    name. Then nothing was charged. Calls without a decode worker (-1) or without a pair (-2) are not made.
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
local transfer_id, group = ARGV[24], ARGV[27]
local small = group == ''
local listed = small or group == '-'
local bandwidths = {struct.unpack('>ddddd', ARGV[12])}
local LISTED = 32
local FACTS_SIZE = 63
local ANSWERS = 256
local BEST = 8  -- of each role that are paired with each other
local HEADS = 8  -- of each set
local HOLDERS = 16  -- of the prefix, of both roles
local TRIES = 16  -- of pairs whose workers turn out to be gone
local TIE = 1.05
-- Slots looked at for dead owners, in one call of four; a hot node is visited often.
local SWEPT = number % 4 == 0 and 8 or 0
local call, byte, sub = redis.call, string.byte, string.sub

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

call('INCR', KEYS[4])
local function refused(answer)
  call('DECR', KEYS[4])
  return answer
end
local now = now_ms()
local tag = sub(KEYS[2], 1, -5)
local records = feeds ~= 'reported' and #chain > 0

-- Recording walks the same nodes again, and further: it sets when they expire.
local nodes, labels = walk(prefix, chain, now, not records and now + ttl, KEYS[1], SWEPT, listed and 256 or 32)

-- The candidates, by index; ps and ds: the indices of either role.
local names, facts, slots, capacities, places, total = {}, {}, {}, {}, {}, 0
local ps, ds, known = {}, {}, {}
local is_holder = {}  -- of the prefix, and not found in a set
local given, load_of = {}, {}  -- load by name, as the sets say, and by index
local function add(name, packed)
  if known[name] or not packed or byte(packed) ~= FACTS_FORMAT then return false end
  total = total + 1
  slots[total], capacities[total], places[total] = struct.unpack('>I4dc12', packed, 3)
  names[total], facts[total], known[name], load_of[total] = name, packed, packed, given[name]
  local role = byte(packed, 51) == 0 and ps or ds
  role[#role + 1] = total
  return true
end
-- Of listed candidates these two are made where they are needed: for few of them.
local function name_of(i) return names[i] or sub(ARGV[LISTED - 1 + i], 3) end
local function facts_of(i) return facts[i] or sub(ARGV[31], FACTS_SIZE * (i - 1) + 1, FACTS_SIZE * i) end
local fast = math.max(unpack(bandwidths))

if listed then
  total = #ARGV - LISTED + 1
  slots = {struct.unpack('>' .. string.rep('I4', total), ARGV[29])}
  capacities = {struct.unpack('>' .. string.rep('d', total), ARGV[30])}
  local packed, wanted = ARGV[31], tonumber(ARGV[28])
  for i = 1, total do
    places[i] = sub(packed, FACTS_SIZE * i - 48, FACTS_SIZE * i - 37)
    if i <= wanted then ps[i] = i else ds[i - wanted] = i end
  end
else
  local set = tag .. 'set:' .. group .. ':'
  local function barred_names(packed, count)
    local barred = {}
    if count > 0 then
      for name in string.gmatch(packed, '[^%z]+') do barred[name] = true end
    end
    return barred
  end
  local barred_p, barred_d = tonumber(ARGV[31]), tonumber(ARGV[32])
  local barred = {p = barred_names(ARGV[29], barred_p), d = barred_names(ARGV[30], barred_d)}
  -- The first of a set that are not passed over. Where all that were read are equal (an idle cluster), chance decides from
  -- which of the equal ones on.
  local function heads(kind, passed, count)
    local want, key = HEADS + count, set .. kind
    local page = call('ZRANGE', key, 0, want - 1, 'WITHSCORES')
    if #page == 2 * want and page[2] == page[2 * want] then
      local from = math.floor(random * (call('ZCOUNT', key, page[2], page[2]) - want + 1))
      if from > 0 then page = call('ZRANGE', key, from, from + want - 1, 'WITHSCORES') end
    end
    local found = {}
    for i = 1, #page, 2 do
      local name = page[i]
      if not passed[name] then
        found[#found + 1] = name
        if kind ~= 'l' and kind ~= 'f' then given[name] = page[i + 1] + 0 end
        if #found == HEADS then break end
      end
    end
    return found
  end
  local p_heads = ARGV[28] == '1' and heads('p', barred.p, barred_p) or {}
  local r_heads = heads('r', barred.d, barred_d)
  local asked = {}
  local function ask(list)
    for i = 1, #list do asked[#asked + 1] = list[i] end
  end
  ask(p_heads)
  ask(r_heads)
  if #r_heads == HEADS and (mode == 'always' or mode == 'auto' or (mode == 'fallback' and #p_heads == 0)) then
    ask(heads('l', barred.d, barred_d))
  end
  local from = #asked + 1
  local held = #nodes > 0 and holders(nodes, math.min(HOLDERS + barred_p + barred_d, 64), random, now) or {}
  if #held > 0 then
    local owners = call('HMGET', KEYS[1], unpack(held))
    for i = 1, #held do
      if owners[i] and not barred.p[owners[i]] and not barred.d[owners[i]] then asked[#asked + 1] = owners[i] end
    end
  end
  if #asked > 0 then
    local packed = call('HMGET', KEYS[8], unpack(asked))
    for i = 1, #asked do
      -- A holder may be of another KV group, or a prefill worker where none is wanted.
      if i < from or (packed[i] and sub(packed[i], 52, 63) == group and (ARGV[28] == '1' or byte(packed[i], 51) ~= 0)) then
        if add(asked[i], packed[i]) and i >= from then is_holder[total] = true end
      end
    end
  end
  -- The other role's best beside each candidate, if lying together helps. The first of a place among the heads of all
  -- places is the first of its own.
  local beside, seen = {}, {}
  local function first_of(where, passed, count)
    if seen[where] then return end
    seen[where] = true
    local key = set .. where
    local page = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if page[1] and passed[page[1]] then page = call('ZRANGE', key, 1, count, 'WITHSCORES') end
    for i = 1, #page, 2 do
      local first = page[i]
      if not passed[first] then
        if known[first] == nil then
          known[first], given[first] = false, page[i + 1] + 0  -- asked for
          beside[#beside + 1] = first
        end
        break
      end
    end
  end
  local by_place, by_rack = fast > bandwidths[3], bandwidths[3] > bandwidths[4]
  local function look_beside(kind, own, its_heads, passed, count)
    for i = 1, #its_heads do  -- those of the other role, by which their places are seen
      local packed = known[its_heads[i]]
      if packed then
        seen[kind .. ':' .. sub(packed, 15, 26)] = true
        seen[kind .. ':rack:' .. sub(packed, 27, 38)] = true
      end
    end
    for i = 1, #own do
      if by_place then first_of(kind .. ':' .. places[own[i]], passed, count) end
      local rack = by_rack and sub(facts[own[i]], 27, 38)
      if rack and rack ~= NOWHERE then first_of(kind .. ':rack:' .. rack, passed, count) end
    end
  end
  if #r_heads == HEADS then look_beside('r', ps, r_heads, barred.d, barred_d) end
  if #p_heads == HEADS then look_beside('p', ds, p_heads, barred.p, barred_p) end
  -- Where one of those with the least resident tokens lacks room, those with most room may be better.
  if #r_heads == HEADS then
    for k = 1, #ds do
      local i = ds[k]
      if load_of[i] and L + out + load_of[i] > capacities[i] then
        local roomy = heads('f', barred.d, barred_d)
        for n = 1, #roomy do
          if known[roomy[n]] == nil then beside[#beside + 1] = roomy[n] end
        end
        break
      end
    end
  end
  if #beside > 0 then
    local packed = call('HMGET', KEYS[8], unpack(beside))
    for i = 1, #beside do add(beside[i], packed[i]) end
  end
end
local np, nd = #ps, #ds
local may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and np == 0)
if nd == 0 or (np == 0 and not may_local) then return refused({-6}) end

-- What waits at prefill workers, what lives at decode workers (and waits, where they prefill): one call for what the sets
-- have not said.
local fields, of = {}, {}
local function want(field, i)
  fields[#fields + 1], of[#of + 1] = field, i
end
if listed then
  load_of = call('HMGET', KEYS[2], unpack(ARGV, LISTED))
else
  for i = 1, np do
    if not load_of[ps[i]] then want('p:' .. names[ps[i]], ps[i]) end
  end
  for i = 1, nd do
    if not load_of[ds[i]] then want('d:' .. names[ds[i]], ds[i]) end
  end
end
if may_local then
  for i = 1, nd do want('p:' .. name_of(ds[i]), total + ds[i]) end
end
if #fields > 0 then
  local loads = call('HMGET', KEYS[2], unpack(fields))
  for i = 1, #fields do load_of[of[i]] = loads[i] end
end
local cover = covered(nodes, slots, now)

local function prefill_seconds(u) return a * u + b * u * (L - u / 2) end
local ship_rate = token_bytes / fast  -- at its best: whom it is paired with is not known yet
local score, hits, wait, living, queue, computes = {}, {}, {}, {}, {}, {}  -- computes: seconds of a prefill there
local cold = prefill_seconds(L)
for k = 1, np do
  local i = ps[k]
  local load = load_of[i]
  local seconds = load and load / rate or 0
  if seconds < 0 then seconds = 0 end
  local blocks = cover[slots[i]]
  wait[i] = seconds
  local held, compute = 0, cold
  if blocks then
    held = math.min(blocks * page, L - 1)
    compute = prefill_seconds(L - held)
  end
  hits[i], computes[i], score[i] = held, compute, seconds + compute
end
local longest, longest_hit = nil, 0
local cold_ship, need = L * ship_rate, L + out
for k = 1, nd do
  local i = ds[k]
  local load = load_of[i]
  load = load and load + 0 or 0  -- a number without a call
  if load < 0 then load = 0 end
  local penalty, lack = per_token * load, need + load - capacities[i]
  if lack > 0 then penalty = penalty + 1 + lack / math.max(1, capacities[i]) end
  living[i], wait[i] = load, penalty
  if may_local then queue[i] = math.max(0, tonumber(load_of[total + i] or 0)) / rate end
  local blocks = cover[slots[i]]
  if blocks then
    local held = math.min(blocks * page, L - 1)
    hits[i], score[i] = held, penalty + (L - held) * ship_rate
    if held > longest_hit then longest, longest_hit = i, held end
  else
    hits[i], score[i] = 0, penalty + cold_ship
  end
end

-- Racks count where they are faster than what lies beyond.
local racks = {}
if bandwidths[3] > bandwidths[4] then
  for i = 1, total do racks[i] = sub(facts_of(i), 27, 38) end
end

-- The best few of a role in one pass (most candidates are worse than all of them), and the best of every place and rack.
local bad = {}
local function best(list)
  local chosen, size, by_place, by_rack, bound = {}, 0, {}, {}, math.huge
  local score, places = score, places  -- Lua reads a function's own locals faster than its surroundings'
  for n = 1, #list do
    local i = list[n]
    if not bad[i] then
      local s, top = score[i], by_place[places[i]]
      if not top or s < score[top] then by_place[places[i]] = i end
      local rack = racks[i]
      if rack and rack ~= NOWHERE and (not by_rack[rack] or s < score[by_rack[rack]]) then by_rack[rack] = i end
      if s < bound then
        if size < BEST then size = size + 1 end
        local k = size
        while k > 1 and s < score[chosen[k - 1]] do
          chosen[k] = chosen[k - 1]
          k = k - 1
        end
        chosen[k] = i
        if size == BEST then bound = score[chosen[BEST]] end
      end
    end
  end
  local among = {}
  for k = 1, size do among[chosen[k]] = true end
  return chosen, among, by_place, by_rack
end

-- What a pair shares at least: 1 a clique, 2 a host, 3 a rack, 4 a zone, 5 nothing.
local function level(p, d)
  if places[p] == places[d] then return byte(facts_of(p), 2) end
  local rack = sub(facts_of(p), 27, 38)
  if rack ~= NOWHERE and rack == sub(facts_of(d), 27, 38) then return 3 end
  local zone = sub(facts_of(p), 39, 50)
  return zone ~= NOWHERE and zone == sub(facts_of(d), 39, 50) and 4 or 5
end

-- Index of the prefill worker (0 = local), of the decode worker, seconds, seconds that the hand-off adds; nil: no pair.
local function choose()
  local best_ps, among_ps, p_places, p_racks = best(ps)
  local best_ds, among_ds, d_places, d_racks = best(ds)
  if longest and not bad[longest] and not among_ds[longest] then
    best_ds[#best_ds + 1] = longest
    among_ds[longest] = true
  end
  local cp, cd, cost, shipping, choices = {}, {}, {}, {}, 0
  local cheapest = math.huge
  local function consider(p, d, seconds, ship)
    choices = choices + 1
    cp[choices], cd[choices], cost[choices], shipping[choices] = p, d, seconds, ship
    if seconds < cheapest then cheapest = seconds end
  end
  -- ready: seconds until p has computed it, `compute` of them its own.
  local function join(p, d, ready, compute)
    local ship = (L - hits[d]) * token_bytes / bandwidths[level(p, d)] - 0.9 * compute
    if ship < 0 then ship = 0 end
    consider(p, d, ready + wait[d] + ship, ship)
  end
  local function pair(p, d)
    local compute = computes[p]
    local ready = wait[p] + compute
    if ready + wait[d] <= cheapest * TIE then join(p, d, ready, compute) end
  end
  for i = 1, #best_ps do
    local p = best_ps[i]
    local compute = computes[p]
    local ready = wait[p] + compute
    for k = 1, #best_ds do  -- beyond the tie already, most of them: whatever the hand-off adds
      local d = best_ds[k]
      if ready + wait[d] <= cheapest * TIE then join(p, d, ready, compute) end
    end
  end
  -- Those beside one of them, and the own best two of a place or rack, may win by lying together.
  local function together(p_best, d_best, where)
    for here, p in pairs(p_best) do
      local d = d_best[here]
      if d and not (among_ps[p] and among_ds[d]) then pair(p, d) end
    end
    for i = 1, #best_ps do
      local d = d_best[where[best_ps[i]]]
      if d and not among_ds[d] then pair(best_ps[i], d) end
    end
    for k = 1, #best_ds do
      local p = p_best[where[best_ds[k]]]
      if p and not among_ps[p] then pair(p, best_ds[k]) end
    end
  end
  together(p_places, d_places, places)
  if racks[1] then together(p_racks, d_racks, racks) end
  if may_local then
    local function locally(d)
      -- Its own running batch waits for the chunks: prefill here costs those streams too.
      local slow = living[d] > 0 and 2 or 1
      consider(0, d, queue[d] + slow * prefill_seconds(L - hits[d]) + wait[d], 0)
    end
    for k = 1, #best_ds do locally(best_ds[k]) end
  end
  if choices == 0 then return nil end
  -- What lies within 5 % of the cheapest is a tie. Of equal times the one with most of the prompt cached costs the
  -- cluster least; chance decides the rest.
  local reuse, equal = -1, 0
  local tied = {}
  for c = 1, choices do
    if cost[c] <= cheapest * TIE then
      local cached = (cp[c] > 0 and hits[cp[c]] or 0) + hits[cd[c]]
      if cached > reuse then reuse, equal = cached, 0 end
      if cached == reuse then
        equal = equal + 1
        tied[equal] = c
      end
    end
  end
  local pick = tied[1 + math.floor(random * equal)]
  return cp[pick], cd[pick], cost[pick], shipping[pick]
end

-- Why the winners cannot be taken: a router's own view may be a moment old; sets name workers that have died since; a holder
-- of the prefix may drain.
local function winners_of(p, d) return p > 0 and {d, p} or {d} end
local function reasons(winners)
  local ids, winner_slots, found = {}, {}, {}
  for k = 1, #winners do
    ids[k], winner_slots[k] = sub(name_of(winners[k]), 1, -18), slots[winners[k]]
  end
  if listed then
    local owners = call('HMGET', KEYS[1], unpack(winner_slots))
    for k = 1, #winners do
      if owners[k] ~= name_of(winners[k]) then found[k] = 'left' end
    end
  else
    local leases = call('ZMSCORE', KEYS[9], unpack(ids))
    for k = 1, #winners do
      local age = now - tonumber(leases[k] or 0)
      if age >= tonumber(ARGV[25]) then found[k] = age >= tonumber(ARGV[26]) and 'dead' or 'suspect' end
    end
  end
  if listed or is_holder[winners[1]] or is_holder[winners[2]] then
    local leaving = call('HMGET', KEYS[6], unpack(ids))
    for k = 1, #winners do
      if leaving[k] then found[k] = 'drains' end
    end
  end
  return found
end

local p, d, cost, ship, gone = nil, nil, nil, nil, {}
for _ = 1, TRIES do
  p, d, cost, ship = choose()
  if not p then return refused({-6}) end
  local winners = winners_of(p, d)
  local why = reasons(winners)
  if not why[1] and not why[2] then break end
  if listed then return refused({-4}) end
  for k = 1, #winners do
    if why[k] then bad[winners[k]] = true end
    if why[k] == 'dead' then gone[#gone + 1] = winners[k] end
  end
  p = nil
end
if not p then return refused({-6}) end
for k = 1, #gone do exit(tag, names[gone[k]], facts[gone[k]]) end
if #gone > 0 then changed(tag) end

local at = p > 0 and p or d  -- who prefills
local u = L - hits[at]
local compute = prefill_seconds(u)
local pending = 'p:' .. name_of(at)
-- What waits there before this request: lower classes wait behind it. Their share is counted in fields of their own.
local waits = p > 0 and wait[p] or queue[d]
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
if call('HSETNX', KEYS[5], transfer_id, pack_charge(class, u, need, name_of(at), name_of(d))) == 0 then
  return refused({-5})  -- the router has placed it by itself meanwhile
end
count(class, u, need, name_of(at), name_of(d))
apply(tag, not small and known)
-- The lease expires the charges of a router that dies before it ever settles.
call('ZADD', KEYS[3], 'NX', now + lease, router .. ':' .. life)

if records then
  local winners = winners_of(p, d)
  for k = 1, #winners do winners[k] = string.format('%d', slots[winners[k]]) end
  insert(prefix, chain, winners, #chain / 8, false, now + predict, now + ttl, labels)
end

local answer = {
  p > 0 and name_of(p) or '', name_of(d), hits[at], hits[d], u, tostring(cost), tostring(waits), tostring(compute),
  tostring(ship), tostring(wait[d]), tostring(first),
}
call('HSET', KEYS[7], 'run', life, number % ANSWERS, cmsgpack.pack({number, answer}))
return answer
