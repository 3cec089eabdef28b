-- Fourth part of the placement script: the candidates.
if listed then
  total = #ARGV - LISTED + 1
  slots = {struct.unpack('>' .. string.rep('I4', total), argument.slots)}
  capacities = {struct.unpack('>' .. string.rep('d', #argument.capacities / 8), argument.capacities)}
  places = {byte(argument.places, 1, -1)}
  local num_decode = total - num_prefill
  for i = 1, num_decode do ds[i] = i end
  for i = 1, num_prefill do ps[i] = num_decode + i end
end
local unlisted = 0  -- blocks of the prompt that workers may hold without being candidates
-- Prefill and decode workers that may be better with one beside them than the best pair is.
local function worth_a_look()
  local near_p, near_d, least, p = {}, {}, math.huge, nil
  for k = 1, #ps do
    if score[ps[k]] < least then p, least = ps[k], score[ps[k]] end
  end
  if not p or alone then return near_p, near_d end
  local most = math.huge  -- that the best pair costs
  for k = 1, #ds do
    local d = ds[k]
    most = math.min(most, least + wait[d] + math.max(0, (L - (hits[d] or 0)) * far_rate - 0.9 * (computes[p] or cold)))
  end
  most = most * TIE
  for k = 1, #ps do
    p = ps[k]
    if score[p] <= most and L * far_rate > 0.9 * (computes[p] or cold) then near_p[#near_p + 1] = p end
  end
  local compute = prefill_seconds(whole and L or L - math.min(unlisted * page, L - 1))
  for k = 1, #ds do
    local d = ds[k]
    if compute + wait[d] <= most and (L - (hits[d] or 0)) * far_rate > 0.9 * compute then near_d[#near_d + 1] = d end
  end
  return near_p, near_d
end
local set, wants_prefill = tag .. 'set:' .. group .. ':', num_prefill == 1
local barred, barred_p, barred_d  -- names to pass over, by role, and how many
if not listed then
  local function among(packed)
    local found, size = {}, 0
    for name in string.gmatch(packed, '[^%z]+') do
      found[name], size = true, size + 1
    end
    return found, size
  end
  barred = {}
  barred.p, barred_p = among(argument.without_prefill)
  barred.d, barred_d = among(argument.without_decode)
end
-- Reads the first `width` of each set. A wide look reads as many of each place as a narrow one reads of all. Its parts are inner
-- functions because a chunk of Lua has at most 200 locals, and this script has nearly as many.
local function look(width, wide)
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
  ask(r_heads)
  ask(p_heads)
  if #r_heads == width and (mode == 'always' or mode == 'auto' or (mode == 'fallback' and #p_heads == 0)) then
    ask(heads('l', barred.d, barred_d))
  end
  local from = #asked + 1
  local held = {}
  if not wide and #nodes > 0 then
    held, unlisted = holders(nodes, math.min(HOLDERS + barred_p + barred_d, 64), random, now)
  end
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
  rate_new()
  -- Where one of those with the least resident tokens lacks room, those with most room may be better.
  if #r_heads == width then
    for k = 1, #ds do
      if load_of[ds[k]] and need + load_of[ds[k]] > capacities[ds[k]] then
        add_named(heads('f', barred.d, barred_d))
        rate_new()
        break
      end
    end
  end
  -- The other role's best beside each candidate, if lying together may help: if the hand-off from there is not hidden behind
  -- the prefill, and what it costs without any is not beyond what the best pair costs far apart. Workers that are no candidates
  -- have at most `unlisted` blocks. The first of a place among the heads of all places is the first of its own.
  local beside, seen = {}, {}
  local function first_of(where, passed, count)
    if seen[where] then return end
    seen[where] = true
    local key = set .. where
    local page = call('ZRANGE', key, 0, wide and HEADS - 1 or 0, 'WITHSCORES')
    if page[1] and passed[page[1]] then page = call('ZRANGE', key, 1, count, 'WITHSCORES') end
    local left = wide and HEADS or 1
    for i = 1, #page, 2 do
      local first = page[i]
      if not passed[first] then
        if known[first] == nil then
          known[first], given[first] = false, page[i + 1] + 0  -- asked for
          beside[#beside + 1] = first
        end
        left = left - 1
        if left == 0 then break end
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
      local which = own[i]
      if by_place then first_of(kind .. ':' .. places[which], passed, count) end
      local rack = by_rack and rack_of(which)
      if rack and rack ~= NOWHERE then first_of(kind .. ':rack:' .. rack, passed, count) end
    end
  end
  local near_p, near_d = worth_a_look()
  if #r_heads == width then look_beside('r', near_p, r_heads, barred.d, barred_d) end
  if #p_heads == width then look_beside('p', near_d, p_heads, barred.p, barred_p) end
  add_named(beside)
  rate_new()
end
if not listed then
  local function few(kind, seen) return 2 * call('ZCARD', set .. kind) < tonumber(seen) end
  if few('r', argument.seen_decode) or (wants_prefill and few('p', argument.seen_prefill)) then return refused({-8}) end
  look(HEADS, false)
end
if total > 0 then rate_new() end
if #ds == 0 or (#ps == 0 and not may_local) then return refused({-6}) end
