"""What is sent when: earlier layers first, several at once, and never a wait for a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from dualpath_sglang.node import sending as module
from dualpath_sglang.node.block_cache import CachedBlock
from dualpath_sglang.node.landings import Landings
from dualpath_sglang.node.sending import Sending
from dualpath_sglang.transport.base import Missing, Piece, Span

LAYERS, SIZE = 8, 64
RANGES = [(0, 1), (1, 3), (3, 8)]
SOON_S = 20.0


class Bed:
    """Blocks whose bytes say whose they are, and what of them is sent."""

    def __init__(self, numbers: Sequence[int], timeout_s: float = SOON_S) -> None:
        self.memory = memoryview(bytearray(64 * LAYERS * SIZE))
        self.blocks: dict[int, CachedBlock] = {}
        self.changed, self.cancelled = threading.Event(), threading.Event()
        for place, number in enumerate(reversed(numbers)):
            offset = place * LAYERS * SIZE
            image = self.memory[offset : offset + LAYERS * SIZE]
            block = CachedBlock((b"", bytes([number])), image, offset, LAYERS, Landings())
            for layer in range(LAYERS):
                image[layer * SIZE : (layer + 1) * SIZE] = bytes([number, layer] * (SIZE // 2))
                block.checksums[layer] = 1000 * number + layer
            self.blocks[number] = block
        self.blocks = dict(sorted(self.blocks.items()))
        deadline = time.monotonic() + timeout_s
        self.sending = iter(
            Sending(
                self.memory,
                SIZE,
                self.blocks,
                RANGES,
                deadline,
                self.changed,
                self.cancelled.is_set,
            )
        )

    def land(self, numbers: Sequence[int], layers: int) -> None:
        for number in numbers:
            self.blocks[number].landed = layers
        self.changed.set()

    def fail(self, number: int, *, missing: bool) -> None:
        self.blocks[number].missing = missing
        self.blocks[number].failed = True
        self.changed.set()

    def next(self) -> Span:
        part = next(self.sending)
        assert isinstance(part, Piece)
        return self.right(part)

    def rest(self) -> list[Span | tuple[int, ...]]:
        return [
            tuple(part.blocks) if isinstance(part, Missing) else self.right(part)
            for part in self.sending
        ]

    def right(self, piece: Piece) -> Span:
        """The piece's span, once its bytes, places and checksums are what it says."""
        span, at = piece.span, iter(piece.checksums)
        pairs = zip(piece.buffers, piece.offsets, strict=True)
        for number, (buffer, offset) in enumerate(pairs, span.first):
            assert self.memory[offset : offset + len(buffer)] == buffer
            for i, layer in enumerate(range(span.first_layer, span.end_layer)):
                part = buffer[i * SIZE : (i + 1) * SIZE]
                assert part == bytes([number, layer] * (SIZE // 2))
                assert next(at) == 1000 * number + layer
        assert next(at, None) is None
        assert len(piece.buffers) == span.count
        return span


def test_what_is_all_there_goes_in_layers_that_grow_and_blocks_together() -> None:
    bed = Bed(range(6))
    bed.land(range(6), LAYERS)
    assert bed.rest() == [Span(0, 1, 0, 6), Span(1, 3, 0, 6), Span(3, 8, 0, 6)]


def test_a_piece_is_no_larger_than_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 10 * SIZE)
    bed = Bed(range(6))
    bed.land(range(6), LAYERS)
    spans = bed.rest()
    assert spans[:3] == [Span(0, 1, 0, 6), Span(1, 3, 0, 5), Span(1, 3, 5, 1)]
    assert spans[3:] == [Span(3, 8, at, 2) for at in (0, 2, 4)]


def test_only_neighbours_go_together() -> None:
    bed = Bed([0, 1, 3, 4])
    bed.land([0, 1, 3, 4], LAYERS)
    assert bed.rest()[:2] == [Span(0, 1, 0, 2), Span(0, 1, 3, 2)]


def test_no_layer_waits_for_a_later_one_nor_a_block_for_another() -> None:
    bed = Bed(range(4))
    bed.land([1, 2], 2)
    assert bed.next() == Span(0, 1, 1, 2)
    assert bed.next() == Span(1, 2, 1, 2), "all that is there, though the others have nothing yet"
    bed.land([0], LAYERS)
    bed.land([1, 2], 4)
    assert bed.next() == Span(0, 1, 0, 1), "the earliest layer first"
    assert bed.next() == Span(1, 3, 0, 1)
    assert bed.next() == Span(2, 3, 1, 2)
    assert bed.next() == Span(3, 8, 0, 1)
    assert bed.next() == Span(3, 4, 1, 2)
    threading.Timer(0.1, bed.land, [range(1, 4), LAYERS]).start()
    assert bed.rest() == [
        Span(0, 1, 3, 1),
        Span(1, 3, 3, 1),
        Span(4, 8, 1, 2),
        Span(3, 8, 3, 1),
    ]


def test_what_fails_is_missing_and_what_was_sent_of_it_stays_so() -> None:
    bed = Bed(range(3))
    bed.land([0, 1], 1)
    assert bed.next() == Span(0, 1, 0, 2)
    bed.fail(1, missing=True)
    bed.fail(2, missing=True)
    bed.land([0], LAYERS)
    parts = bed.rest()
    assert [part for part in parts if isinstance(part, tuple)] == [(2,), (1,)]
    assert [part for part in parts if isinstance(part, Span)] == [
        Span(1, 3, 0, 1),
        Span(3, 8, 0, 1),
    ]


def test_what_the_store_does_not_give_ends_it_late_after_all_others() -> None:
    bed = Bed(range(3))
    bed.land([0, 2], LAYERS)
    bed.fail(1, missing=False)
    seen: list[object] = []
    with pytest.raises(TimeoutError):
        for part in bed.sending:
            seen.append(part)
    assert len(seen) == 6


def test_it_ends_at_its_deadline_or_when_it_is_cancelled() -> None:
    bed = Bed(range(2), timeout_s=0.1)
    with pytest.raises(TimeoutError):
        bed.rest()
    bed = Bed(range(2))
    bed.land([0], LAYERS)
    assert bed.next() == Span(0, 1, 0, 1)

    def cancel() -> None:
        bed.cancelled.set()
        bed.changed.set()

    threading.Timer(0.1, cancel).start()
    assert bed.rest() == [Span(1, 3, 0, 1), Span(3, 8, 0, 1)]
