-- Third part of the placement script: what is known of a candidate, its load, and what it costs by itself.
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
local function add_named(some)
  if #some == 0 then return end
  local packed = call('HMGET', KEYS[8], unpack(some))
  for i = 1, #some do add(some[i], packed[i]) end
end
-- Names of listed candidates, racks and zones are cut out where they are needed: for few candidates.
local function name_of(i) return names[i] or sub(ARGV[LISTED - 1 + i], 3) end
local racks, zones = {}, {}
local function rack_of(i)
  racks[i] = racks[i] or (listed and byte(argument.racks, i) or sub(facts[i], 27, 38))
  return racks[i]
end
local function zone_of(i)
  zones[i] = zones[i] or (listed and byte(argument.zones, i) or sub(facts[i], 39, 50))
  return zones[i]
end

-- Seconds of a token's hand-off between the nearest workers (the other worker of the pair is not known yet), and between the
-- farthest.
local fast, slow = math.max(unpack(bandwidths, 1, 5)), math.min(unpack(bandwidths, 1, 5))
local ship_rate, far_rate = token_bytes / fast, token_bytes / slow
local function prefill_seconds(u) return a * u + b * u * (L - u / 2) end
local cold, need = prefill_seconds(L), L + out
local cold_ship = L * ship_rate
-- By index. Only of workers that hold some of the prompt: hits (tokens), computes (seconds of a prefill there). Only of decode
-- workers: wait (seconds), living (resident tokens), queue (seconds).
local score, hits, computes, wait, living, queue = {}, {}, {}, {}, {}, {}
local joining = {}  -- as `wait`, of a request that a prefill worker computes: nothing, where it ends there
local function reused(i) return whole and 0 or hits[i] or 0 end  -- by the worker, if it prefills
local function waits_at(p) return math.max(0, (load_of[p] or 0) / rate) end
local longest, longest_hit, cover, may_local = nil, 0, nil, nil
local rated, rated_p, rated_d = 0, 0, 0  -- candidates that are read so far

-- What waits at prefill workers, what lives at decode workers (and waits, where they prefill): one call for what the sets
-- have not said.
local function read_loads()
  local fields, of, n = {}, {}, 0
  local function ask(list, from, kind)
    for k = from, #list do
      local i = list[k]
      if not load_of[i] then
        n = n + 1
        fields[n], of[n] = kind .. names[i], i
      end
    end
  end
  if listed then
    load_of = call('HMGET', KEYS[2], unpack(ARGV, LISTED))
  else
    ask(ps, rated_p + 1, 'p:')
    ask(ds, rated_d + 1, 'd:')
  end
  if may_local then
    for k = rated_d + 1, #ds do
      n = n + 1
      fields[n], of[n] = 'p:' .. name_of(ds[k]), -ds[k]
    end
  end
  if n > 0 then
    local loads = call('HMGET', KEYS[2], unpack(fields))
    for i = 1, n do load_of[of[i]] = loads[i] end
  end
end

-- Reads and rates the candidates that have been added since the last time.
local function rate_new()
  if total == rated then return end
  if rated == 0 then may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and #ps == 0) end
  read_loads()
  cover = all_cover or covered(nodes, rated > 0 and {unpack(slots, rated + 1)} or slots, now)
  local cover, load_of, slots, score, rate = cover, load_of, slots, score, rate
  local wait, capacities, per_token, need = wait, capacities, per_token, need
  for k = rated_d + 1, #ds do
    local i = ds[k]
    local load, blocks = load_of[i], cover[slots[i]]
    load = load and load + 0 or 0  -- a number without a call
    if load < 0 then load = 0 end
    local penalty, lack = per_token * load, need + load - capacities[i]
    if lack > 0 then penalty = penalty + 1 + lack / math.max(1, capacities[i]) end
    wait[i], joining[i] = penalty, alone and 0 or penalty
    if may_local then living[i], queue[i] = load, math.max(0, tonumber(load_of[-i] or 0)) / rate end
    if blocks then
      local held = math.min(blocks * page, L - 1)
      hits[i], score[i] = held, penalty + (L - held) * ship_rate
      if held > longest_hit then longest, longest_hit = i, held end
    else
      score[i] = penalty + cold_ship
    end
  end
  for k = rated_p + 1, #ps do
    local i = ps[k]
    local load, blocks = load_of[i], cover[slots[i]]
    local seconds = load and load / rate or 0
    if seconds < 0 then seconds = 0 end
    if blocks and not whole then
      local held = math.min(blocks * page, L - 1)
      local compute = prefill_seconds(L - held)
      hits[i], computes[i], score[i] = held, compute, seconds + compute
    else
      score[i] = seconds + cold
    end
  end
  rated, rated_p, rated_d = total, #ps, #ds
end
