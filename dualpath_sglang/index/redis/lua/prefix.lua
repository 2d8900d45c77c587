-- ARGV: token, geometry id, keys. Answers how many leading keys are there, as text.
local number = redis.call('HGET', META, ARGV[2])
if not number then return '0' end
number = struct.pack('>I2', tonumber(number))
local keys = {}
for at = 1, #ARGV[3], KEY do keys[#keys + 1] = sub(ARGV[3], at, at + KEY - 1) end
local rows = redis.call('HMGET', ROWS, unpack(keys))
for i = 1, #keys do
  local row, there = rows[i], false
  if row then
    for at = HEAD + 1, #row, BLOCK do
      if sub(row, at, at + 1) == number then
        there = true
        break
      end
    end
  end
  if not there then return tostring(i - 1) end
end
return tostring(#keys)
