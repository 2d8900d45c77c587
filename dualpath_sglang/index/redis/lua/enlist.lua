-- Says which model a geometry belongs to, as long as the index is the one that the caller knows.
-- KEYS: marker, geometries; ARGV: token, geometry id, unit. Answers whether it was.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return 1
