-- Second part of the placement script, and of the index's (match.lua): which workers hold the prompt's prefix.
-- One call of eight refreshes the time to live of the nodes that it passes, and looks at SWEPT of their slots for dead owners:
-- placements pass a hot node often, and the reports of workers that have computed the prompt refresh it too.
local tends = random < 1 / 8
local SWEPT = 16
local records = (feeds == 'hybrid' or feeds == 'predicted') and #chain > 0

-- Recording walks the same nodes again, and further: it sets when they expire.
local expire_at = tends and not records and now + ttl
local nodes, seen_nodes, all_cover = walk(
  prefix, chain, now, expire_at, KEYS[1], tends and SWEPT or 0, listed and 256 or 32, feeds == 'predicted' or feeds == 'kept'
)
