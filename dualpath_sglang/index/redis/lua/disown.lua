-- KEYS: owners; ARGV: owner, segments (geometry id, u32). Gives them up for anybody to take.
local NAME = 20
for at = 1, #ARGV[2], NAME do
  local name = string.sub(ARGV[2], at, at + NAME - 1)
  if redis.call('HGET', KEYS[1], name) == ARGV[1] then redis.call('HSET', KEYS[1], name, '') end
end
return 'done'
