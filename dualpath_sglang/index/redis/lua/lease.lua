-- KEYS: leases, fences; ARGV: name, owner, milliseconds.
-- Answers the lease's number: the same as long as its owner renews it, and higher for the next.
local now = now_ms()
local held = redis.call('HGET', KEYS[1], ARGV[1])
local number
if held and struct.unpack('>I8', held) > now then
  if string.sub(held, 17) ~= ARGV[2] then return false end
  number = struct.unpack('>I8', held, 9)
else
  number = redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
end
redis.call('HSET', KEYS[1], ARGV[1], struct.pack('>I8I8', now + tonumber(ARGV[3]), number) .. ARGV[2])
return number
