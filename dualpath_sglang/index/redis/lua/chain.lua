-- ARGV: token, key, most pages. Answers {key to go on with or '', segments (geometry id, u32) of
-- the key and its ancestors}.
local key, seen, out = ARGV[2], {}, {}
for _ = 1, tonumber(ARGV[3]) do
  local row = redis.call('HGET', ROWS, key)
  if not row then
    key = ''
    break
  end
  for at = HEAD + 1, #row, BLOCK do
    local where = sub(row, at, at + 5)
    if not seen[where] then
      seen[where] = true
      out[#out + 1] = id_of[sub(where, 1, 2)] .. sub(where, 3)
    end
  end
  key = sub(row, 9, 40)
end
return { key, table.concat(out) }
