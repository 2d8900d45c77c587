-- After clock.lua. KEYS: owners, alive; ARGV: owner who takes over, name of the one who is gone,
-- for how long at least (ms). Answers the segments (geometry id, u32), or 0 when it was heard of since.
local now, heirloom, gone = now_ms(), {}, {}
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do
  if string.sub(rows[i + 1], 17) == ARGV[2] then
    heirloom[#heirloom + 1] = rows[i]
    gone[rows[i + 1]] = true
  end
end
for owner in pairs(gone) do
  local heard = redis.call('HGET', KEYS[2], owner)
  if heard and now - struct.unpack('>I8', heard) < tonumber(ARGV[3]) then return 0 end
end
for owner in pairs(gone) do redis.call('HDEL', KEYS[2], owner) end
for _, name in ipairs(heirloom) do redis.call('HSET', KEYS[1], name, ARGV[1]) end
redis.call('HSET', KEYS[2], ARGV[1], struct.pack('>I8', now))
return table.concat(heirloom)
