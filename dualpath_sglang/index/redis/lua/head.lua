-- ARGV: token, first score, leaves to skip from there, key that is kept or ''.
-- Answers {score of the next leaf or '', leaves}, or 1 when the kept key is not there.
if ARGV[4] ~= '' and redis.call('HEXISTS', ROWS, ARGV[4]) == 0 then return 1 end
local leaf = redis.call('ZRANGEBYSCORE', LRU, ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', ARGV[3], 1)
return { leaf[2] or '', redis.call('ZCARD', LRU) }
