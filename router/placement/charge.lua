-- Last part of the placement script: the pair is checked and charged, and the blocks expected there are recorded.
local p, d, cost, ship, far, gone = nil, nil, nil, nil, nil, {}
local may_widen, in_vain = not listed and number % 2 ^ former_in_vain == 0, former_in_vain
for _ = 1, TRIES do
  p, d, cost, ship, far = choose()
  if far and may_widen then
    may_widen = false
    local narrow = cost
    if look_wider() then p, d, cost, ship = choose() end
    in_vain = cost * TIE < narrow and 0 or math.min(in_vain + 1, MAX_IN_VAIN)
  end
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

local at = p > 0 and p or d  -- the worker that prefills
local ends = alone and p > 0  -- there, so that the decode worker gets nothing of it
local lives, penalty = ends and 0 or need, p > 0 and joining[d] or wait[d]
local cached = reused(at)
local cached_decode = p == 0 and cached or ends and 0 or hits[d] or 0
local u = L - cached
local compute = prefill_seconds(u)
local pending = 'p:' .. name_of(at)
-- What waits there before this request: lower classes wait behind it. Their share is counted in fields of their own.
local waits = p > 0 and waits_at(p) or queue[d]
local ahead = waits
if waits > 0 and priority_class ~= 'batch' then
  local own = priority_class == 'high' and 'high:' or 'batch:'
  local part = math.max(0, tonumber(call('HGET', KEYS[2], own .. pending) or 0)) / rate
  ahead = priority_class == 'high' and part or waits - part
end
-- Refusing helps only where waiting is what makes it late: an idle worker takes whatever comes, and a long prompt
-- may wait as long as it computes.
local first = ahead + compute + penalty
if (deadline > 0 and first > deadline and ahead > 0) or (target > 0 and first > target and ahead > compute) then
  return {-3, tostring(first)}
end

local class = CLASSES[priority_class]
local charge = pack_charge(class, u, lives, name_of(at), name_of(d))
if call('HSETNX', KEYS[5], transfer_id, charge) == 0 then
  local charged = call('HGET', KEYS[5], transfer_id)
  if charged ~= replaces then return refused({-7}) end  -- the router has placed it by itself meanwhile
  local former, prefill, decode, its_p, its_d = unpack_charge(charged)
  count(former, -prefill, -decode, its_p, its_d)
  call('HSET', KEYS[5], transfer_id, charge)
end
count(class, u, lives, name_of(at), name_of(d))
apply(tag, not small and known)
-- Of a run that Redis did not give out: the lease expires the charges of a router that dies before it ever settles.
if life > latest then
  call('ZADD', KEYS[3], 'NX', now + lease, router .. ':' .. life)
  call('HSET', KEYS[7], 'run', life)
end

if records then
  local winners = ends and {p} or winners_of(p, d)
  for k = 1, #winners do winners[k] = string.format('%d', slots[winners[k]]) end
  insert(prefix, chain, winners, #chain / 8, false, now + predict, now + ttl, seen_nodes, not tends, feeds == 'predicted')
end

local answer = struct.pack(ANSWER, number, cached, cached_decode, u, cost, waits, compute, ship, penalty, first)
answer = answer .. (p > 0 and name_of(p) or '') .. '\0' .. name_of(d)
if in_vain == former_in_vain then
  call('HSET', KEYS[7], number % ANSWERS, answer)
else
  call('HSET', KEYS[7], number % ANSWERS, answer, 'in_vain', in_vain)
end
return answer
