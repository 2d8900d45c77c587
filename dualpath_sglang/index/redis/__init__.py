"""The index in Redis: many machines, one index. Needs the package ``redis`` once it is opened.

Keys begin with ``dualpath:{<store>}`` or ``dualpath:{<store>:<unit>}``. The hash tag keeps all of
a model on one server, so that every change to it is one script and a whole chain is one round
trip, on Redis Cluster too; models spread over its servers. ``<store>`` and ``<unit>`` are hex, the
rest is fixed words: nothing from outside enters a name.

| key of a store | type | what |
|---|---|---|
| ``:index`` | hash | token of this index, its format, whether it was filled from the store |
| ``:geometries`` | hash | unit by geometry id |
| ``:wanted`` | set | geometry id, segment: files that their owner should give up |

| key of a unit | type | what |
|---|---|---|
| ``:meta`` | hash | token of the index that the rows belong to; number by geometry id |
| ``:rows`` | hash | by key: last use, parent, children that are there, the blocks |
| ``:lru`` | sorted set | keys without children, by last use in us |
| ``:orphans`` | hash | by key that is not there: children that are |
| ``:freed`` | sorted set | blocks that were taken out and whose slot nobody reused yet |
| ``:claim:<geometry>:<key>`` | string | who is writing that block now; expires |

What nodes tell each other is said in :mod:`dualpath_sglang.index.redis.cluster_state`, and whose
the segments are in :mod:`dualpath_sglang.index.redis.ownership`.
"""

from __future__ import annotations

from dualpath_sglang.index.redis.opening import open_redis_index
from dualpath_sglang.index.redis.settings import IndexAddressError, RedisSettings
from dualpath_sglang.index.redis.store_id import store_id

LEAST_RIGHTS = (
    "~dualpath:* resetchannels -@all +eval +evalsha +info +time +exists +unlink +get +set +del "
    "+hset +hget +hmget +hgetall +hdel +hlen +hexists +hscan +hincrby +zadd +zrem +zcard "
    "+zrangebyscore +zrevrange +zrangebylex +zremrangebylex +sadd +srem +smembers "
    "+role +cluster|slots"
)
"""The least that the index's user must be let do, as ``ACL SETUSER`` takes it. The last line is
for Sentinel and Cluster alone."""

__all__ = ["LEAST_RIGHTS", "IndexAddressError", "RedisSettings", "open_redis_index", "store_id"]
