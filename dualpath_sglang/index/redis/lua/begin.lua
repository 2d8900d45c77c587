-- Begins every script on the rows of one model. KEYS: meta, rows, lru, orphans, freed.
-- ARGV[1]: the token of the index that the caller knows.
-- Answers nil when the model has no rows, or those of an older index, and 0 when they belong to
-- a newer one. Tokens begin with the time at which they were made.
local META, ROWS, LRU, ORPHANS, FREED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
do
  local token = redis.call('HGET', META, 'token')
  if not token or token < ARGV[1] then return false end
  if token > ARGV[1] then return 0 end
end
local HEAD, BLOCK, KEY = 44, 18, 32
local sub = string.sub
