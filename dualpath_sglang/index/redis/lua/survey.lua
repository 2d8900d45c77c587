-- ARGV: token, cursor, count. Answers {cursor, rows (geometry id, segment u32, blocks u32, newest
-- use u64)}.
local page = redis.call('HSCAN', ROWS, ARGV[2], 'COUNT', ARGV[3])
local blocks, newest = {}, {}
for i = 2, #page[2], 2 do
  local row = page[2][i]
  local used = struct.unpack('<I8', row)
  for at = HEAD + 1, #row, BLOCK do
    local where = sub(row, at, at + 5)
    blocks[where] = (blocks[where] or 0) + 1
    newest[where] = math.max(newest[where] or 0, used)
  end
end
local out = {}
for where, count in pairs(blocks) do
  out[#out + 1] = id_of[sub(where, 1, 2)] .. sub(where, 3) .. struct.pack('>I4I8', count, newest[where])
end
return { page[1], table.concat(out) }
