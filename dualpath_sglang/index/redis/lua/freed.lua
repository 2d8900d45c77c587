-- ARGV: token, geometry id, segments (u32). Answers freed blocks (segment u32, slot u32,
-- generation u64).
local number, out = redis.call('HGET', META, ARGV[2]), {}
if not number then return '' end
number = struct.pack('>I2', tonumber(number))
for at = 1, #ARGV[3], 4 do
  local place = number .. sub(ARGV[3], at, at + 3)
  local rows = redis.call('ZRANGEBYLEX', FREED, '[' .. place, '[' .. place .. string.rep('\255', 13))
  for _, row in ipairs(rows) do out[#out + 1] = sub(row, 3) end
end
return table.concat(out)
