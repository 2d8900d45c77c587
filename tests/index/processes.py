"""What the child processes of the index's tests do; imports little, is forked from a zygote."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from dualpath_sglang.index import EmbeddedIndex, IndexDamagedError, IndexUnavailableError
from dualpath_sglang.index.environment import Environment
from dualpath_sglang.index.keeper import IndexKeeper
from dualpath_storage import NO_PARENT
from tests.index.records import FOREVER_S, KV, records
from tests.support.blocks import chain

GROWN = 80
"""Rounds after which an index has some hundred pages."""


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def publish_and_evict(path: str, name: str, rounds: int) -> None:
    """Chains of its own, some of which anybody may evict; looks up its last one each time."""
    index = EmbeddedIndex(Path(path), timeout_s=FOREVER_S)
    rng = random.Random(name)
    for i in range(rounds):
        keys = chain((name, i), 8)
        segment = int(name)
        assert all(index.publish(KV, records(keys, segment=segment, slot=8 * i), FOREVER_S))
        run = index.prefix(KV, keys)
        assert run in range(9)
        index.touch(KV.unit, keys, FOREVER_S)
        if rng.random() < 0.3:
            freed = index.evict({KV.id_bytes: 1}, 4, FOREVER_S)
            index.forget_freed(freed, FOREVER_S)
    index.close()
    say("done")


def write_for_ever(path: str, seed: int) -> None:
    """Publishes whole chains and evicts, until it is killed."""
    index = EmbeddedIndex(Path(path), timeout_s=FOREVER_S)
    say("writing")
    rng = random.Random(seed)
    i = 0
    while True:
        i += 1
        keys = chain((seed, i), rng.randrange(1, 30))
        index.publish(KV, records(keys, segment=seed, slot=100 * i, generation=i), FOREVER_S)
        if i > 20:
            index.forget_freed(index.evict({KV.id_bytes: 1}, 15, FOREVER_S), FOREVER_S)


def hold_a_transaction(path: str) -> None:
    """Stays in the middle of a transaction."""
    index = EmbeddedIndex(Path(path))
    with index._env.write(FOREVER_S) as txn:
        for i in range(2000):
            txn.put(b"half a transaction %d" % i, bytes(100), db=index._meta)
        say("holding")
        time.sleep(600)


def hold_the_lock(path: str) -> None:
    """Has its turn to write and does nothing with it."""
    index = EmbeddedIndex(Path(path))
    with index._env._turn(FOREVER_S):
        say("holding")
        time.sleep(600)


def hold_a_snapshot(path: str) -> None:
    """Reads for ever."""
    index = EmbeddedIndex(Path(path))
    for _ in index.entries():
        say("reading")
        time.sleep(600)


def try_to_open(path: str, timeout_s: float) -> None:
    began = time.monotonic()
    try:
        EmbeddedIndex(Path(path), timeout_s=timeout_s).close()
        say("opened")
    except IndexUnavailableError as error:
        say("unavailable", round(time.monotonic() - began, 1), error)


def live_under_damage(path: str, pause_s: float, seed: int, guarded: bool) -> None:
    """Uses an index, and makes a new one whenever it is damaged, until it is told to end."""
    if not guarded:
        Environment._guard = lambda self: None  # type: ignore[method-assign]
    file = Path(path)
    renewed = 0

    def open_index() -> Any:
        nonlocal renewed
        try:
            return EmbeddedIndex(file)
        except IndexDamagedError:
            renewed += 1
            for suffix in ("", "-lock", "-writer"):
                Path(f"{file}{suffix}").unlink(missing_ok=True)
            return EmbeddedIndex(file)

    keeper = IndexKeeper(file, open_index, lambda _: None)
    rng = random.Random(seed)
    i = 0
    while not Path(f"{file}-stop").exists():
        keeper._retry_at = 0
        keeper.ensure()
        with keeper.guarded(keeper.index) as index:
            if index is not None:
                use_once(index, rng, i)
        if i == GROWN:
            say("grown")
        i += 1
        if i > GROWN:
            time.sleep(pause_s)
    keeper._retry_at = 0
    keeper.ensure()
    say("renewed", renewed)
    sys.stdout.flush()


def use_once(index: EmbeddedIndex, rng: random.Random, i: int) -> None:
    keys = chain(("live", i), 16)
    past = chain(("live", rng.randrange(i + 1)), 16)
    index.lookup(KV, past)
    index.publish(KV, records(keys, parent=NO_PARENT, slot=16 * i), FOREVER_S)
    index.touch(KV.unit, past, FOREVER_S)
    if i > GROWN:
        index.forget_freed(index.evict({KV.id_bytes: 1}, 16, FOREVER_S), FOREVER_S)
