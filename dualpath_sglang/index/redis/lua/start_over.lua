-- Has everybody begin anew. KEYS: marker, geometries, wanted; ARGV: token that is to go, random bytes.
-- The next token is higher, even when the clock was set back.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 'done' end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
now = math.max(now, struct.unpack('>I8', ARGV[1]) + 1)
redis.call('UNLINK', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'token', struct.pack('>I8', now) .. ARGV[2])
redis.call('HDEL', KEYS[1], 'filled')
return 'done'
