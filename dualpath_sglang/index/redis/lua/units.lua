-- Pages, read once and written once a script.
-- A row: last use u64 LE, parent (32), children u32 LE, then blocks: number u16, segment u32,
-- slot u32, generation u64, all BE. `freed` has the blocks as they stood in their rows.
local ZERO = string.rep('\0', KEY)
local CHUNK = 1000
local units, listed, changed, moved = {}, {}, {}, {}
local orphans, orphans_before, orphaned = {}, {}, {}
local freed_add, freed_any, slots_reused = {}, nil, {}

local function read(key, row)
  if not row then
    units[key] = false
    return false
  end
  local used = struct.unpack('<I8', row)
  local children = struct.unpack('<I4', row, 41)
  local unit = { used = used, parent = sub(row, 9, 40), children = children,
                 blocks = sub(row, HEAD + 1) }
  units[key] = unit
  if children == 0 then listed[key] = used end
  return unit
end

local function unit_of(key)
  local unit = units[key]
  if unit == nil then return read(key, redis.call('HGET', ROWS, key)) end
  return unit
end

-- Reads many at a time what unit_of() would read one by one.
local function load(keys)
  local missing, seen = {}, {}
  for _, key in ipairs(keys) do
    if units[key] == nil and not seen[key] then
      seen[key] = true
      missing[#missing + 1] = key
    end
  end
  local none_orphaned = redis.call('HLEN', ORPHANS) == 0
  for first = 1, #missing, CHUNK do
    local last = math.min(first + CHUNK - 1, #missing)
    local rows = redis.call('HMGET', ROWS, unpack(missing, first, last))
    for i = first, last do read(missing[i], rows[i - first + 1]) end
    if none_orphaned then
      for i = first, last do orphans[missing[i]], orphans_before[missing[i]] = 0, 0 end
    else
      local counts = redis.call('HMGET', ORPHANS, unpack(missing, first, last))
      for i = first, last do
        local count = tonumber(counts[i - first + 1] or 0)
        orphans[missing[i]], orphans_before[missing[i]] = count, count
      end
    end
  end
end

local function mark(key)
  changed[key], moved[key] = true, true
end

-- Children that are present of a page that is not.
local function orphans_of(key)
  local count = orphans[key]
  if count == nil then
    count = tonumber(redis.call('HGET', ORPHANS, key) or 0)
    orphans[key], orphans_before[key] = count, count
  end
  return count
end

local function set_orphans(key, count)
  orphans[key], orphaned[key] = count, true
end

local function add_child(parent, count)
  local unit = unit_of(parent)
  if unit then
    unit.children = unit.children + count
    mark(parent)
    return unit
  end
  set_orphans(parent, orphans_of(parent) + count)
  return false
end

-- Microseconds, later than every use so far even when the clock was set back.
local function now_us(given)
  local now = tonumber(given)
  if now == 0 then
    local time = redis.call('TIME')
    now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  end
  local newest = redis.call('ZREVRANGE', LRU, 0, 0, 'WITHSCORES')
  if newest[2] then now = math.max(now, tonumber(newest[2]) + 1) end
  return now
end

-- Notes that a page was used, and its parent once that is known.
local function use(key, when, parent)
  local unit = unit_of(key)
  if not unit then
    unit = { used = when, parent = parent, children = orphans_of(key), blocks = '' }
    if unit.children > 0 then set_orphans(key, 0) end
    units[key] = unit
    if parent ~= ZERO then add_child(parent, 1) end
  else
    if when > unit.used then unit.used = when end
    if unit.parent == ZERO and parent ~= ZERO then
      unit.parent = parent
      add_child(parent, 1)
    end
  end
  mark(key)
  return unit
end

-- Position of the block of a geometry among those of a page.
local function block_at(unit, number)
  for at = 1, #unit.blocks, BLOCK do
    if sub(unit.blocks, at, at + 1) == number then return at end
  end
  return nil
end

local function forget_if_empty(key, unit)
  if unit.blocks ~= '' then return end
  units[key] = false
  mark(key)
  if unit.children > 0 then set_orphans(key, unit.children) end
  if unit.parent ~= ZERO then
    local parent = add_child(unit.parent, -1)
    if parent and parent.children == 0 then use(unit.parent, unit.used, ZERO) end
  end
end

-- Takes out the block at a position; it must be followed by forget_if_empty().
local function free(key, unit, at)
  local block = sub(unit.blocks, at, at + BLOCK - 1)
  unit.blocks = sub(unit.blocks, 1, at - 1) .. sub(unit.blocks, at + BLOCK)
  mark(key)
  freed_add[#freed_add + 1] = 0
  freed_add[#freed_add + 1] = block
  return block
end

local function in_chunks(command, name, values)
  for first = 1, #values, 2 * CHUNK do
    redis.call(command, name, unpack(values, first, math.min(first + 2 * CHUNK - 1, #values)))
  end
end

-- A freed slot that holds a new block.
local function reused(place)
  if freed_any == nil then freed_any = redis.call('ZCARD', FREED) > 0 end
  if freed_any then
    local slot = sub(place, 1, 10)
    slots_reused[#slots_reused + 1] = slot
  end
end

-- Brings the order of use up to date, for those who look at it before the end of the script.
local function relist()
  local unlisted, add = {}, {}
  for key in pairs(moved) do
    local unit = units[key]
    if unit and unit.children == 0 then
      if listed[key] ~= unit.used then
        add[#add + 1] = unit.used
        add[#add + 1] = key
        listed[key] = unit.used
      end
    elseif listed[key] then
      unlisted[#unlisted + 1] = key
      listed[key] = nil
    end
  end
  moved = {}
  in_chunks('ZREM', LRU, unlisted)
  in_chunks('ZADD', LRU, add)
end

-- Writes what has changed. A full Redis refuses a script whose first write could need memory, and
-- no write after the first: so what makes room comes first, unless the script is to be refused.
local function save(grows)
  local gone, set, fewer, more = {}, {}, {}, {}
  for key in pairs(changed) do
    local unit = units[key]
    if not unit then
      gone[#gone + 1] = key
    else
      set[#set + 1] = key
      set[#set + 1] = struct.pack('<I8', unit.used) .. unit.parent ..
        struct.pack('<I4', unit.children) .. unit.blocks
    end
  end
  for key in pairs(orphaned) do
    local count = orphans[key]
    if count ~= orphans_before[key] then
      if count > 0 then
        more[#more + 1] = key
        more[#more + 1] = count
      else
        fewer[#fewer + 1] = key
      end
    end
  end
  if grows then in_chunks('HSET', ROWS, set) end
  in_chunks('HDEL', ROWS, gone)
  relist()
  in_chunks('HDEL', ORPHANS, fewer)
  for _, slot in ipairs(slots_reused) do
    redis.call('ZREMRANGEBYLEX', FREED, '[' .. slot, '[' .. slot .. string.rep('\255', 9))
  end
  if not grows then in_chunks('HSET', ROWS, set) end
  in_chunks('HSET', ORPHANS, more)
  in_chunks('ZADD', FREED, freed_add)
end
