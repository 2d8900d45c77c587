"""The table of free slots, against a model of it."""

from __future__ import annotations

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dualpath_storage.slots import Slot, SlotTable


class Slots(RuleBasedStateMachine):
    """Every slot is taken, free, or being cleaned; a taken one has exactly one holder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.sizes: dict[int, int] = {}
        self.taken: dict[Slot, int] = {}
        self.dirty: set[Slot] = set()
        self.cleaning: set[Slot] = set()
        self.retired: set[int] = set()
        self.generation = 0
        self.past: list[tuple[Slot, int]] = []

    def slots(self) -> set[Slot]:
        return {Slot(n, i) for n, size in self.sizes.items() for i in range(size)}

    def free(self) -> set[Slot]:
        return self.slots() - set(self.taken) - self.cleaning

    @rule(number=st.integers(0, 5), size=st.integers(0, 7), data=st.data())
    def add(self, number: int, size: int, data: st.DataObject) -> None:
        if number in self.sizes:
            return
        kinds = data.draw(st.lists(st.sampled_from("ctd"), min_size=size, max_size=size))
        taken = {i: 1000 + i for i, kind in enumerate(kinds) if kind == "t"}
        dirty = [i for i, kind in enumerate(kinds) if kind == "d"]
        # Slots past the end, as an index may name them of a file that was cut short.
        self.table.add(number, size, {**taken, size + 3: 7}, [*dirty, size + 4])
        self.sizes[number] = size
        self.taken.update({Slot(number, i): g for i, g in taken.items()})
        self.dirty |= {Slot(number, i) for i in dirty}

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        self.generation += 1
        usable = {slot for slot in self.free() if slot.segment not in self.retired}
        got = self.table.take(count, self.generation)
        assert len(set(got)) == len(got) == min(count, len(usable))
        assert set(got) <= usable
        dirty = usable & self.dirty
        assert len(set(got) & dirty) == min(len(got), len(dirty)), "dirty ones go first"
        self.dirty -= set(got)
        self.taken.update(dict.fromkeys(got, self.generation))
        self.past += [(slot, self.generation) for slot in got]

    @rule(data=st.data(), dirty=st.booleans())
    def free_one(self, data: st.DataObject, dirty: bool) -> None:
        choices = [*self.taken.items(), *self.past[-20:], (Slot(0, 99), 1), (Slot(9, 0), 1)]
        slot, generation = data.draw(st.sampled_from(choices))
        held = self.taken.get(slot) == generation
        assert self.table.free(slot, generation, dirty=dirty) == held
        if held:
            del self.taken[slot]
            self.dirty |= {slot} if dirty else set()

    @rule(most=st.integers(1, 5))
    def begin_cleaning(self, most: int) -> None:
        got = self.table.begin_cleaning(most)
        assert len(set(got)) == len(got) == min(most, len(self.dirty))
        assert set(got) <= self.dirty
        self.dirty -= set(got)
        self.cleaning |= set(got)

    @rule(data=st.data(), dirty=st.booleans())
    def end_cleaning(self, data: st.DataObject, dirty: bool) -> None:
        if not self.cleaning:
            return
        some = data.draw(st.sets(st.sampled_from(sorted(self.cleaning, key=repr))))
        self.table.end_cleaning(some, dirty=dirty)
        self.cleaning -= some
        self.dirty |= some if dirty else set()

    @rule(number=st.integers(0, 5))
    def retire(self, number: int) -> None:
        self.table.retire(number)
        if number in self.sizes:
            self.retired.add(number)

    @rule(retired=st.booleans(), keep=st.integers(0, 2))
    def take_empty(self, retired: bool, keep: int) -> None:
        free = self.free()
        empty = [
            n for n, size in self.sizes.items() if all(Slot(n, i) in free for i in range(size))
        ]
        empty = [n for n in empty if not retired or n in self.retired]
        got = self.table.take_empty(retired=retired, keep=keep)
        assert set(got) <= set(empty)
        assert len(got) == max(0, len(empty) - keep)
        for number in got:
            self.forget(number)

    @rule(number=st.integers(0, 5))
    def drop(self, number: int) -> None:
        self.table.drop(number)
        if number in self.sizes:
            self.forget(number)

    def forget(self, number: int) -> None:
        del self.sizes[number]
        self.retired.discard(number)
        self.taken = {s: g for s, g in self.taken.items() if s.segment != number}
        self.dirty = {s for s in self.dirty if s.segment != number}
        self.cleaning = {s for s in self.cleaning if s.segment != number}

    @invariant()
    def agrees(self) -> None:
        assert set(self.table.owned()) == set(self.sizes)
        assert set(self.table.retired()) == self.retired
        assert self.table.taken() == self.taken
        assert self.table.dirty() == self.dirty
        assert self.table.free_count() == len(self.free())


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_neighbours_are_taken_together() -> None:
    table = SlotTable()
    table.add(1, 100, {3: 5})
    assert table.take(5, 1) == [Slot(1, i) for i in (0, 1, 2, 4, 5)]


def test_a_slot_that_is_being_blanked_cannot_be_freed_and_taken_meanwhile() -> None:
    table = SlotTable()
    table.add(1, 1, {0: 7})
    assert table.free(Slot(1, 0), 7, dirty=True)
    assert table.begin_cleaning(10) == [Slot(1, 0)]
    assert not table.free(Slot(1, 0), 7, dirty=True), "a late answer of the index"
    assert table.take(1, 8) == []
    table.end_cleaning([Slot(1, 0)], dirty=False)
    assert table.take(1, 9) == [Slot(1, 0)]


def test_threads_never_hold_the_same_slot() -> None:
    table = SlotTable()
    for number in range(3):
        table.add(number, 20, {})
    held: set[Slot] = set()
    wrong: list[Slot] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        for i in range(300):
            generation = seed * 1000 + i
            slots = table.take(1 + (seed + i) % 7, generation)
            with lock:
                wrong.extend(held.intersection(slots))
                held.update(slots)
            with lock:
                held.difference_update(slots)
            table.release([(slot, generation) for slot in slots], dirty=bool(i % 2))
            table.end_cleaning(table.begin_cleaning(3), dirty=False)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert table.free_count() == 60
