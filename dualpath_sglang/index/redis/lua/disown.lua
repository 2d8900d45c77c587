-- KEYS: owners, alive; ARGV: owner, segments (geometry id, u32), or '' for all of that owner's.
-- Gives them up for anybody to take. Answers how many.
local OWNERS, NAME, count = KEYS[1], 20, 0
local function give_up(name, owner)
  if owner == ARGV[1] then
    redis.call('HSET', OWNERS, name, '')
    count = count + 1
  end
end
if ARGV[2] == '' then
  local rows = redis.call('HGETALL', OWNERS)
  for i = 1, #rows, 2 do give_up(rows[i], rows[i + 1]) end
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  for at = 1, #ARGV[2], NAME do
    local name = string.sub(ARGV[2], at, at + NAME - 1)
    give_up(name, redis.call('HGET', OWNERS, name))
  end
end
return count
