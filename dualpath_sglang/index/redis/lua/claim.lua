-- KEYS: claims; ARGV: owner, milliseconds. Answers '1' for each that the owner has now, or '0'.
local out = {}
for i, name in ipairs(KEYS) do
  local owner = redis.call('GET', name)
  if not owner or owner == ARGV[1] then
    redis.call('SET', name, ARGV[1], 'PX', ARGV[2])
    out[i] = '1'
  else
    out[i] = '0'
  end
end
return table.concat(out)
