-- Second part of the placement script: the candidates, and their load.
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
-- Of listed candidates names and facts are cut out where they are needed: for few of them.
local function name_of(i) return names[i] or sub(ARGV[LISTED - 1 + i], 3) end
local all_facts = listed and ARGV[32]
local function fact(i, first, last)
  if not listed then return sub(facts[i], first, last) end
  local before = FACTS_SIZE * (i - 1)
  return sub(all_facts, before + first, before + last)
end
local fast = math.max(unpack(bandwidths))

if listed then
  total = #ARGV - LISTED + 1
  slots = {struct.unpack('>' .. string.rep('I4', total), ARGV[30])}
  capacities = {struct.unpack('>' .. string.rep('d', total), ARGV[31])}
  local packed, wanted = ARGV[32], tonumber(ARGV[29])
  for i = 1, total do
    places[i] = sub(packed, FACTS_SIZE * i - 48, FACTS_SIZE * i - 37)
    if i <= wanted then ps[i] = i else ds[i - wanted] = i end
  end
end
-- Reads the first `width` of each set. A wide look reads as many of each place as a narrow one reads of all.
local function look(width, wide)
  local set = tag .. 'set:' .. group .. ':'
  local wants_prefill = ARGV[29] == '1'
  local function barred_names(packed, count)
    local barred = {}
    if count > 0 then
      for name in string.gmatch(packed, '[^%z]+') do barred[name] = true end
    end
    return barred
  end
  local barred_p, barred_d = tonumber(ARGV[32]), tonumber(ARGV[33])
  local barred = {p = barred_names(ARGV[30], barred_p), d = barred_names(ARGV[31], barred_d)}
  -- The first of a set that are not passed over. Where all that were read are equal (an idle cluster), chance decides from
  -- which of the equal ones on.
  local function heads(kind, passed, count)
    local want, key = width + count, set .. kind
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
        if #found == width then break end
      end
    end
    return found
  end
  local p_heads = wants_prefill and heads('p', barred.p, barred_p) or {}
  local r_heads = heads('r', barred.d, barred_d)
  local asked = {}
  local function ask(list)
    for i = 1, #list do
      if not known[list[i]] then asked[#asked + 1] = list[i] end
    end
  end
  ask(p_heads)
  ask(r_heads)
  if #r_heads == width and (mode == 'always' or mode == 'auto' or (mode == 'fallback' and #p_heads == 0)) then
    ask(heads('l', barred.d, barred_d))
  end
  local from = #asked + 1
  local held = not wide and #nodes > 0 and holders(nodes, math.min(HOLDERS + barred_p + barred_d, 64), random, now) or {}
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
      if i < from or (packed[i] and sub(packed[i], 52, 63) == group and (wants_prefill or byte(packed[i], 51) ~= 0)) then
        if add(asked[i], packed[i]) and i >= from then is_holder[total] = true end
      end
    end
  end
  -- Where one of those with the least resident tokens lacks room, those with most room may be better.
  if #r_heads == width then
    for k = 1, #ds do
      if load_of[ds[k]] and L + out + load_of[ds[k]] > capacities[ds[k]] then
        add_named(heads('f', barred.d, barred_d))
        break
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
    local page = call('ZRANGE', key, 0, wide and HEADS - 1 or 0, 'WITHSCORES')
    if page[1] and passed[page[1]] then page = call('ZRANGE', key, 1, count, 'WITHSCORES') end
    for i = 1, #page, 2 do
      local first = page[i]
      if not passed[first] then
        if known[first] == nil then
          known[first], given[first] = false, page[i + 1] + 0  -- asked for
          beside[#beside + 1] = first
        end
        if not wide then break end
      end
    end
  end
  local by_place, by_rack = fast > bandwidths[3], bandwidths[3] > bandwidths[4]
  local function look_beside(kind, own, its_heads, passed, count)
    for i = 1, wide and 0 or #its_heads do  -- those of the other role, by which their places are seen
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
  if #r_heads == width then look_beside('r', ps, r_heads, barred.d, barred_d) end
  if #p_heads == width then look_beside('p', ds, p_heads, barred.p, barred_p) end
  add_named(beside)
end
if not listed then
  local function few(kind, seen) return 2 * call('ZCARD', tag .. 'set:' .. group .. ':' .. kind) < tonumber(seen) end
  if few('r', ARGV[35]) or (ARGV[29] == '1' and few('p', ARGV[34])) then return refused({-8}) end
  look(HEADS, false)
end
local np = #ps
local may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and np == 0)
if #ds == 0 or (np == 0 and not may_local) then return refused({-6}) end

-- What waits at prefill workers, what lives at decode workers (and waits, where they prefill): one call for what the sets
-- have not said. From the given number of either role on.
local function read_loads(from_p, from_d)
  local fields, of = {}, {}
  local function want(field, i)
    fields[#fields + 1], of[#of + 1] = field, i
  end
  if listed then
    load_of = call('HMGET', KEYS[2], unpack(ARGV, LISTED))
  else
    for k = from_p, #ps do
      if not load_of[ps[k]] then want('p:' .. names[ps[k]], ps[k]) end
    end
    for k = from_d, #ds do
      if not load_of[ds[k]] then want('d:' .. names[ds[k]], ds[k]) end
    end
  end
  if may_local then
    for k = from_d, #ds do want('p:' .. name_of(ds[k]), -ds[k]) end
  end
  if #fields > 0 then
    local loads = call('HMGET', KEYS[2], unpack(fields))
    for i = 1, #fields do load_of[of[i]] = loads[i] end
  end
end
read_loads(1, 1)
