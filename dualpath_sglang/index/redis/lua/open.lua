-- Begins an index. KEYS: marker; ARGV: format, random bytes.
-- Answers {token, format, whether it was filled}.
if redis.call('EXISTS', KEYS[1]) == 0 then
  local time = redis.call('TIME')
  local token = struct.pack('>I8', tonumber(time[1]) * 1000000 + tonumber(time[2])) .. ARGV[2]
  redis.call('HSET', KEYS[1], 'token', token, 'format', ARGV[1])
end
return redis.call('HMGET', KEYS[1], 'token', 'format', 'filled')
