-- ARGV: token, geometry id, blocks (segment u32, slot u32, generation u64).
local number, rows = redis.call('HGET', META, ARGV[2]), {}
if not number then return 'done' end
number = struct.pack('>I2', tonumber(number))
for at = 1, #ARGV[3], 16 do rows[#rows + 1] = number .. sub(ARGV[3], at, at + 15) end
if #rows > 0 then redis.call('ZREM', FREED, unpack(rows)) end
return 'done'
