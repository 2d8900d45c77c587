-- Has everybody begin anew. KEYS: marker; ARGV: token that is to go.
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
return 'done'
