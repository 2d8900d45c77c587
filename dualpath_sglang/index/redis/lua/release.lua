-- KEYS: claims; ARGV: owner. Gives up those that the owner has.
for _, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[1] then redis.call('DEL', name) end
end
return 'done'
