-- After clock.lua. KEYS: owners, alive; ARGV: mode, owner (machine (16), name), lease (ms),
-- segments (geometry id, u32), whether the caller would have heard of every living owner ('1').
-- Modes: 'keep' what the caller has, 'take' what nobody has, or 'ask' whether it may.
-- Answers '1' for each that it has now, or may take, and '0' for the others.
local OWNERS, ALIVE, me, NAME = KEYS[1], KEYS[2], ARGV[2], 20
local now, out, mine, names = now_ms(), {}, {}, {}
for at = 1, #ARGV[4], NAME do names[#names + 1] = string.sub(ARGV[4], at, at + NAME - 1) end

local function gone(owner)
  local heard = redis.call('HGET', ALIVE, owner)
  return not heard or struct.unpack('>I8', heard) + tonumber(ARGV[3]) <= now
end

local function free(owner)
  if ARGV[1] == 'keep' then return not owner end
  -- On one machine the lock of the file, which the caller has, tells.
  if owner and string.sub(owner, 1, 16) == string.sub(me, 1, 16) then return true end
  return ARGV[5] == '1' and (not owner or gone(owner))
end

for i, owner in ipairs(redis.call('HMGET', OWNERS, unpack(names))) do
  local ok = owner == me or owner == '' or free(owner)
  out[i] = ok and '1' or '0'
  if ok and owner ~= me then
    mine[#mine + 1] = names[i]
    mine[#mine + 1] = me
  end
end
if ARGV[1] == 'take' then  -- now and then: who was silent for too long is gone, noted or not
  local alive = redis.call('HGETALL', ALIVE)
  for i = 1, #alive, 2 do
    if gone(alive[i]) then redis.call('HDEL', ALIVE, alive[i]) end
  end
end
if ARGV[1] ~= 'ask' then
  if #mine > 0 then redis.call('HSET', OWNERS, unpack(mine)) end
  redis.call('HSET', ALIVE, me, struct.pack('>I8', now))
end
return table.concat(out)
