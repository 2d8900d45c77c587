"""The backend bench: valid rows, and a backend that lies is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.measure import BenchError, Timing, drop_cached_pages, percentile
from bench.pages import Case, PagePool, prepare_sglang

CASE = Case("tiny", pages=6, page_tokens=4, layers=4, heads=2, head_dim=64)
ROOT = Path(__file__).parents[2]
FIELDS = {"system", "case", "op", "gb_s", "share", "p50_ms", "p99_ms", "cpu_s_per_gb"}


@pytest.fixture(scope="module")
def pool() -> PagePool:
    prepare_sglang()
    return PagePool(CASE)


def test_the_command_writes_a_row_for_every_operation(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = "-m bench.backend --rounds 2 --scale 64 --systems dualpath,file,nixl,lmcache"
    done = subprocess.run(
        [sys.executable, *command.split(), "--json", out, "--dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert all(set(row) == FIELDS for row in rows)
    systems = {row["system"] for row in rows}
    assert {"dualpath", "file", "disk", "memcpy"} <= systems
    for peer in {"nixl", "lmcache"} - systems:
        assert f"{peer} is left out" in done.stderr
    for system in ("dualpath", "file"):
        for case in ("2MiB", "128KiB"):
            for op in ("set_durable", "get_cold", "get_warm"):
                row = next(
                    r for r in rows if (r["system"], r["case"], r["op"]) == (system, case, op)
                )
                assert all(row[name] > 0 for name in FIELDS - {"system", "case", "op"})
        assert any(r["system"] == system and r["op"] == "exists_256" for r in rows)
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"


class Honest:
    """A backend in memory."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._stored: dict[str, Any] = {}

    def _pages(self, indices: Any) -> list[int]:
        return [int(i) // CASE.page_tokens for i in indices[:: CASE.page_tokens]]

    def set(self, keys: list[str], indices: Any) -> bool:
        for key, page in zip(keys, self._pages(indices), strict=True):
            self._stored[key] = self._pool.words[:, page].copy()
        return True

    def settle(self) -> None:
        pass

    def get(self, keys: list[str], indices: Any) -> list[bool]:
        for key, page in zip(keys, self._pages(indices), strict=True):
            if key in self._stored:
                self._pool.words[:, page] = self._stored[key]
        return [key in self._stored for key in keys]

    def exists(self, keys: list[str]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._stored), len(keys))

    def close(self) -> None:
        pass


class WrongByte(Honest):
    def get(self, keys: list[str], indices: Any) -> list[bool]:
        results = super().get(keys, indices)
        self._pool.words[1, self._pages(indices)[0], 7] ^= 1
        return results


class SaysYes(Honest):
    def get(self, keys: list[str], indices: Any) -> list[bool]:
        super().get(keys, indices)
        return [True] * len(keys)

    def exists(self, keys: list[str]) -> int:
        return len(keys)


class Forgets(Honest):
    def settle(self) -> None:
        self._stored.popitem()


class Refuses(Honest):
    def set(self, keys: list[str], indices: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("system", "complaint"),
    [
        (Honest, None),
        (WrongByte, "wrong bytes in 1 pages"),
        (SaysYes, "a page that was never stored was found"),
        (Forgets, "were missing"),
        (Refuses, "not stored"),
    ],
)
def test_a_backend_that_does_not_keep_its_word_has_no_figures(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    system: Callable[[PagePool], Any],
    complaint: str | None,
) -> None:
    prepare_sglang()
    from bench import rounds

    monkeypatch.setitem(rounds.OPENERS, "fake", lambda directory, pool: system(pool))
    said: list[str] = []
    (tmp_path / "case").mkdir()
    contest = rounds.Contest(CASE, ["fake"], tmp_path / "case", [3], said.append)
    contest.round(0)
    contest.close()
    assert ("fake" in contest.failed) == (complaint is not None)
    assert complaint is None or complaint in contest.failed["fake"]
    assert any(row.system == "fake" for row in contest.rows()) == (complaint is None)
    assert any(row.system == "disk" for row in contest.rows()), "the others go on"
    assert not (tmp_path / "case").exists()


def test_every_byte_of_a_page_is_looked_at(pool: PagePool) -> None:
    pool.fill(3)
    assert pool.wrong(3) == []
    assert pool.wrong(4) == list(range(CASE.pages)), "another turn's content"
    for position in (0, 1, len(pool.memory) // 3, len(pool.memory) - 1):
        pool.memory[position] ^= 0x10
        half = len(pool.memory) // 2
        assert pool.wrong(3) == [position % half // (CASE.page_bytes // 2)]
        pool.memory[position] ^= 0x10


def test_the_pool_is_laid_out_as_sglang_says(pool: PagePool) -> None:
    """What the check takes for a page is what SGLang's own pointers name."""
    import ctypes

    import numpy as np

    pool.fill(5)
    pointers, sizes = pool.host.get_page_buffer_meta(pool.indices(np.array([2])))
    assert sizes == [CASE.page_bytes // 2] * 2
    for half, (pointer, size) in enumerate(zip(pointers, sizes, strict=True)):
        assert ctypes.string_at(pointer, size) == pool.words[half, 2].tobytes()


def test_cold_means_out_of_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    drop_cached_pages(tmp_path)
    with path.open("rb") as file:  # kept open: its pages may be read again at any time
        file.read()
        drop_cached_pages(tmp_path)


def test_pages_that_stay_cached_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)
    with pytest.raises(BenchError, match="stayed in the page cache"):
        drop_cached_pages(tmp_path)


def test_what_belongs_to_the_last_call_is_timed_with_it() -> None:
    timing = Timing()
    for _ in range(3):
        with timing.call():
            pass
    last = timing.calls_s[-1]
    with timing.settle():
        sum(range(100_000))
    assert len(timing.calls_s) == 3
    assert timing.calls_s[-1] > last
    assert timing.wall_s >= timing.calls_s[-1]


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.99) == 100.0
    assert percentile(values, 0.5) == 51.0
    assert percentile([7.0], 0.99) == 7.0
