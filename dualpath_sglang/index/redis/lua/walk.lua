-- ARGV: token, cursor, count, geometry id or ''. Answers {cursor, rows (key, parent, last use
-- u64, geometry id, segment u32, slot u32, generation u64)}.
local page = redis.call('HSCAN', ROWS, ARGV[2], 'COUNT', ARGV[3])
local out, only = {}, ARGV[4]
for i = 1, #page[2], 2 do
  local row = page[2][i + 1]
  local used = struct.unpack('<I8', row)
  local head = page[2][i] .. sub(row, 9, 40) .. struct.pack('>I8', used)
  for at = HEAD + 1, #row, BLOCK do
    local id = id_of[sub(row, at, at + 1)]
    if only == '' or id == only then out[#out + 1] = head .. id .. sub(row, at + 2, at + BLOCK - 1) end
  end
end
return { page[1], table.concat(out) }
