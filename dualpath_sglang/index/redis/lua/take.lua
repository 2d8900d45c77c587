-- ARGV: token, keys, children before their parents. Takes out the pages without children.
-- Answers the blocks (geometry id, segment u32, slot u32, generation u64).
local keys, out = {}, {}
for at = 1, #ARGV[2], KEY do keys[#keys + 1] = sub(ARGV[2], at, at + KEY - 1) end
load(keys)
for _, key in ipairs(keys) do
  local unit = unit_of(key)
  if unit and unit.children == 0 then free_page(key, unit, out) end
end
save(false)
return table.concat(out)
