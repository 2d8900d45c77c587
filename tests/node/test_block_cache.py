"""The memory of a node: bounded, shared, and never taken from under somebody."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from dualpath_sglang.node.block_cache import BlockCache, CachedBlock, image_bytes
from dualpath_sglang.node.landings import Landings
from dualpath_storage import Geometry
from tests.support.blocks import chain, geometry

OF = geometry("mha", layers=4)
OTHER = geometry("mla", layers=4)
SIZE = image_bytes(OF)
SOON_S = 20.0


def pin(
    cache: BlockCache, keys: Sequence[bytes], of: Geometry = OF
) -> tuple[list[CachedBlock], list[int]]:
    return cache.add(of, keys, Landings())


def land(block: CachedBlock) -> None:
    block.landed = block.layers


def read(cache: BlockCache, keys: Sequence[bytes], of: Geometry = OF) -> list[CachedBlock]:
    """Blocks that were read, and that nobody uses any more."""
    blocks, new = pin(cache, keys, of)
    assert len(blocks) == len(keys)
    for i in new:
        land(blocks[i])
    cache.settle([blocks[i] for i in new])
    cache.unpin(blocks)
    return blocks


def test_a_block_is_new_once() -> None:
    cache = BlockCache(8 * SIZE)
    keys = chain("a", 4)
    assert cache.find(OF, keys) == [None] * 4
    first, new = pin(cache, keys)
    assert new == [0, 1, 2, 3]
    second, again = pin(cache, keys)
    assert again == []
    assert second == first == cache.find(OF, keys)
    assert cache.hits == 8
    assert pin(cache, [keys[0], keys[0], chain("b", 1)[0]])[1] == [2]


def test_memory_is_laid_out_as_a_slot_and_of_nobody_else() -> None:
    cache = BlockCache(8 * SIZE)
    blocks, _ = pin(cache, chain("a", 4))
    for i, block in enumerate(blocks):
        assert len(block.image) == OF.slot_bytes
        block.image[:] = bytes([i]) * len(block.image)
    for i, block in enumerate(blocks):
        payload = cache.memory.bytes[block.offset : block.offset + OF.block_bytes]
        assert payload == bytes([i]) * OF.block_bytes
        assert block.image == bytes([i]) * len(block.image)


def test_the_least_recently_used_go_first() -> None:
    cache = BlockCache(4 * SIZE)
    a, b, c = chain("a", 2), chain("b", 2), chain("c", 2)
    for keys in (a, b, a, c):
        read(cache, keys)
    assert pin(cache, a)[1] == []
    assert cache.find(OF, b) == [None, None]
    assert cache.used_bytes == 4 * SIZE


def test_what_is_in_use_stays_and_as_much_as_fits_beside_it_is_had() -> None:
    cache = BlockCache(4 * SIZE)
    sending, _ = pin(cache, chain("sending", 2))
    reading, new = pin(cache, chain("reading", 3))
    assert (len(reading), new) == (2, [0, 1])
    cache.unpin(reading)  # whoever wanted them is gone, and they are still being read
    assert pin(cache, chain("more", 1)) == ([], [])
    assert cache.room_for(OF) == 0
    cache.settle(reading)
    assert cache.room_for(OF) == 2
    more, _ = pin(cache, chain("more", 2))
    assert len(more) == 2
    assert not {block.offset for block in more} & {block.offset for block in sending}


def test_a_failed_block_is_read_again_and_its_memory_comes_back() -> None:
    cache = BlockCache(2 * SIZE)
    (name,) = chain("a", 1)
    (waiting,), new = pin(cache, [name])
    cache.settle([waiting])
    assert waiting.failed
    assert cache.find(OF, [name]) == [None]
    (again,), new = pin(cache, [name])
    assert new == [0]
    assert again is not waiting
    land(again)
    cache.settle([again])
    cache.unpin([waiting, again])
    for i in range(5):
        read(cache, chain(i, 2))
    assert cache.used_bytes == 2 * SIZE


def test_only_what_nobody_else_wants_is_given_up() -> None:
    cache = BlockCache(4 * SIZE)
    blocks, _ = pin(cache, chain("a", 2))
    assert not cache.give_up(blocks)
    cache.unpin(blocks[:1])
    assert not cache.give_up(blocks)
    cache.unpin(blocks[1:])
    assert cache.give_up(blocks)
    assert all(block.failed for block in blocks)
    assert cache.used_bytes == cache.pinned_bytes == cache.count == 0


def test_memory_of_another_size_makes_room() -> None:
    cache = BlockCache(4 * SIZE)
    read(cache, chain("a", 4))
    count = 4 * SIZE // image_bytes(OTHER)
    blocks, _ = pin(cache, chain("b", count), OTHER)
    assert len(blocks) == count
    assert cache.used_bytes <= 4 * SIZE
    cache.settle(blocks)
    cache.unpin(blocks)
    assert len(read(cache, chain("c", 4))) == 4


def test_cleared_it_holds_what_is_in_use() -> None:
    cache = BlockCache(8 * SIZE)
    read(cache, chain("a", 4))
    kept, _ = pin(cache, chain("b", 2))
    cache.clear()
    assert cache.used_bytes == 2 * SIZE
    assert pin(cache, chain("b", 2)) == (kept, [])


def test_whoever_waits_for_room_gets_it_when_others_let_go() -> None:
    cache = BlockCache(2 * SIZE)
    blocks, _ = pin(cache, chain("a", 2))
    got: list[int] = []

    def wait() -> None:
        got.append(len(cache.add(OF, chain("b", 2), Landings(), SOON_S)[0]))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert not got
    cache.settle(blocks[:1])
    cache.unpin(blocks[:1])
    thread.join(SOON_S)
    assert got == [1]


def test_many_threads_never_share_memory_nor_exceed_the_capacity() -> None:
    cache = BlockCache(24 * SIZE)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            keys = chain(rng.randrange(12), rng.randrange(1, 5))
            of = rng.choice([OF, OF, OTHER])
            blocks, new = pin(cache, keys, of)
            for i in new:
                blocks[i].image[:8] = keys[i][:8]
                if rng.random() < 0.8:
                    land(blocks[i])
            cache.settle([blocks[i] for i in new])
            for i, block in enumerate(blocks):
                if block.whole and block.image[:8] != keys[i][:8]:
                    wrong.append("another block's memory")
            if cache.used_bytes > cache.capacity_bytes:
                wrong.append("too much")
            cache.unpin(blocks)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.clear()
    assert cache.used_bytes == cache.pinned_bytes == 0


def test_what_is_sent_is_not_read_into() -> None:
    """A block stays as it is until the last of its users lets go."""
    cache = BlockCache(2 * SIZE)
    blocks = read(cache, chain("a", 2))
    cache.find(OF, chain("a", 1))
    (other,), _ = pin(cache, chain("b", 1))
    assert other.offset == blocks[1].offset
    assert pin(cache, chain("c", 1)) == ([], [])
