-- After clock.lua. KEYS: owners, alive. Answers {segments and owners, owners and ms since each was
-- heard of}.
local now, out = now_ms(), {}
local alive = redis.call('HGETALL', KEYS[2])
for i = 1, #alive, 2 do
  out[#out + 1] = alive[i]
  out[#out + 1] = tostring(now - struct.unpack('>I8', alive[i + 1]))
end
return { redis.call('HGETALL', KEYS[1]), out }
