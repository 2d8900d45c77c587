-- KEYS: reports; ARGV: node, milliseconds, report. Reports that nobody renewed go.
local now = now_ms()
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do
  if #rows[i + 1] <= 8 or struct.unpack('>I8', rows[i + 1]) <= now then redis.call('HDEL', KEYS[1], rows[i]) end
end
redis.call('HSET', KEYS[1], ARGV[1], struct.pack('>I8', now + tonumber(ARGV[2])) .. ARGV[3])
return 'done'
