-- The index has all that the store has. KEYS: marker; ARGV: token.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'filled', '1')
return 'done'
