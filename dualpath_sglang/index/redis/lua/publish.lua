-- ARGV: token, geometry id, time (us, 0 for Redis' own), blocks of the same chain that follow in
-- other calls, records (key, parent, segment u32, slot u32, generation u64).
-- Answers '1' or '0' for each record, or 1 when the geometry has no number yet.
local RECORD = 2 * KEY + BLOCK - 2
local number = redis.call('HGET', META, ARGV[2])
if not number then return 1 end
number = struct.pack('>I2', tonumber(number))
local packed = ARGV[5]
local count = #packed / RECORD
local keys, parents = {}, {}
for i = 1, count do
  local at = (i - 1) * RECORD
  keys[i] = sub(packed, at + 1, at + KEY)
  parents[i] = sub(packed, at + KEY + 1, at + 2 * KEY)
end
load(keys)
load(parents)
local newest = now_us(ARGV[3]) + count + tonumber(ARGV[4])
local out = {}
-- Children first: then no parent of the chain enters the order of use only to leave it.
for i = count, 1, -1 do
  local key = keys[i]
  local unit = unit_of(key)
  local new = not (unit and block_at(unit, number))
  unit = use(key, newest - (i - 1), parents[i])
  if new then
    local block = number .. sub(packed, (i - 1) * RECORD + 2 * KEY + 1, i * RECORD)
    unit.blocks = unit.blocks .. block
    reused(block)
  end
  out[i] = new and '1' or '0'
end
save(true)
return table.concat(out)
