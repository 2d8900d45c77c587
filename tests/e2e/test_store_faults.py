"""Faults of the store under a running server: right answers, no error, and a repaired page.

One server a model kind goes through all of them. Each begins with the prompt in storage and the
device and host pools overwritten, so that only the store could give a stale or wrong byte.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.index_choice import embedded, index_of
from tests.support.server import Answer, Server, hicache_flags, random_tokens

pytestmark = pytest.mark.e2e

PAGE_TOKENS = 16
PROMPT = random_tokens(320, seed=11)
PAGES = len(PROMPT) // PAGE_TOKENS
# What a store does when it is damaged does not depend on attention.
KINDS = ["qwen3", pytest.param("deepseek_v2", marks=pytest.mark.slow)]
DEADLINE_S = 120.0


def dualpath(root: Path, **more: object) -> list[str]:
    settings = {"root": str(root), "capacity": "64MiB", "segment_size": "4MiB"}
    return hicache_flags("dualpath", {**settings, "prefetch_threshold": PAGE_TOKENS, **more})


@dataclass
class Served:
    """A server, its store, and the one right answer to PROMPT."""

    server: Server
    root: Path
    cold: Answer

    def ask(self) -> Answer:
        """The prompt, when neither device nor host pools can have it."""
        self.server.flush()
        answer = self.server.generate(PROMPT)
        assert answer.tokens == self.cold.tokens
        return answer

    def storage_hit(self) -> bool:
        hit = self.ask().cached.storage >= len(PROMPT) - PAGE_TOKENS
        # Removed files that are still open are read for a moment.
        return hit and "kv" in stores.geometries(self.root)

    def recovers(self) -> None:
        """Damaged or lost pages are written again, and then hit, within the deadline."""
        end = time.monotonic() + DEADLINE_S
        while not self.storage_hit():
            assert time.monotonic() < end, self.server.log_tail()
            time.sleep(0.5)

    def key(self, page: int) -> bytes:
        return stores.chain(self.root)[page]


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    flags = dualpath(folder / "store")
    with Server(model(request.param), flags, log=folder / "server.log") as server:
        one = Served(server, folder / "store", server.generate(PROMPT))
        one.recovers()
        yield one
        assert server.alive
        log = server.log.read_text(errors="replace")
        raised = [line for line in log.splitlines() if "File " in line and "/dualpath_s" in line]
        assert not raised, raised  # no exception of ours in any thread of SGLang's
        assert "HiCache prefetch transfer failed" not in log
        assert "HiCache backup failed" not in log


Fault = Callable[[Served], None]


def payload_byte(served: Served) -> None:
    stores.corrupt(served.root, served.key(5), layer=1)


def header_byte(served: Served) -> None:
    _patch(served, served.key(5), at=40, data=b"\xff\x00\xff")


def stale_entry(served: Served) -> None:
    """The slot of one page holds another whole block: what a reuse behind the index would do."""
    (folder,) = (served.root / g.id for g in stores.geometries(served.root).values())
    geometry = stores.geometries(served.root)["kv"]
    with index_of(served.root) as index:
        one, other = index.lookup(geometry, [served.key(3), served.key(9)])
    assert one is not None and other is not None
    size = geometry.slot_bytes
    source = stores.segment_path(folder, other.segment)
    with source.open("rb", buffering=0) as file:
        file.seek(other.slot * size)
        block = file.read(size)
    _write(stores.segment_path(folder, one.segment), one.slot * size, block)


def page_missing(served: Served) -> None:
    """A page in the middle is blank."""
    _patch(served, served.key(8), at=0, data=bytes(4096))


def truncated_segment(served: Served) -> None:
    for path in stores.segments(served.root):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 3)


def zeroed_segment(served: Served) -> None:
    for path in stores.segments(served.root):
        _write(path, 0, bytes(path.stat().st_size))


def removed_segments(served: Served) -> None:
    for path in stores.segments(served.root):
        path.unlink()


def removed_geometry(served: Served) -> None:
    for geometry in stores.geometries(served.root).values():
        shutil.rmtree(served.root / geometry.id)


def removed_root(served: Served) -> None:
    shutil.rmtree(served.root)


def index_deleted(served: Served) -> None:
    for path in served.root.glob("index.lmdb*"):
        path.unlink()


def index_garbage(served: Served) -> None:
    path = served.root / "index.lmdb"
    _write(path, 0, random.Random(5).randbytes(path.stat().st_size))


def index_cut_short(served: Served) -> None:
    """By a tool that writes a new file; to cut a file under its memory map is no fair game."""
    index = served.root / "index.lmdb"
    short = index.with_suffix(".short")
    short.write_bytes(index.read_bytes()[:5000])
    short.replace(index)


FAULTS = [
    payload_byte,
    header_byte,
    stale_entry,
    page_missing,
    truncated_segment,
    zeroed_segment,
    removed_segments,
    removed_geometry,
    pytest.param(index_deleted, marks=embedded),
    pytest.param(index_garbage, marks=embedded),
    pytest.param(index_cut_short, marks=embedded),
    removed_root,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_answer_stays_right_and_the_store_is_repaired(served: Served, fault: Fault) -> None:
    served.recovers()  # the fault must meet pages that are in use
    served.server.flush()
    fault(served)
    served.ask()
    served.recovers()


def test_without_faults_the_bytes_do_come_from_the_store(served: Served) -> None:
    """The control of all of the above: a hit needs the store, and one bad page ends it there."""
    assert served.ask().cached.storage >= len(PROMPT) - PAGE_TOKENS
    served.server.flush()
    stores.corrupt(served.root, served.key(5), layer=0)
    answer = served.ask()
    assert answer.cached.storage == 5 * PAGE_TOKENS
    served.recovers()


def _patch(served: Served, key: bytes, at: int, data: bytes) -> None:
    geometry = stores.geometries(served.root)["kv"]
    with index_of(served.root) as index:
        place = index.lookup(geometry, [key])[0]
    assert place is not None
    path = stores.segment_path(served.root / geometry.id, place.segment)
    _write(path, place.slot * geometry.slot_bytes + at, data)


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)
