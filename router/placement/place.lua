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
local may_local = mode == 'always' or mode == 'auto' or (mode == 'fallback' and np == 0)

-- Loads in one call: what waits at prefill workers, what lives at decode workers (and waits, where they prefill).
local fields = {}
for i = 1, count do
  local name = ARGV[FIRST + (i - 1) * WIDTH + 1]
  if i <= np then
    fields[#fields + 1] = 'p:' .. name
  else
    fields[#fields + 1] = 'd:' .. name
    if may_local then fields[#fields + 1] = 'p:' .. name end
  end
end
local loads = #fields > 0 and redis.call('HMGET', KEYS[2], unpack(fields)) or {}
local function load_at(i) return math.max(0, tonumber(loads[i] or '0') or 0) end

local function prefill_seconds(u) return a * u + b * u * (L - u / 2) end

local function hit_of(i)
  local hit = (cover[ARGV[FIRST + (i - 1) * WIDTH]] or 0) * page
  if hit > L - 1 then return L - 1 end
  return hit
end

-- Plain arrays by candidate: a table for each of 128 would cost more than the rest of the script.
local hits, score, wait_of, resident, pending = {}, {}, {}, {}, {}
local cold = prefill_seconds(L)
for i = 1, np do
  local hit = hit_of(i)
  local wait = load_at(i) / tonumber(ARGV[FIRST + (i - 1) * WIDTH + 3])
  hits[i], wait_of[i] = hit, wait
  score[i] = wait + (hit == 0 and cold or prefill_seconds(L - hit))
end
local longest
for i = np + 1, count do
  local at = may_local and np + 2 * (i - np) - 1 or i
  local hit, living = hit_of(i), load_at(at)
  local capacity = tonumber(ARGV[FIRST + (i - 1) * WIDTH + 4])
  local penalty = per_token * living
  local free = capacity - living
  if free < L + out then penalty = penalty + 1 + (L + out - free) / math.max(1, capacity) end
  hits[i], resident[i], wait_of[i] = hit, living, penalty
  pending[i] = may_local and load_at(at + 1) or 0
  score[i] = penalty + (L - hit) * token_bytes / bandwidth
  if not longest or hit > hits[longest] then longest = i end
end
if count == np then return {-1} end

local function described(i)
  local at = FIRST + (i - 1) * WIDTH
  return {
    index = i, slot = ARGV[at], name = ARGV[at + 1], place = ARGV[at + 2], rate = tonumber(ARGV[at + 3]),
    hit = hits[i], wait = wait_of[i], penalty = wait_of[i], resident = resident[i], pending = pending[i],
    compute = prefill_seconds(L - hits[i]), ship = (L - hits[i]) * token_bytes / bandwidth,
  }
end

-- The best eight, by eight passes: sorting all costs more. Then the best two of each place.
local function best(first, last)
  local chosen, taken, places = {}, {}, {}
  for _ = 1, math.min(8, last - first + 1) do
    local top
    for i = first, last do
      if not taken[i] and (not top or score[i] < score[top]) then top = i end
    end
    taken[top] = true
    local c = described(top)
    places[c.place] = (places[c.place] or 0) + 1
    chosen[#chosen + 1] = c
  end
  if last - first + 1 > 8 then
    local near = {}
    for i = first, last do
      if not taken[i] then
        local place = ARGV[FIRST + (i - 1) * WIDTH + 2]
        if (places[place] or 0) < 2 and (not near[place] or score[i] < score[near[place]]) then near[place] = i end
      end
    end
    for _, i in pairs(near) do
      taken[i] = true
      chosen[#chosen + 1] = described(i)
    end
  end
  return chosen, taken
end

local ps = best(1, np)
local ds, kept = best(np + 1, count)
if not kept[longest] then ds[#ds + 1] = described(longest) end

local choices = {}
for _, p in ipairs(ps) do
  for _, d in ipairs(ds) do
    local near = p.place == d.place and 1 or 0.5
    local ship = math.max(0, d.ship / near - 0.9 * p.compute)
    choices[#choices + 1] = {p = p, d = d, ship = ship, cost = p.wait + p.compute + ship + d.penalty}
  end
end
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
-- What lies within 5 % of the cheapest is a tie.
local cheapest = choices[1].cost
for _, c in ipairs(choices) do if c.cost < cheapest then cheapest = c.cost end end
local tied = {}
for _, c in ipairs(choices) do if c.cost <= cheapest * 1.05 then tied[#tied + 1] = c end end
-- Of equal times the one with most of the prompt cached costs the cluster least; chance decides the rest.
local reuse = 0
for _, c in ipairs(tied) do
  c.reuse = (c.p and c.p.hit or 0) + c.d.hit
  if c.reuse > reuse then reuse = c.reuse end
end
local equal = {}
for _, c in ipairs(tied) do if c.reuse == reuse then equal[#equal + 1] = c end end
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
