-- Geometries of this model: number by id, and id by number (as 2 bytes).
local number_of, id_of = {}, {}
do
  local meta = redis.call('HGETALL', META)
  for i = 1, #meta, 2 do
    if #meta[i] == 16 then
      local number = struct.pack('>I2', tonumber(meta[i + 1]))
      number_of[meta[i]], id_of[number] = number, meta[i]
    end
  end
end
