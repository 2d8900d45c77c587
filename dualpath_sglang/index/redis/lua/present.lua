-- ARGV: token, key. Answers 'yes' or 'no'.
return redis.call('HEXISTS', ROWS, ARGV[2]) == 1 and 'yes' or 'no'
