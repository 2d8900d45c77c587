-- ARGV: token, time (us, 0 for Redis' own), keys that follow in other calls, keys.
local keys = {}
for at = 1, #ARGV[4], KEY do keys[#keys + 1] = sub(ARGV[4], at, at + KEY - 1) end
load(keys)
local newest = now_us(ARGV[2]) + #keys + tonumber(ARGV[3])
for i = 1, #keys do
  if unit_of(keys[i]) then use(keys[i], newest - (i - 1), ZERO) end
end
save(true)
return 'done'
