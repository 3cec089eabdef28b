-- The radix tree. A node is two keys, named by the 8-byte key of its first block:
--   n:<key>  label: the keys of its run of blocks, packed
--   w:<key>  hash: slot -> (confirmed, predicted, predicted_until_ms); field "c" marks a node with children
-- Chained hashes name whole prefixes, so a child is found by the key after the run: no child pointers.

local KEY = 8
local PACK = '>I4I4I8'
local DEPTH = 64  -- nodes of a chain that are looked at; what lies deeper is not recorded, and counts as not held

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Blocks that label and chain (from block `pos`) share. Chained hashes that agree at i agree before i,
-- so one comparison decides the common case and a binary search the rest.
local function shared(label, chain, pos)
  local size = #label
  local rest = #chain - pos * KEY
  if rest < size then size = rest end
  local base = pos * KEY
  if string.sub(label, 1, size) == string.sub(chain, base + 1, base + size) then return size / KEY end
  local low, high = 0, size / KEY
  while high - low > 1 do
    local mid = math.floor((low + high) / 2)
    if string.sub(label, mid * KEY - KEY + 1, mid * KEY) == string.sub(chain, base + mid * KEY - KEY + 1, base + mid * KEY) then
      low = mid
    else
      high = mid
    end
  end
  return low
end

local function node_key(chain, pos)
  return string.sub(chain, pos * KEY + 1, pos * KEY + KEY)
end

local function touch(prefix, key, expire_at)
  redis.call('PEXPIREAT', prefix .. 'n:' .. key, expire_at)
  redis.call('PEXPIREAT', prefix .. 'w:' .. key, expire_at)
end

-- Sets what each of `slots` holds of one node. kind: 'predicted' (a placement, until until_ms), 'unreported' (the same where what is
-- confirmed does not count), 'whole' (a report that ends here: more may be held beyond it) or 'cut' (a report that says nothing
-- beyond is held). known: what the node has of these slots; nil: not read. -> whether the node has lost a slot
local function mark(prefix, key, slots, held, kind, until_ms, known)
  local at = prefix .. 'w:' .. key
  known = known or redis.call('HMGET', at, unpack(slots))
  local fresh, gone = {}, {}
  for i = 1, #slots do
    local raw = known[i]
    local c, p, u = 0, 0, 0
    if raw then c, p, u = struct.unpack(PACK, raw) end
    local says = true
    if kind == 'predicted' or kind == 'unreported' then
      -- A prediction does not change what is confirmed, and more than that is not noted beside it.
      says = (kind == 'unreported' or c < held) and (u == 0 or held >= p or u <= now_ms())
      if says then p, u = held, until_ms end
    elseif kind == 'whole' then
      if held > c then c = held end
    else
      -- A worker's report ends a prediction of more, and leaves one of as much: where reports do not count, nothing else says that the
      -- worker holds what lies before the cut.
      c, p = held, math.min(p, held)
      if p == 0 then u = 0 end
    end
    if not says then
      -- nothing to write
    elseif c > 0 or p > 0 then
      fresh[#fresh + 1] = slots[i]
      fresh[#fresh + 1] = struct.pack(PACK, c, p, u)
    elseif raw then
      gone[#gone + 1] = slots[i]
    end
  end
  if #fresh > 0 then redis.call('HSET', at, unpack(fresh)) end
  if #gone > 0 then redis.call('HDEL', at, unpack(gone)) end
  return #gone > 0
end

-- Cuts a node after `m` blocks: the rest becomes its child. The caller touches the node.
local function split(prefix, key, label, m, expire_at)
  local rest = string.sub(label, m * KEY + 1)
  local child = string.sub(rest, 1, KEY)
  local fields = redis.call('HGETALL', prefix .. 'w:' .. key)
  redis.call('DEL', prefix .. 'w:' .. child)
  redis.call('SET', prefix .. 'n:' .. child, rest, 'PXAT', expire_at)
  redis.call('SET', prefix .. 'n:' .. key, string.sub(label, 1, m * KEY))
  for i = 1, #fields, 2 do
    local slot = fields[i]
    if slot == 'c' then
      redis.call('HSET', prefix .. 'w:' .. child, 'c', '1')
    else
      local c, p, u = struct.unpack(PACK, fields[i + 1])
      if c > m or p > m then
        redis.call('HSET', prefix .. 'w:' .. child, slot, struct.pack(PACK, math.max(0, c - m), math.max(0, p - m), u))
      end
      redis.call('HSET', prefix .. 'w:' .. key, slot, struct.pack(PACK, math.min(c, m), math.min(p, m), u))
    end
  end
  redis.call('HSET', prefix .. 'w:' .. key, 'c', '1')
  redis.call('PEXPIREAT', prefix .. 'w:' .. child, expire_at)
end

-- The fields of these slots, by index in `slots`, if the node was read whole; nil where reading them from Redis costs less than a
-- search of all its fields.
local LOOKED_THROUGH = 64
local function held_in(node, slots)
  local fields, found = node.fields, {}
  if not node.whole or #fields > LOOKED_THROUGH then return nil end
  for i = 1, #fields, 2 do
    for k = 1, #slots do
      if fields[i] == slots[k] then found[k] = fields[i + 1] end
    end
  end
  return found
end

-- Records that each of `slots` holds the first `held` blocks of `chain`. A report that is cut also clears the slots below the
-- cut. Nodes are created only for blocks that are held. -> how many nodes it has looked at
-- seen: nodes that walk (walk.lua) has read in this script, by key, or false where there was none; nil: none were read.
-- keeps: do not change when nodes expire that were there already. unreported: only predictions count.
local function insert(prefix, chain, slots, held, confirmed, until_ms, expire_at, seen, keeps, unreported)
  local total = #chain / KEY
  local kind = unreported and 'unreported' or 'predicted'
  if confirmed then kind = held < total and 'cut' or 'whole' end
  local pos = 0
  local last, visited = nil, 0
  seen = seen or {}
  while pos < total do
    local key = node_key(chain, pos)
    local node = seen[key]
    local label
    if node then
      label = node.label
    elseif node == nil then
      label = redis.call('GET', prefix .. 'n:' .. key)
    end
    if not label then
      if held <= pos then return visited end
      local rest = string.sub(chain, pos * KEY + 1, held * KEY)
      if last and redis.call('HEXISTS', prefix .. 'w:' .. last.key, 'c') == 0 then
        redis.call('APPEND', prefix .. 'n:' .. last.key, rest)
        mark(prefix, last.key, slots, held - last.pos, kind, until_ms)
      elseif visited < DEPTH then
        if last then redis.call('HSET', prefix .. 'w:' .. last.key, 'c', '1') end
        redis.call('DEL', prefix .. 'w:' .. key)
        redis.call('SET', prefix .. 'n:' .. key, rest, 'PXAT', expire_at)
        mark(prefix, key, slots, held - pos, kind, until_ms, {})
        redis.call('PEXPIREAT', prefix .. 'w:' .. key, expire_at)
      end
      return visited + 1
    end
    if visited == DEPTH then return visited end
    visited = visited + 1
    local run = #label / KEY
    local m = node and node.m or shared(label, chain, pos)
    if m < run and pos + m < total and held > pos + m and visited < DEPTH then
      split(prefix, key, label, m, expire_at)
      run, node = m, nil
    end
    local there = node and node.there
    -- A full Redis evicts the two keys of a node separately: whether this node has children is unknown by then.
    if held > pos and not there and redis.call('EXISTS', prefix .. 'w:' .. key) == 0 then
      redis.call('HSET', prefix .. 'w:' .. key, 'c', '1')
    end
    local mine = math.min(math.max(held - pos, 0), math.min(m, run))
    -- Where the chain leaves this run and is cut only after that, the report is not about the rest of the run.
    local how = kind == 'cut' and m < run and held >= pos + m and 'whole' or kind
    -- A leaf beyond which nothing was found takes the rest of the chain at once.
    local leaf = node and node.whole and there and m == run and not node.parent and held > pos + run and seen[node_key(chain, pos + run)] == false
    if leaf then
      redis.call('APPEND', prefix .. 'n:' .. key, string.sub(chain, (pos + run) * KEY + 1, held * KEY))
      mine = held - pos
    end
    if mine > 0 or how == 'cut' then
      local lost = mark(prefix, key, slots, mine, how, until_ms, node and held_in(node, slots))
      -- A leaf goes with its last holder.
      if lost and redis.call('EXISTS', prefix .. 'w:' .. key) == 0 then redis.call('DEL', prefix .. 'n:' .. key) end
    end
    if not (keeps and there) then touch(prefix, key, expire_at) end
    if leaf or m < run or (held <= pos and not confirmed) then return visited + (leaf and 1 or 0) end
    last = {key = key, pos = pos}
    pos = pos + run
  end
  return visited
end
