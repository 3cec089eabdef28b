-- In place of walked.lua, where the prefix index has a Redis of its own: `chain` is what its script has answered (held.lua), or
-- empty, if it is away or the prompt has no whole block.
local records, tends, seen_nodes = false, false, nil  -- record.lua does
local nodes, all_cover, others = {}, {}, 0
if #chain > 0 and listed then
  local each = '>' .. string.rep('I4', #chain / 4)
  local its_slots, blocks = {struct.unpack(each, argument.slots)}, {struct.unpack(each, chain)}
  for i = 1, #chain / 4 do
    if blocks[i] > 0 then all_cover[its_slots[i]] = blocks[i] end
  end
elseif #chain > 0 then
  others = struct.unpack('>I4', chain)
  for at = 5, #chain, 8 do
    local slot, blocks = struct.unpack('>I4I4', chain, at)
    nodes[#nodes + 1] = slot
    if blocks > 0 then all_cover[slot] = blocks end
  end
end
-- As in walk.lua; all of them, of which the least loaded are chosen. Slots without an owner here are dropped where these are read.
local function holders() return nodes, others end
