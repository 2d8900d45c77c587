-- ARGV: token, geometry id, pairs (key, generation u64). Answers the blocks taken out (segment
-- u32, slot u32, generation u64).
local PAIR = KEY + 8
local number = number_of[ARGV[2]]
if not number then return '' end
local keys, out = {}, {}
for at = 1, #ARGV[3], PAIR do keys[#keys + 1] = sub(ARGV[3], at, at + KEY - 1) end
load(keys)
for i = 1, #keys do
  local unit = unit_of(keys[i])
  local at = unit and block_at(unit, number)
  local generation = sub(ARGV[3], i * PAIR - 7, i * PAIR)
  if at and sub(unit.blocks, at + 10, at + BLOCK - 1) == generation then
    out[#out + 1] = sub(free(keys[i], unit, at), 3)
    forget_if_empty(keys[i], unit)
  end
end
save(false)
return table.concat(out)
