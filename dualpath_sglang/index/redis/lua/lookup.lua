-- After find.lua. Answers for each key whether it is there (u8) and its place (segment u32, slot
-- u32, generation u64).
local absent, out = string.rep('\0', BLOCK - 1), {}
for i = 1, count do
  local row = rows[i]
  local at = row and block_in(row)
  out[i] = at and '\1' .. sub(row, at + 2, at + BLOCK - 1) or absent
end
return table.concat(out)
