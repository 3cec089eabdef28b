-- One placement: match, score, charge, record. One call per dispatch attempt.
-- KEYS: owners, load, routers, calls, chg:<router>
-- ARGV: prefix, router, chain, tokens, page, output_tokens, mode, random, a, b, token_bytes, bandwidth,
--       per_token_decode, feeds, ttl_ms, predict_ms, number of prefill candidates, then 5 fields for every
--       candidate: slot, name, place, rate, capacity_tokens
-- mode: never | fallback | auto | always (local prefill at the decode worker)
-- -> prefill index (0 = local), decode index, cached tokens at prefill, at decode, cost, terms…
local prefix, router, chain = ARGV[1], ARGV[2], ARGV[3]
local L, page, out = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local mode, random = ARGV[7], tonumber(ARGV[8])
local a, b = tonumber(ARGV[9]), tonumber(ARGV[10])
local token_bytes, bandwidth, per_token = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local feeds, ttl, predict = ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[16])
local np = tonumber(ARGV[17])
local FIRST, WIDTH = 18, 5

redis.call('INCR', KEYS[4])
local now = now_ms()

-- An expired router's charges are dropped, one table a call.
local dead = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 1)[1]
if dead then
  local table_key = string.gsub(KEYS[5], 'chg:.*$', '') .. 'chg:' .. dead
  local old = redis.call('HGETALL', table_key)
  for i = 1, #old, 2 do redis.call('HINCRBY', KEYS[2], old[i], -tonumber(old[i + 1])) end
  redis.call('DEL', table_key)
  redis.call('ZREM', KEYS[3], dead)
end

local cover = match(prefix, chain, now, now + ttl, KEYS[1], 16)

local count = (#ARGV - FIRST + 1) / WIDTH
local load_fields = {}
for i = 1, count do
  local name = ARGV[FIRST + (i - 1) * WIDTH + 1]
  load_fields[#load_fields + 1] = 'p:' .. name
  load_fields[#load_fields + 1] = 'd:' .. name
end
local loads = count > 0 and redis.call('HMGET', KEYS[2], unpack(load_fields)) or {}

local function prefill_seconds(u)
  return a * u + b * u * (L - u / 2)
end

local function candidate(i)
  local at = FIRST + (i - 1) * WIDTH
  local hit = (cover[ARGV[at]] or 0) * page
  if hit > L - 1 then hit = L - 1 end
  return {
    index = i, slot = ARGV[at], name = ARGV[at + 1], place = ARGV[at + 2], rate = tonumber(ARGV[at + 3]),
    capacity = tonumber(ARGV[at + 4]), hit = hit,
    pending = math.max(0, tonumber(loads[2 * i - 1] or '0') or 0),
    resident = math.max(0, tonumber(loads[2 * i] or '0') or 0),
  }
end

local function decode_penalty(d)
  local penalty = per_token * d.resident
  local free = d.capacity - d.resident
  if free < L + out then penalty = penalty + 1 + (L + out - free) / math.max(1, d.capacity) end
  return penalty
end

local function best(list, keep)
  table.sort(list, function(x, y)
    if x.score ~= y.score then return x.score < y.score end
    return x.index < y.index
  end)
  local chosen, places = {}, {}
  for rank, c in ipairs(list) do
    places[c.place] = (places[c.place] or 0) + 1
    if rank <= keep or places[c.place] <= 2 then chosen[#chosen + 1] = c end
  end
  return chosen
end

local ps, ds, longest = {}, {}, nil
for i = 1, np do
  local p = candidate(i)
  p.wait = p.pending / p.rate
  p.compute = prefill_seconds(L - p.hit)
  p.score = p.wait + p.compute
  ps[#ps + 1] = p
end
for i = np + 1, count do
  local d = candidate(i)
  d.penalty = decode_penalty(d)
  d.ship = (L - d.hit) * token_bytes / bandwidth
  d.score = d.penalty + d.ship
  ds[#ds + 1] = d
  if not longest or d.hit > longest.hit then longest = d end
end
if #ds == 0 then return {-1} end
ps, ds = best(ps, 8), best(ds, 8)
local seen = false
for _, d in ipairs(ds) do if d == longest then seen = true end end
if not seen then ds[#ds + 1] = longest end

local choices = {}
for _, p in ipairs(ps) do
  for _, d in ipairs(ds) do
    local near = p.place == d.place and 1 or 0.5
    local ship = math.max(0, d.ship / near - 0.9 * p.compute)
    choices[#choices + 1] = {p = p, d = d, ship = ship, cost = p.wait + p.compute + ship + d.penalty}
  end
end
local may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and #ps == 0)
if may_local then
  for _, d in ipairs(ds) do
    local u = L - d.hit
    -- Its own running batch waits for the chunks: prefill here costs those streams too.
    local slow = d.resident > 0 and 2 or 1
    local cost = d.pending / d.rate + slow * prefill_seconds(u) + d.penalty
    choices[#choices + 1] = {d = d, ship = 0, cost = cost}
  end
end
if #choices == 0 then return {-2} end
table.sort(choices, function(x, y)
  if x.cost ~= y.cost then return x.cost < y.cost end
  return x.d.index < y.d.index
end)
local ties = 1
while ties < #choices and choices[ties + 1].cost <= choices[1].cost * 1.05 do ties = ties + 1 end
-- Of equal times the one with most of the prompt cached costs the cluster least; chance decides the rest.
local reuse = 0
for i = 1, ties do
  local c = choices[i]
  c.reuse = (c.p and c.p.hit or 0) + c.d.hit
  if c.reuse > reuse then reuse = c.reuse end
end
local equal = {}
for i = 1, ties do if choices[i].reuse == reuse then equal[#equal + 1] = choices[i] end end
local pick = equal[1 + math.floor(random * #equal)]
local p, d = pick.p, pick.d

local function charge(field, amount)
  redis.call('HINCRBY', KEYS[2], field, amount)
  redis.call('HINCRBY', KEYS[5], field, amount)
end
local worker = p or d
local u = L - worker.hit
charge('p:' .. worker.name, u)
charge('d:' .. d.name, L + out)

if feeds ~= 'reported' then
  local blocks = #chain / 8
  if blocks > 0 then
    if p then insert(prefix, chain, p.slot, blocks, false, now + predict, now + ttl) end
    insert(prefix, chain, d.slot, blocks, false, now + predict, now + ttl)
  end
end

local wait = p and p.wait or d.pending / d.rate
return {
  p and p.index or 0, d.index, worker.hit, d.hit, u, tostring(pick.cost), tostring(wait),
  tostring(prefill_seconds(u)), tostring(pick.ship), tostring(d.penalty),
}
