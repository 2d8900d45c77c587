-- Gives a geometry its number. KEYS as in begin.lua; ARGV: token, geometry id.
-- Rows of an older index are thrown away.
-- Answers whether the geometry is new, or 'late' when the caller knows an older index.
local token = redis.call('HGET', KEYS[1], 'token')
if token and token > ARGV[1] then return 'late' end
if token ~= ARGV[1] then
  redis.call('UNLINK', unpack(KEYS))
  redis.call('HSET', KEYS[1], 'token', ARGV[1])
end
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then return 0 end
redis.call('HSET', KEYS[1], ARGV[2], redis.call('HLEN', KEYS[1]) - 1)
return 1
