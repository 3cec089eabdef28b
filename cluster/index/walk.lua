-- Reads the tree for a placement; tree.lua is put in front.

-- Removes slots without an owner from a node. Checks `budget` of its slots at most, other ones each time. -> the rest of the
-- budget
local function sweep(node, now, owners, budget)
  local size = #node.fields / 2
  local looks = math.min(budget, size)
  local slots, start = {}, now % size
  for i = 1, looks do slots[i] = node.fields[2 * ((start + i) % size) + 1] end
  local names = redis.call('HMGET', owners, unpack(slots))
  for i = 1, looks do
    if not names[i] and slots[i] ~= 'c' then
      redis.call('HDEL', node.at, slots[i])
      node.whole, node.there = false, false
    end
  end
  return budget - looks
end

-- How many leading blocks of a node's run a slot holds: `m` at most, which the chain shares with the run. unreported: what is
-- confirmed does not count.
local function held_of(packed, m, now, unreported)
  local have, predicted, until_ms = struct.unpack(PACK, packed)
  if unreported then have = 0 end
  if predicted > have and until_ms > now then have = predicted end
  return have < m and have or m
end

-- Follows `chain` for as long as some worker may hold a node's whole run. ->
--   the nodes in order;
--   the same by key, with false where there is none, so that a later insert of the chain need not read them again;
--   what `covered` returns for any slots; nil where a node was not read whole.
-- A node: at (its key), label, pos, run, m (blocks that the chain shares with the run), fields (of a node with more than `wide`
-- slots some of them), read (fields were all), parent (it has children; set where read), and after the sweep: whole (fields still
-- are all), there (the node still has fields).
-- expire_at: false where the nodes' expiry is not changed, or an insert of the same chain follows. unreported: only predictions
-- count (index_feeds is predicted).
local function walk(prefix, chain, now, expire_at, owners, budget, wide, unreported)
  local nodes, seen, cover = {}, {}, {}
  local total, pos = #chain / KEY, 0
  local number, unpacked = tonumber, struct.unpack  -- the inner loop runs for every worker that holds a common prefix
  while pos < total and #nodes < DEPTH do
    local key = node_key(chain, pos)
    local label = redis.call('GET', prefix .. 'n:' .. key)
    if not label then
      seen[key] = false
      break
    end
    local run = #label / KEY
    local m = shared(label, chain, pos)
    local node = {at = prefix .. 'w:' .. key, label = label, pos = pos, run = run, m = m, unreported = unreported}
    nodes[#nodes + 1], seen[key] = node, node
    local size = redis.call('HLEN', node.at)
    local onward = size > wide
    if onward then
      node.fields, cover = redis.call('HRANDFIELD', node.at, -wide, 'WITHVALUES'), nil
    else
      local fields = redis.call('HGETALL', node.at)
      node.fields, node.read, node.whole = fields, true, true
      for i = 1, #fields, 2 do
        local slot = number(fields[i])  -- nil: the mark of a node with children
        if not slot then
          node.parent = true
        elseif pos == 0 or not cover or cover[slot] == pos then
          local have, predicted, until_ms = unpacked(PACK, fields[i + 1])
          if unreported then have = 0 end
          if predicted > have and until_ms > now then have = predicted end
          if have > m then have = m end
          if cover then cover[slot] = pos + have end
          if have == run then onward = true end
        end
      end
    end
    node.there = #node.fields > 0
    if budget > 0 and size > 0 then budget = sweep(node, now, owners, budget) end
    if expire_at then touch(prefix, key, expire_at) end
    if m < run or not onward then break end
    pos = pos + run
  end
  return nodes, seen, cover
end

-- -> at most `most` slots that hold blocks of the deepest nodes, the deepest first; how many blocks of the chain other slots may
-- hold. Where a node has more slots, `random` (0 to 1) chooses.
local function holders(nodes, most, random, now)
  local found, seen, others = {}, {}, 0
  local function take(slot, have)
    if slot and have > 0 and not seen[slot] and #found < most then
      seen[slot] = true
      found[#found + 1] = slot
    end
  end
  for n = #nodes, 1, -1 do
    local node = nodes[n]
    local fields = node.fields
    local size = #fields / 2
    local start = math.floor(random * size)
    for i = 0, size - 1 do
      local at = 2 * ((start + i) % size) + 1
      local slot = tonumber(fields[at])
      if slot then take(slot, held_of(fields[at + 1], node.m, now, node.unreported)) end
    end
    if others == 0 and (#found >= most or not node.read) then others = node.pos + node.m end
    if #found >= most then break end
  end
  return found, others
end

-- -> by slot the leading blocks of the chain that it holds, nil for none; of `slots` at least, others may be missing.
local function covered(nodes, slots, now)
  local cover = {}
  for n = 1, #nodes do
    local node = nodes[n]
    local pos, m, fields, unreported = node.pos, node.m, node.fields, node.unreported
    if node.read then
      for i = 1, #fields, 2 do
        local slot = tonumber(fields[i])
        if slot and (pos == 0 or cover[slot] == pos) then cover[slot] = pos + held_of(fields[i + 1], m, now, unreported) end
      end
    else
      local asked = {}
      for i = 1, #slots do
        if pos == 0 or cover[slots[i]] == pos then asked[#asked + 1] = slots[i] end
      end
      if #asked == 0 then break end
      local packed = redis.call('HMGET', node.at, unpack(asked))
      for i = 1, #asked do
        if packed[i] then cover[asked[i]] = pos + held_of(packed[i], m, now, unreported) end
      end
    end
  end
  return cover
end
