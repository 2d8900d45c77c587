-- Takes out the least recently used leaves of one model.
-- ARGV: token, first score, leaves to skip from there, last score, bytes needed, most blocks,
-- leaves that may be passed over, key that is kept or '', keys that stay,
-- sizes (geometry id, u64), '1' if some are preferred, those (geometry id, segment u32).
-- Answers {blocks, bytes, leaves that may still be passed over, score, leaves to skip from there},
-- or 1 when the kept key is not there.
local at, skip, last = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local need, most, passes = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if ARGV[8] ~= '' and redis.call('HEXISTS', ROWS, ARGV[8]) == 0 then return 1 end
local stay, size, preferred = { [ARGV[8]] = true }, {}, {}
for i = 1, #ARGV[9], KEY do stay[sub(ARGV[9], i, i + KEY - 1)] = true end
for i = 1, #ARGV[10], 24 do
  size[sub(ARGV[10], i, i + 15)] = struct.unpack('>I8', ARGV[10], i + 16)
end
local choosy = ARGV[11] == '1'
for i = 1, #ARGV[12], 20 do
  local number = number_of[sub(ARGV[12], i, i + 15)]
  if number then preferred[number .. sub(ARGV[12], i + 16, i + 19)] = true end
end

local function welcome(key)
  if not choosy then return true end
  local blocks = unit_of(key).blocks
  for i = 1, #blocks, BLOCK do
    if preferred[sub(blocks, i, i + 5)] then return true end
  end
  return false
end

local function oldest()
  local page = 1
  while passes >= 0 do
    local leaves = redis.call('ZRANGEBYSCORE', LRU, at, last, 'WITHSCORES', 'LIMIT', skip, page)
    for i = 1, #leaves, 2 do
      local key = leaves[i]
      if not stay[key] then
        if welcome(key) then return key, leaves[i + 1] end
        passes = passes - 1
        if passes < 0 then return nil end
      end
      skip = skip + 1
    end
    if #leaves < 2 * page then return nil end
    page = 32
  end
end

local out, got = {}, 0
while got < need and #out < most do
  local key, score = oldest()
  if not key then break end
  -- A parent that becomes a leaf is as recent as its child was.
  at, skip = score, 0
  for _, row in ipairs(free_page(key, unit_of(key), out)) do
    got = got + (size[sub(row, 1, 16)] or 0)
  end
  relist()
end
save(false)
return { table.concat(out), tostring(got), tostring(passes), at, tostring(skip) }
