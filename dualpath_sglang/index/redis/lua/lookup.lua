-- ARGV: token, geometry id, keys. Answers for each key whether it is there (u8) and its place
-- (segment u32, slot u32, generation u64), or 1 when the geometry has no blocks.
local number = redis.call('HGET', META, ARGV[2])
if not number then return 1 end
number = struct.pack('>I2', tonumber(number))
local keys, out = {}, {}
for at = 1, #ARGV[3], KEY do keys[#keys + 1] = sub(ARGV[3], at, at + KEY - 1) end
local absent = string.rep('\0', BLOCK - 1)
local rows = redis.call('HMGET', ROWS, unpack(keys))
for i = 1, #keys do
  local row, place = rows[i], absent
  if row then
    for at = HEAD + 1, #row, BLOCK do
      if sub(row, at, at + 1) == number then
        place = '\1' .. sub(row, at + 2, at + BLOCK - 1)
        break
      end
    end
  end
  out[i] = place
end
return table.concat(out)
