"""The memory of a node: bounded, shared, and never taken from under somebody."""

from __future__ import annotations

import random
import threading

import pytest

from dualpath_sglang.node.block_cache import BlockCache, CachedBlock, NoRoomError
from tests.support.blocks import chain, geometry

OF = geometry("mha", layers=4)
OTHER = geometry("mla", layers=4)
SIZE = OF.block_bytes


def land(block: CachedBlock) -> None:
    block.landed[:] = b"\1" * len(block.landed)


def read(cache: BlockCache, keys: list[bytes]) -> list[CachedBlock]:
    """Blocks that were read, and that nobody uses any more."""
    blocks, new = cache.pin(OF, keys)
    for i in new:
        land(blocks[i])
    cache.settle(blocks[i] for i in new)
    cache.unpin(blocks)
    return blocks


def test_a_block_is_new_once() -> None:
    cache = BlockCache(8 * SIZE)
    keys = chain("a", 4)
    first, new = cache.pin(OF, keys)
    assert new == [0, 1, 2, 3]
    second, again = cache.pin(OF, keys)
    assert again == []
    assert second == first
    assert cache.hits == 4
    assert cache.pin(OF, [keys[0], keys[0], chain("b", 1)[0]])[1] == [2]


def test_the_least_recently_used_go_first() -> None:
    cache = BlockCache(4 * SIZE)
    a, b, c = chain("a", 2), chain("b", 2), chain("c", 2)
    read(cache, a)
    read(cache, b)
    read(cache, a)
    read(cache, c)
    assert cache.pin(OF, a)[1] == []
    assert cache.used_bytes == 4 * SIZE


def test_what_is_in_use_stays() -> None:
    cache = BlockCache(4 * SIZE)
    sending, _ = cache.pin(OF, chain("sending", 2))
    with pytest.raises(NoRoomError):
        cache.pin(OF, chain("too many", 3))
    assert cache.used_bytes <= 4 * SIZE
    reading, new = cache.pin(OF, chain("reading", 2))
    cache.unpin(reading)  # whoever wanted them is gone, and they are still being read
    with pytest.raises(NoRoomError):
        cache.pin(OF, chain("more", 1))
    cache.settle(reading[i] for i in new)
    more, _ = cache.pin(OF, chain("more", 2))
    assert not {id(block.memory) for block in more} & {id(block.memory) for block in sending}


def test_a_failed_block_is_read_again_and_its_memory_comes_back() -> None:
    cache = BlockCache(2 * SIZE)
    (name,) = chain("a", 1)
    (waiting,), new = cache.pin(OF, [name])
    cache.settle([waiting])
    assert waiting.failed
    (again,), new = cache.pin(OF, [name])
    assert new == [0]
    assert again is not waiting
    land(again)
    cache.settle([again])
    cache.unpin([waiting, again])
    for i in range(5):
        read(cache, chain(i, 2))
    assert cache.used_bytes == 2 * SIZE


def test_memory_of_another_size_makes_room() -> None:
    cache = BlockCache(4 * SIZE)
    read(cache, chain("a", 4))
    count = cache.used_bytes // OTHER.block_bytes
    blocks, _ = cache.pin(OTHER, chain("b", count))
    assert all(len(block.memory) == OTHER.block_bytes for block in blocks)
    assert cache.used_bytes <= 4 * SIZE


def test_cleared_it_holds_what_is_in_use() -> None:
    cache = BlockCache(8 * SIZE)
    read(cache, chain("a", 4))
    kept, _ = cache.pin(OF, chain("b", 2))
    cache.clear()
    assert cache.used_bytes == 2 * SIZE
    assert cache.pin(OF, chain("b", 2)) == (kept, [])


def test_many_threads_never_share_memory_nor_exceed_the_capacity() -> None:
    cache = BlockCache(24 * SIZE)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            keys = chain(rng.randrange(12), rng.randrange(1, 5))
            try:
                blocks, new = cache.pin(OF, keys)
            except NoRoomError:
                continue
            for i in new:
                blocks[i].memory[:8] = keys[i][:8]
                if rng.random() < 0.8:
                    land(blocks[i])
            cache.settle(blocks[i] for i in new)
            for i, block in enumerate(blocks):
                if all(block.landed) and block.memory[:8] != keys[i][:8]:
                    wrong.append("another block's memory")
            if cache.used_bytes > 24 * SIZE:
                wrong.append("too much")
            cache.unpin(blocks)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.clear()
    assert cache.used_bytes == 0


def test_what_cannot_be_held_pushes_nothing_out() -> None:
    cache = BlockCache(10 * SIZE)
    keys = chain("a", 9)
    read(cache, keys)
    with pytest.raises(NoRoomError):
        cache.pin(OF, chain("b", 11))
    assert cache.pin(OF, keys)[1] == []


def test_memory_that_the_system_does_not_give_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = BlockCache(32 * SIZE)
    made = 0

    def scarce(size: int) -> memoryview:
        nonlocal made
        made += 1
        if made == 5:
            raise OSError("no memory")
        return memoryview(bytearray(size))

    monkeypatch.setattr("dualpath_sglang.node.block_cache.aligned", scarce)
    keys = chain("a", 8)
    with pytest.raises(OSError, match="no memory"):
        cache.pin(OF, keys)
    assert cache.pinned_bytes == 0
    assert len(read(cache, keys)) == 8
    assert cache.pinned_bytes == 0
    assert cache.used_bytes == 8 * SIZE


def test_what_is_sent_is_not_read_into() -> None:
    """A block stays as it is until the last of its users lets go."""
    cache = BlockCache(2 * SIZE)
    blocks, new = cache.pin(OF, chain("a", 2))
    for i in new:
        land(blocks[i])
    cache.settle(blocks)
    cache.unpin(blocks[:1])
    (other,), _ = cache.pin(OF, chain("b", 1))
    assert other.memory is blocks[0].memory
    with pytest.raises(NoRoomError):
        cache.pin(OF, chain("c", 1))
