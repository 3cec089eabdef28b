-- Shared by charge.lua and settle.lua. No key here has a time to live, because a full Redis evicts keys that have one.
-- KEYS: quota:<tenant>, quota-request:<name>, quota-expiry, quota-applied
-- quota-expiry: key -> ms at which the key is deleted. quota-applied: "charge:<owner>" or "settle:<owner>" -> ms at which
-- the entry is deleted; until then a repeated call, or a charge that arrives after its settle, has no effect.
local SWEPT = 8  -- expired entries deleted per call, of each kind: more than a call adds
local APPLIED_MS, MAX_APPLIED = 120000, 50000
local call = redis.call
local t = call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)

local function keep(key, ms) call('ZADD', KEYS[3], now + ms, key) end

-- Of requests and of tokens, each with the time at which it was `used`: keys of one tenant may have one limit, the other, or
-- both. `at` is nil where nothing was charged.
local FIELDS = {{'requests', 'requests_at'}, {'tokens', 'tokens_at'}}

local function read_buckets()
  local kept = call('HMGET', KEYS[1], FIELDS[1][1], FIELDS[1][2], FIELDS[2][1], FIELDS[2][2])
  return {
    {used = tonumber(kept[1]) or 0, at = tonumber(kept[2])},
    {used = tonumber(kept[3]) or 0, at = tonumber(kept[4])},
  }
end

local function write_bucket(i, used, at) call('HSET', KEYS[1], FIELDS[i][1], tostring(used), FIELDS[i][2], at) end

local function keep_buckets(ms, limits)
  -- How long a bucket without a limit here is needed is not known here.
  local ends = (limits[1] == 0 or limits[2] == 0) and tonumber(call('ZSCORE', KEYS[3], KEYS[1]) or 0) or 0
  keep(KEYS[1], math.max(ms, ends - now))
end

local function forget(key)
  call('DEL', key)
  call('ZREM', KEYS[3], key)
end

local function was_applied(what) return call('ZSCORE', KEYS[4], what) end

local function applied(what)
  call('ZADD', KEYS[4], now + APPLIED_MS, what)
  call('ZREMRANGEBYRANK', KEYS[4], 0, -MAX_APPLIED - 1)
end

for i = 1, 2 do
  local ends = call('ZSCORE', KEYS[3], KEYS[i])
  if ends and tonumber(ends) <= now then forget(KEYS[i]) end
end
for _, key in ipairs(call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, SWEPT)) do forget(key) end
local old = call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, SWEPT)
if #old > 0 then call('ZREM', KEYS[4], unpack(old)) end
-- After a failover the clock may be behind: what lies ahead would outlast all that follows, which the bound then drops.
local last = now + APPLIED_MS
local ahead = call('ZRANGEBYSCORE', KEYS[4], string.format('(%.0f', last), '+inf', 'LIMIT', 0, 64)
for i = 1, #ahead do call('ZADD', KEYS[4], last - 1, ahead[i]) end
