-- After clock.lua. KEYS: owners, alive; ARGV: mode, owner (machine (16), name), lease (ms), segments
-- (geometry id, u32), '1' if the caller has been in touch for a while, '1' or '0' for each segment:
-- whether the caller has seen for a lease that it is nobody's.
-- Modes: 'keep' what the caller has, 'take' what nobody has, or 'ask' whether it may.
-- Answers '1' for each that it has now, or may take, '0' for others' and '?' for nobody's.
local OWNERS, ALIVE, mode, me, lease = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, out, mine, names, NAME = now_ms(), {}, {}, {}, 20
for at = 1, #ARGV[4], NAME do names[#names + 1] = string.sub(ARGV[4], at, at + NAME - 1) end

local function silent(owner)
  local heard = redis.call('HGET', ALIVE, owner)
  return heard and now - struct.unpack('>I8', heard)
end

local function verdict(owner, seen)
  if owner == me or owner == '' then return '1' end
  if mode == 'keep' then return owner and '0' or '1' end
  -- On one machine the lock of the file, which the caller has, tells.
  if owner and string.sub(owner, 1, 16) == string.sub(me, 1, 16) then return '1' end
  local since = owner and silent(owner)
  if not since then return seen == '1' and '1' or '?' end
  return ARGV[5] == '1' and since >= lease and '1' or '0'
end

for i, owner in ipairs(redis.call('HMGET', OWNERS, unpack(names))) do
  out[i] = verdict(owner, string.sub(ARGV[6], i, i))
  if out[i] == '1' and owner ~= me then
    mine[#mine + 1] = names[i]
    mine[#mine + 1] = me
  end
end
if mode == 'take' then  -- now and then: whoever was killed long ago
  local alive = redis.call('HGETALL', ALIVE)
  for i = 1, #alive, 2 do
    if silent(alive[i]) > 10 * lease then redis.call('HDEL', ALIVE, alive[i]) end
  end
end
if mode ~= 'ask' then
  if #mine > 0 then redis.call('HSET', OWNERS, unpack(mine)) end
  redis.call('HSET', ALIVE, me, struct.pack('>I8', now))
end
return table.concat(out)
