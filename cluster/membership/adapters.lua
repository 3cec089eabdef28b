-- Changes of the wanted adapters (Redis ≥ 6.2). KEYS: the hash, with NAME → entry and ~NAME → number of the name's last
-- change, in ms of Redis's time or one above the number before. A name with a number and no entry was removed.
-- In front of each script of known_adapters.py.
local function read()
  local held, found, entries = redis.call('HGETALL', KEYS[1]), {}, 0
  for i = 1, #held, 2 do
    found[held[i]] = held[i + 1]
    if string.sub(held[i], 1, 1) ~= '~' then entries = entries + 1 end
  end
  return found, entries
end

local function next_number(last)
  local now = redis.call('TIME')
  local ms = now[1] * 1000 + math.floor(now[2] / 1000)
  return string.format('%.0f', math.max(ms, (tonumber(last or '') or 0) + 1))
end

-- Keep the last `most` numbers of names that were removed.
local function forget(most)
  local found, removed = read(), {}
  for field, number in pairs(found) do
    if string.sub(field, 1, 1) == '~' and not found[string.sub(field, 2)] then
      removed[#removed + 1] = {tonumber(number) or 0, field}
    end
  end
  table.sort(removed, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  for i = 1, #removed - most do redis.call('HDEL', KEYS[1], removed[i][2]) end
end
