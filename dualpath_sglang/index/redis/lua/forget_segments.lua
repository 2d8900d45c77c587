-- ARGV: token, geometry id, segments (u32): their freed slots are forgotten.
local number = redis.call('HGET', META, ARGV[2])
if not number then return 'done' end
number = struct.pack('>I2', tonumber(number))
for at = 1, #ARGV[3], 4 do
  local place = number .. sub(ARGV[3], at, at + 3)
  redis.call('ZREMRANGEBYLEX', FREED, '[' .. place, '[' .. place .. string.rep('\255', 13))
end
return 'done'
