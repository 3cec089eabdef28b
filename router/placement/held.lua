-- -> of slots that were named, the leading blocks of the chain that each holds (4-byte numbers, packed); otherwise blocks that workers
-- may hold that are not among these, then at most MOST holders of the deepest nodes: slot and blocks of each (likewise)
local MOST = 32
local slots, count, packed = nil, #ARGV[5] / 4, {}
if listed then
  slots = {struct.unpack('>' .. string.rep('I4', count), ARGV[5])}
else
  local others
  slots, others = holders(nodes, MOST, random, now)
  count, packed[1] = #slots, struct.pack('>I4', others)
end
local cover = all_cover or covered(nodes, slots, now)
for i = 1, count do
  local blocks = cover[slots[i]] or 0
  packed[#packed + 1] = listed and struct.pack('>I4', blocks) or struct.pack('>I4I4', slots[i], blocks)
end
return table.concat(packed)
