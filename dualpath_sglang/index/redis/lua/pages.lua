-- Takes out every block of a page; `out` gets geometry id, segment, slot, generation of each.
local function free_page(key, unit, out)
  local rows = {}
  while unit.blocks ~= '' do
    local block = free(key, unit, 1)
    rows[#rows + 1] = id_of[sub(block, 1, 2)] .. sub(block, 3)
  end
  table.sort(rows)
  for _, row in ipairs(rows) do out[#out + 1] = row end
  forget_if_empty(key, unit)
  return rows
end
