-- Charges: what attempts add to `load`. `chg:<router>:<run>` holds one field per attempt:
--   transfer id -> format, class, prefill tokens, decode tokens, worker that prefills, decode worker
-- `load` is the sum of all these tables. router/placement/charges.py packs the same. Later formats only append to these fields,
-- so that a router of any version takes off what a dead one of another version has charged.
local FORMAT, FORMATS = 1, 32  -- what is above is text
local CHARGE = '>BBI4I4I2c0I2c0'
local CLASSES = {normal = 0, high = 1, batch = 2}
local CLASS_FIELDS = {'high:', 'batch:'}  -- by class; class 0 has no field of its own

local function pack_charge(class, prefill, decode, p, d)
  return struct.pack(CHARGE, FORMAT, class, prefill, decode, #p, p, #d, d)
end

-- class, prefill tokens, decode tokens, p, d; nil: it is no charge
local function unpack_charge(packed)
  local whole, format, class, prefill, decode, p, d = pcall(struct.unpack, CHARGE, packed)
  if whole and format >= FORMAT and format < FORMATS then return class, prefill, decode, p, d end
end

local deltas = {}
local function change(field, amount)
  deltas[field] = (deltas[field] or 0) + amount
end

-- Changes the prefill tokens and the decode tokens of one attempt.
local function count(class, prefill, decode, p, d)
  change('p:' .. p, prefill)
  if CLASS_FIELDS[class] then change(CLASS_FIELDS[class] .. 'p:' .. p, prefill) end
  change('d:' .. d, decode)
end

-- Writes the changes so far to `load`, and moves the workers in their sets. known: facts of workers that the caller has read, or
-- false: the sets are left as they are.
local function apply(tag, known)
  local load = tag .. 'load'
  local kinds, names, values, unknown = {}, {}, {}, {}
  for field, amount in pairs(deltas) do
    if amount ~= 0 then
      local value = redis.call('HINCRBY', load, field, amount)
      if value == 0 then redis.call('HDEL', load, field) end
      local kind = string.sub(field, 1, 1)
      if known and (kind == 'p' or kind == 'd') then
        local name = string.sub(field, 3)
        kinds[#kinds + 1], names[#names + 1], values[#values + 1] = kind, name, value
        if known[name] == nil then
          known[name] = false
          unknown[#unknown + 1] = name
        end
      end
    end
  end
  if #unknown > 0 then
    local facts = redis.call('HMGET', tag .. 'facts', unpack(unknown))
    for i = 1, #unknown do known[unknown[i]] = facts[i] end
  end
  for i = 1, #names do
    local facts = known[names[i]]
    if facts then follow(tag, kinds[i], names[i], facts, values[i]) end
  end
  deltas = {}
end
