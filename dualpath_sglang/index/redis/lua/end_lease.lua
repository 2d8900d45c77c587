-- KEYS: leases; ARGV: name, owner.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and string.sub(held, 17) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
return 'done'
