"""The index against a model of it: every table agrees after every step."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dualpath_sglang.index import EmbeddedIndex, Freed, Index, Record, embedded, passes
from dualpath_sglang.index.redis import RedisSettings, evicting, open_redis_index
from dualpath_sglang.index.redis.index import RedisIndex
from dualpath_storage import NO_PARENT, Geometry, Placement, Slot
from tests.index.records import FOREVER_S, INDEXER, KV, OTHER
from tests.support.blocks import key
from tests.support.redis_server import RedisServer

GEOMETRIES = [KV, INDEXER, OTHER]
KEYS = [key(i) for i in range(12)]
SIZES = {g.id_bytes: g.slot_bytes for g in GEOMETRIES}

UnitKey = tuple[bytes, bytes]


@dataclass
class Unit:
    used: int
    parent: bytes


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 1000
        self.patch = contextlib.ExitStack()
        for name, value in (("_MIN_PASSES", 2), ("_PASS_SHARE", 4)):
            self.patch.enter_context(mock.patch.object(passes, name, value))
        self.set_up()
        self.index = self.open()
        self.blocks: dict[tuple[UnitKey, bytes], Placement] = {}
        self.units: dict[UnitKey, Unit] = {}
        self.freed: dict[tuple[bytes, Slot], int] = {}
        self.wanted: set[tuple[bytes, int]] = set()
        self.generation = 0

    def teardown(self) -> None:
        self.index.close()
        self.patch.close()

    def set_up(self) -> None:
        """Make what :meth:`open` needs; undone by ``self.patch``."""
        raise NotImplementedError  # hypothesis' own metaclass leaves no room for that of ABC

    def open(self) -> Index:
        raise NotImplementedError

    # -- what the model knows ---------------------------------------------------------------

    def is_leaf(self, name: UnitKey) -> bool:
        return not any(
            other[0] == name[0] and unit.parent == name[1] for other, unit in self.units.items()
        )

    def leaves(self) -> list[UnitKey]:
        found = [name for name in self.units if self.is_leaf(name)]
        return sorted(found, key=lambda name: (self.units[name].used, name[0] + name[1]))

    def ordered_with(self, unit: bytes) -> list[UnitKey]:
        """The leaves whose order of use a new use must be the last of."""
        del unit
        return self.leaves()

    def looked_at(self, models: set[bytes] | None) -> list[UnitKey]:
        """The leaves of which an eviction may pass over a share."""
        del models
        return self.leaves()

    def now(self, unit: bytes) -> int:
        uses = (self.units[name].used for name in self.ordered_with(unit))
        return max(self.clock, max(uses, default=0) + 1)

    def use(self, name: UnitKey, when: int, parent: bytes = NO_PARENT) -> None:
        unit = self.units.setdefault(name, Unit(when, parent))
        unit.used = max(unit.used, when)
        if unit.parent == NO_PARENT:
            unit.parent = parent

    def free(self, name: UnitKey, geometry_id: bytes) -> Freed:
        place = self.blocks.pop((name, geometry_id))
        slot = Slot(place.segment, place.slot)
        self.freed[geometry_id, slot] = place.generation
        if not any(other == name for other, _ in self.blocks):
            unit = self.units.pop(name)
            parent = (name[0], unit.parent)
            if parent in self.units and self.is_leaf(parent):
                self.use(parent, unit.used)
        return Freed(geometry_id, slot, place.generation)

    def free_unit(self, name: UnitKey) -> list[Freed]:
        ids = sorted(gid for other, gid in self.blocks if other == name)
        return [self.free(name, gid) for gid in ids]

    # -- what is done -----------------------------------------------------------------------

    @rule(
        geometry=st.sampled_from(GEOMETRIES),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True),
        parent=st.sampled_from([NO_PARENT, *KEYS]),
        segment=st.integers(0, 3),
        reuse=st.booleans(),
    )
    def publish(
        self, geometry: Geometry, keys: list[bytes], parent: bytes, segment: int, reuse: bool
    ) -> None:
        if self.makes_a_circle(geometry, keys, parent):
            return
        gid = geometry.id_bytes
        self.generation += 1
        free = [slot for owner, slot in self.freed if owner == gid] if reuse else []
        records = []
        for i, (name, before) in enumerate(zip(keys, [parent, *keys[:-1]], strict=True)):
            slot = free[i] if i < len(free) else Slot(segment, 100 * self.generation + i)
            records.append(
                Record(name, before, Placement(slot.segment, slot.slot, self.generation))
            )
        now = self.now(geometry.unit) + len(records)
        wanted = []
        for record in records:
            new = ((geometry.unit, record.key), gid) not in self.blocks
            wanted.append(new)
        for i in reversed(range(len(records))):
            record = records[i]
            name = (geometry.unit, record.key)
            if wanted[i]:
                self.blocks[name, gid] = record.placement
                self.freed.pop((gid, Slot(record.placement.segment, record.placement.slot)), None)
            self.use(name, now - i, record.parent)
        assert self.index.publish(geometry, records, FOREVER_S) == wanted

    def makes_a_circle(self, geometry: Geometry, keys: list[bytes], parent: bytes) -> bool:
        """Keys are hashes over their parents: a circle cannot come about."""
        parents = {name[1]: u.parent for name, u in self.units.items() if name[0] == geometry.unit}
        for name, before in zip(keys, [parent, *keys[:-1]], strict=True):
            if parents.get(name, NO_PARENT) == NO_PARENT:
                parents[name] = before
        for start in parents:
            seen, at = set(), start
            while at in parents:
                if at in seen:
                    return True
                seen.add(at)
                at = parents[at]
        return False

    @rule(unit=st.sampled_from([KV.unit, OTHER.unit]), chain=st.lists(st.sampled_from(KEYS)))
    def touch(self, unit: bytes, chain: list[bytes]) -> None:
        now = self.now(unit) + len(chain)
        for i, name in enumerate(chain):
            if (unit, name) in self.units:
                self.use((unit, name), now - i)
        self.index.touch(unit, chain, FOREVER_S)

    @rule(geometry=st.sampled_from(GEOMETRIES), data=st.data())
    def remove(self, geometry: Geometry, data: st.DataObject) -> None:
        here = {n[1]: p for (n, gid), p in self.blocks.items() if gid == geometry.id_bytes}
        picked = data.draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
        pairs = []
        expected = []
        for name in picked:
            place = here.get(name)
            right = place is not None and data.draw(st.booleans())
            pairs.append((name, place.generation if right and place else 10**9))
            if right:
                expected.append(self.free((geometry.unit, name), geometry.id_bytes))
        assert self.index.remove(geometry, pairs, FOREVER_S) == expected

    @rule(
        need=st.integers(0, 6 * KV.slot_bytes),
        keep=st.none() | st.sampled_from(KEYS),
        prefer=st.none()
        | st.sets(st.tuples(st.sampled_from([g.id_bytes for g in GEOMETRIES]), st.integers(0, 3))),
        models=st.none() | st.sets(st.sampled_from([KV.unit, OTHER.unit])),
    )
    def evict(
        self,
        need: int,
        keep: bytes | None,
        prefer: set[tuple[bytes, int]] | None,
        models: set[bytes] | None,
    ) -> None:
        kept = None
        if keep is not None and (models is None or KV.unit in models):
            kept = (KV.unit, keep)
        expected: list[Freed] = []
        if kept is None or kept in self.units:
            expected = self.evicted(need, kept, prefer, models)
            if not expected and prefer is not None:
                expected = self.evicted(need, kept, None, models)
        found = self.index.evict(SIZES, need, FOREVER_S, keep=kept, prefer=prefer, models=models)
        assert found == expected

    def evicted(
        self,
        need: int,
        kept: UnitKey | None,
        prefer: set[tuple[bytes, int]] | None,
        models: set[bytes] | None,
    ) -> list[Freed]:
        freed: list[Freed] = []
        got, at = 0, 0
        passes = max(2, len(self.looked_at(models)) // 4)
        while got < need:
            chosen = None
            for name in self.leaves():
                if name == kept or self.units[name].used < at:
                    continue
                if models is not None and name[0] not in models:
                    continue
                homes = {(gid, p.segment) for (n, gid), p in self.blocks.items() if n == name}
                if prefer is None or homes & prefer:
                    chosen = name
                    break
                passes -= 1
                if passes < 0:
                    break
            if chosen is None:
                break
            at = self.units[chosen].used
            for row in self.free_unit(chosen):
                freed.append(row)
                got += SIZES[row.geometry_id]
        return freed

    @rule(geometry=st.sampled_from(GEOMETRIES), segment=st.integers(0, 3))
    def evict_segment(self, geometry: Geometry, segment: int) -> None:
        doomed = {
            name
            for (name, gid), place in self.blocks.items()
            if gid == geometry.id_bytes and place.segment == segment
        }
        before = None
        while before != doomed:
            before = set(doomed)
            doomed |= {n for n, u in self.units.items() if (n[0], u.parent) in doomed}
        self.wanted.add((geometry.id_bytes, segment))
        freed = self.index.evict_segment(geometry.id_bytes, segment, FOREVER_S)
        rows = [(name, gid) for name, gid in self.blocks if name in doomed]
        assert len(freed) == len(rows)
        # In which order they go decides what their parents inherit: follow the index.
        by_place = {(gid, p.segment, p.slot): n for (n, gid), p in self.blocks.items()}
        for row in freed:
            name = by_place[row.geometry_id, row.slot.segment, row.slot.slot]
            assert name in doomed
            assert self.free(name, row.geometry_id) == row

    @rule(geometry=st.sampled_from(GEOMETRIES), segments=st.sets(st.integers(0, 3)))
    def drop_segments(self, geometry: Geometry, segments: set[int]) -> None:
        gone = sorted(
            name
            for (name, gid), place in self.blocks.items()
            if gid == geometry.id_bytes and place.segment in segments
        )
        expected = [self.free(name, geometry.id_bytes) for name in gone]
        assert self.index.drop_segments(geometry, segments, FOREVER_S) == expected

    @rule(geometry=st.sampled_from(GEOMETRIES))
    def clear(self, geometry: Geometry) -> None:
        all_of_it = sorted(name for name, gid in self.blocks if gid == geometry.id_bytes)
        expected = [self.free(name, geometry.id_bytes) for name in all_of_it]
        assert self.index.clear(geometry, FOREVER_S) == expected

    @rule(data=st.data())
    def forget_freed(self, data: st.DataObject) -> None:
        rows = [Freed(gid, slot, generation) for (gid, slot), generation in self.freed.items()]
        picked = data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
        stale = [Freed(row.geometry_id, row.slot, row.generation + 1) for row in rows[:2]]
        self.index.forget_freed([*picked, *stale], FOREVER_S)
        for row in picked:
            del self.freed[row.geometry_id, row.slot]

    @rule(geometry=st.sampled_from(GEOMETRIES), segments=st.sets(st.integers(0, 3)))
    def forget_segments(self, geometry: Geometry, segments: set[int]) -> None:
        self.index.forget_segments(geometry.id_bytes, segments, FOREVER_S)
        self.freed = {
            (gid, slot): generation
            for (gid, slot), generation in self.freed.items()
            if gid != geometry.id_bytes or slot.segment not in segments
        }
        self.wanted -= {(geometry.id_bytes, segment) for segment in segments}

    @rule(us=st.integers(-500, 500))
    def let_time_pass_or_set_the_clock_back(self, us: int) -> None:
        self.clock = max(1, self.clock + us)

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.index = self.open()

    # -- what must hold ---------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        rows = {
            ((e.unit, e.key), e.geometry_id): (e.placement, e.last_used_us, e.parent)
            for e in self.index.entries()
        }
        assert rows == {
            (name, gid): (place, self.units[name].used, self.units[name].parent)
            for (name, gid), place in self.blocks.items()
        }
        counts: dict[bytes, int] = {}
        for geometry in GEOMETRIES:
            here = [self.blocks.get(((geometry.unit, k), geometry.id_bytes)) for k in KEYS]
            assert self.index.lookup(geometry, KEYS) == here
            run = next((i for i, place in enumerate(here) if place is None), len(here))
            assert self.index.prefix(geometry, KEYS) == run
            if any(here):
                counts[geometry.id_bytes] = sum(place is not None for place in here)
            for name in KEYS:
                assert self.index.present(geometry.unit, name) == (
                    (geometry.unit, name) in self.units
                )
            freed = {
                (row.geometry_id, row.slot): row.generation
                for row in self.index.freed(geometry, range(4))
            }
            assert freed == {k: g for k, g in self.freed.items() if k[0] == geometry.id_bytes}
            wanted = {segment for gid, segment in self.wanted if gid == geometry.id_bytes}
            assert set(self.index.wanted(geometry)) == wanted
        assert self.index.counts() == counts
        uses: dict[tuple[bytes, int], int] = {}
        for (name, gid), place in self.blocks.items():
            at = (gid, place.segment)
            uses[at] = max(uses.get(at, 0), self.units[name].used)
        assert self.index.segment_uses() == uses


class EmbeddedModel(Model):
    def set_up(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="dualpath-index-"))
        self.patch.callback(shutil.rmtree, self.directory)
        clock = mock.patch.object(embedded.time, "time_ns", lambda: self.clock * 1000)
        self.patch.enter_context(clock)

    def open(self) -> Index:
        return EmbeddedIndex(self.directory / "index.lmdb")


class RedisModel(Model):
    server: ClassVar[RedisServer]

    def set_up(self) -> None:
        self.store = secrets.token_hex(8)
        clock = mock.patch.object(RedisIndex, "_now", lambda _: self.clock)
        self.patch.enter_context(clock)
        self.patch.enter_context(mock.patch.object(evicting, "_SLACK_US", 0))

    def open(self) -> Index:
        settings = RedisSettings.parse(self.server.url)
        return open_redis_index(settings, self.store, lookup_timeout_s=FOREVER_S)

    def ordered_with(self, unit: bytes) -> list[UnitKey]:
        return [name for name in self.leaves() if name[0] == unit]

    def looked_at(self, models: set[bytes] | None) -> list[UnitKey]:
        return [name for name in self.leaves() if models is None or name[0] in models]


_SETTINGS = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.timeout(300)
def test_the_embedded_index_agrees_with_the_model() -> None:
    run_state_machine_as_test(EmbeddedModel, settings=_SETTINGS)


@pytest.mark.timeout(300)
def test_the_redis_index_agrees_with_the_model(redis_server: RedisServer) -> None:
    RedisModel.server = redis_server
    run_state_machine_as_test(RedisModel, settings=_SETTINGS)
