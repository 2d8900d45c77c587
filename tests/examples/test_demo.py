"""The demo's checks fail when what they check does not hold; the whole demo is a slow test."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dualpath_sglang.kvcache import KVCache
from dualpath_storage import Geometry, StoreOptions, key_bytes, pieces_of
from examples.agent_session import Turn
from examples.demo import Demo, DemoError, flip_byte, stored_keys

GEOMETRY = Geometry("Tiny:0a1b", "w1", "kv", "float32", 64, 4, 8192, "mha")
KEYS = [key_bytes(f"page {i}") for i in range(9)]
TURN = Turn(1, 640, 32, 0, 0, 0, 0, 0.1, 0.2, "text")


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    demo = Demo(tmp_path, 2)
    with KVCache(StoreOptions(demo.root, capacity_bytes=64 << 20)) as cache:
        pool = cache.attach(GEOMETRY)
        areas = [memoryview(bytearray([i] * GEOMETRY.block_bytes)) for i in range(len(KEYS))]
        cache.write(pool, KEYS, [pieces_of(area, GEOMETRY) for area in areas])
    return demo


def test_the_flipped_page_lies_in_the_middle_and_verify_names_it(demo: Demo) -> None:
    demo.verify(expected=None)
    page = flip_byte(demo.root)
    assert (page.before, page.key) == (4, KEYS[4].hex())
    demo.verify(expected=page.key)
    with pytest.raises(DemoError, match="where nothing is damaged"):
        demo.verify(expected=None)
    with pytest.raises(DemoError, match=KEYS[5].hex()):
        demo.verify(expected=KEYS[5].hex())


def test_a_page_that_verify_does_not_name_fails_the_demo(demo: Demo) -> None:
    with pytest.raises(DemoError, match="named nothing"):
        demo.verify(expected=KEYS[4].hex())


def test_too_few_hits_after_the_restart_fail_the_demo(demo: Demo) -> None:
    demo.session.turns = [TURN, replace(TURN, number=2, storage_tokens=640)]
    demo.check_restart(1)
    demo.session.turns = [TURN, replace(TURN, number=2, storage_tokens=576)]
    with pytest.raises(DemoError, match="found 576 tokens"):
        demo.check_restart(1)


def test_another_answer_than_without_a_cache_fails_the_demo(demo: Demo) -> None:
    demo.session.turns, demo.reference = [TURN], [TURN]
    demo.check_answers()
    demo.reference = [replace(TURN, answer="test")]
    with pytest.raises(DemoError, match="Turn 1"):
        demo.check_answers()


def test_stored_keys_are_those_in_the_index(demo: Demo) -> None:
    assert stored_keys(demo.root) == {key.hex() for key in KEYS}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_demo_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--turns", "4"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All held" in done.stdout
    assert " NO" not in done.stdout
