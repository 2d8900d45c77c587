-- KEYS: reports. Answers node, report, node, report ...
local now, out = now_ms(), {}
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do
  if #rows[i + 1] > 8 and struct.unpack('>I8', rows[i + 1]) > now then
    out[#out + 1] = rows[i]
    out[#out + 1] = string.sub(rows[i + 1], 9)
  end
end
return out
