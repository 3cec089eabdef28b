-- Fifth part of the placement script: the pair that costs least.
local places_count = fast > slow and not alone
-- Racks count where they are faster than what lies beyond, and in fleets of many racks only.
local racks_count = not listed and not alone and bandwidths[3] > bandwidths[4]
local UNKNOWN = listed and 0 or NOWHERE

-- The best few of a role in one pass (most candidates are worse than all of them), and the best of every place and rack.
local bad = {}
local function best(list)
  local chosen, size, by_place, by_rack, bound = {}, 0, {}, {}, math.huge
  local score, places = score, places  -- Lua reads a function's own locals faster than its surroundings'
  for n = 1, #list do
    local i = list[n]
    if not bad[i] then
      local s = score[i]
      if places_count then
        local place = places[i]
        local top = by_place[place]
        if not top or s < score[top] then by_place[place] = i end
      end
      if racks_count then
        local rack = rack_of(i)
        if rack ~= NOWHERE and (not by_rack[rack] or s < score[by_rack[rack]]) then by_rack[rack] = i end
      end
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
  if places[p] == places[d] then return listed and byte(argument.shares, p) or byte(facts[p], 2) end
  local rack = rack_of(p)
  if rack ~= UNKNOWN and rack == rack_of(d) then return 3 end
  local zone = zone_of(p)
  return zone ~= UNKNOWN and zone == zone_of(d) and 4 or 5
end

-- Index of the prefill worker (0 = local), of the decode worker, seconds, seconds that the hand-off adds, whether it costs
-- much more than it would between the best of either role at no distance; nil: no pair.
local function choose()
  local best_ps, among_ps, p_places, p_racks = best(ps)
  local best_ds, among_ds, d_places, d_racks = best(ds)
  local free = best_ps[1] and best_ds[1] and score[best_ps[1]] + joining[best_ds[1]]
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
    local ship = alone and 0 or (L - (hits[d] or 0)) * token_bytes / bandwidths[level(p, d)] - 0.9 * compute
    if ship < 0 then ship = 0 end
    consider(p, d, ready + joining[d] + ship, ship)
  end
  local function pair(p, d)
    if score[p] + joining[d] <= cheapest * TIE then join(p, d, score[p], computes[p] or cold) end
  end
  for i = 1, #best_ps do
    local p = best_ps[i]
    local ready, compute = score[p], computes[p] or cold
    for k = 1, #best_ds do  -- beyond the tie already, most of them: whatever the hand-off adds
      local d = best_ds[k]
      if ready + joining[d] <= cheapest * TIE then join(p, d, ready, compute) end
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
  if places_count then together(p_places, d_places, places) end
  if racks_count then together(p_racks, d_racks, racks) end
  if may_local then
    local function locally(d)
      -- Its own running batch waits for the chunks: prefill here costs those streams too.
      local slow = living[d] > 0 and 2 or 1
      consider(0, d, queue[d] + slow * prefill_seconds(L - reused(d)) + wait[d], 0)
    end
    for k = 1, #ds do
      if not bad[ds[k]] then locally(ds[k]) end
    end
  end
  if choices == 0 then return nil end
  -- What lies within 5 % of the cheapest is a tie. Of equal times the one with most of the prompt cached costs the
  -- cluster least; chance decides the rest.
  local reuse, equal = -1, 0
  local tied = {}
  for c = 1, choices do
    if cost[c] <= cheapest * TIE then
      local p, d = cp[c], cd[c]
      local cached = p == 0 and reused(d) or reused(p) + (alone and 0 or hits[d] or 0)
      if cached > reuse then reuse, equal = cached, 0 end
      if cached == reuse then
        equal = equal + 1
        tied[equal] = c
      end
    end
  end
  local pick = tied[1 + math.floor(random * equal)]
  return cp[pick], cd[pick], cost[pick], shipping[pick], free and cheapest > WORTH_LOOKING * free
end

local function look_wider()
  local from = total + 1
  look(WIDE, true)
  return total >= from
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
      if age >= suspect then found[k] = age >= dead and 'dead' or 'suspect' end
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
