"""What a tenant may take: never more, of nobody else's, and changed while servers run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.report import Node
from dualpath_storage import Geometry
from dualpath_storage.quotas import QUOTAS_FILE, set_quota
from tests.kvcache.caches import DROPPED, STORED, options, read, used_bytes, write
from tests.support.blocks import chain, geometry
from tests.support.index_choice import source

Opened = Callable[..., KVCache]
ONE = geometry("mha", layers=2, namespace="one")
TWO = geometry("mha", layers=2, namespace="two")
SLOT = ONE.slot_bytes
SEGMENT = 8 * SLOT


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_sglang.evictor._RECLAIM_EVERY_S", 0.0)
    monkeypatch.setattr("dualpath_storage.quotas._LOOK_EVERY_S", 0.0)


def opened_with(opened: Opened, root: Path, segments: int = 10, **quotas: int) -> KVCache:
    root.mkdir(exist_ok=True)
    for name, blocks in quotas.items():
        set_quota(root, name, blocks * SLOT)
    return opened(capacity_bytes=segments * SEGMENT, segment_bytes=SEGMENT)


def fill(cache: KVCache, of: Geometry, chains: int) -> None:
    for i in range(chains):
        write(cache.attach(of), cache, chain((of.namespace, i), 8))


def fill_with_leaves(cache: KVCache) -> list[bytes]:
    """More pages of TWO than an eviction passes over to find some of its own."""
    keys = [key for i in range(40) for key in chain(("leaf", i), 1)]
    for key in keys:
        assert write(cache.attach(TWO), cache, [key]) == [STORED]
    return keys


def taken(root: Path, of: Geometry) -> int:
    return sum(path.stat().st_size for path in (root / of.id).glob("seg-*"))


def hits(cache: KVCache, of: Geometry, chains: int) -> int:
    pool = cache.attach(of)
    return sum(sum(read(pool, cache, chain((of.namespace, i), 8))) for i in range(chains))


def test_a_tenant_makes_room_among_its_own_pages(opened: Opened, root: Path) -> None:
    cache = opened_with(opened, root, segments=8, one=24)
    older = fill_with_leaves(cache)
    for i in range(20):
        keys = chain(("one", i), 8)
        assert write(cache.attach(ONE), cache, keys) == [STORED] * 8
        assert read(cache.attach(ONE), cache, keys) == [True] * 8
        assert taken(root, ONE) <= 24 * SLOT
    assert all(read(cache.attach(TWO), cache, older)), "nobody else's went for it"
    cache.index.check()


def test_without_a_quota_the_older_pages_of_others_go(opened: Opened, root: Path) -> None:
    """Control: it is the quota that kept them."""
    cache = opened_with(opened, root, segments=8)
    older = fill_with_leaves(cache)
    fill(cache, ONE, 20)
    assert not all(read(cache.attach(TWO), cache, older))
    assert taken(root, ONE) >= 24 * SLOT


def test_a_full_store_takes_from_everybody_within_the_quotas(opened: Opened, root: Path) -> None:
    cache = opened_with(opened, root, segments=6, one=24, two=40)
    for i in range(30):
        for of in (ONE, TWO):
            write(cache.attach(of), cache, chain((of.namespace, i), 8))
            cache.maintain()
        assert taken(root, ONE) <= 24 * SLOT
        assert taken(root, TWO) <= 40 * SLOT
        assert used_bytes(root) <= 6 * SEGMENT
    assert hits(cache, ONE, 30) and hits(cache, TWO, 30)


def test_a_smaller_quota_is_obeyed_at_once(opened: Opened, root: Path) -> None:
    cache = opened_with(opened, root)
    fill(cache, ONE, 6)
    fill(cache, TWO, 3)
    assert taken(root, ONE) == 6 * SEGMENT
    set_quota(root, "one", 2 * SEGMENT)
    cache.maintain()
    assert taken(root, ONE) <= 2 * SEGMENT
    assert hits(cache, TWO, 3) == 24
    newest = chain(("one", 5), 8)
    assert read(cache.attach(ONE), cache, newest) == [True] * 8, "the oldest went"
    set_quota(root, "one", None)
    fill(cache, ONE, 6)
    assert taken(root, ONE) == 6 * SEGMENT


def test_a_quota_of_nothing_keeps_a_tenant_out(opened: Opened, root: Path) -> None:
    cache = opened_with(opened, root, one=0)
    assert write(cache.attach(ONE), cache, chain("a", 8)) == [DROPPED] * 8
    assert write(cache.attach(TWO), cache, chain("a", 8)) == [STORED] * 8
    assert taken(root, ONE) == 0


def test_segments_are_cut_to_the_quota(opened: Opened, root: Path) -> None:
    root.mkdir()
    set_quota(root, "one", 20 * SLOT)
    cache = opened(capacity_bytes=1 << 30)
    assert write(cache.attach(ONE), cache, chain("a", 8)) == [STORED] * 8
    assert taken(root, ONE) <= 20 * SLOT


def test_two_processes_share_one_quota(opened: Opened, root: Path) -> None:
    caches = [opened_with(opened, root, one=32) for _ in range(2)]
    fill(caches[0], TWO, 2)
    end = time.monotonic() + 60.0
    for i in range(12):
        for n, cache in enumerate(caches):
            keys = chain((n, i), 8)
            while write(cache.attach(ONE), cache, keys)[0] is DROPPED:
                assert time.monotonic() < end
                for other in caches:
                    other.maintain()
            assert taken(root, ONE) <= 32 * SLOT
    assert hits(caches[0], TWO, 2) == 16


def test_quotas_that_cannot_be_read_stay_as_they_were(
    opened: Opened, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened_with(opened, root, one=16)
    fill(cache, ONE, 4)
    (root / QUOTAS_FILE).write_text("garbage")
    fill(cache, ONE, 4)
    assert taken(root, ONE) <= 16 * SLOT
    assert "what was read before counts" in caplog.text


def test_quotas_that_never_could_be_read_are_none_and_that_is_said(
    opened: Opened, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir()
    (root / QUOTAS_FILE).write_text("[" * 200_000)
    cache = opened(capacity_bytes=10 * SEGMENT, segment_bytes=SEGMENT)
    assert write(cache.attach(ONE), cache, chain("a", 8)) == [STORED] * 8
    assert "NO quota counts" in caplog.text


def test_a_server_obeys_before_it_has_stored_anything(opened: Opened, root: Path) -> None:
    first = opened_with(opened, root)
    fill(first, ONE, 6)
    first.close()
    assert taken(root, ONE) == 6 * SEGMENT
    set_quota(root, "one", 2 * SEGMENT)
    with KVCache(
        options(root, capacity_bytes=10 * SEGMENT, segment_bytes=SEGMENT),
        index=source(),
        node=Node("streaming"),
    ) as server:
        server.attach(ONE)
        end = time.monotonic() + 30.0
        while taken(root, ONE) > 2 * SEGMENT:
            assert time.monotonic() < end
            time.sleep(0.1)
