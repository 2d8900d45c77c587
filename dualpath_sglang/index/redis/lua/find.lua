-- ARGV: token, geometry id, keys. Answers 1 when the geometry has no blocks.
local number = redis.call('HGET', META, ARGV[2])
if not number then return 1 end
number = struct.pack('>I2', tonumber(number))
local high, low = string.byte(number, 1, 2)
local packed, keys, count = ARGV[3], {}, 0
for at = 1, #packed, KEY do
  count = count + 1
  keys[count] = sub(packed, at, at + KEY - 1)
end
local rows = redis.call('HMGET', ROWS, unpack(keys))
local byte = string.byte

-- Position of the geometry's block in a row.
local function block_in(row)
  for at = HEAD + 1, #row, BLOCK do
    local a, b = byte(row, at, at + 1)
    if b == low and a == high then return at end
  end
  return nil
end
