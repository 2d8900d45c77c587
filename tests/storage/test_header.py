"""The header page: what it says is what was written, and nothing else passes."""

from __future__ import annotations

import random
import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dualpath_storage import header as headers
from dualpath_storage.geometry import MAX_LAYERS
from dualpath_storage.header import HEADER_BYTES, Header
from tests.support.blocks import geometry, key


def page_of(layers: int = 6, generation: int = 9, seed: int = 0) -> tuple[bytearray, list[int]]:
    sums = [random.Random(seed + i).getrandbits(64) for i in range(layers)]
    page = bytearray(HEADER_BYTES)
    headers.encode_into(
        memoryview(page), geometry(layers=layers), key("k"), key("p"), generation, sums
    )
    return page, sums


@given(st.integers(1, MAX_LAYERS), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_a_header_says_what_was_written(layers: int, generation: int, seed: int) -> None:
    page, sums = page_of(layers, generation, seed)
    of = geometry(layers=layers)
    assert headers.decode(memoryview(page)) == Header(
        of.id_bytes, key("k"), key("p"), generation, of.block_bytes, tuple(sums)
    )


def test_no_flipped_bit_passes() -> None:
    page, _ = page_of()
    for position in range(HEADER_BYTES):
        bit = 1 << (position % 8)
        page[position] ^= bit
        assert headers.decode(memoryview(page)) is None, position
        page[position] ^= bit
    assert headers.decode(memoryview(page)) is not None


def test_no_torn_page_passes() -> None:
    old, _ = page_of(generation=1, seed=1)
    new, _ = page_of(generation=2, seed=2)
    for sectors in range(1, 8):
        torn = new[: sectors * 512] + old[sectors * 512 :]
        assert headers.decode(memoryview(torn)) is None


def test_an_empty_page_is_no_header() -> None:
    assert headers.decode(memoryview(bytes(HEADER_BYTES))) is None
    assert headers.decode(memoryview(headers.EMPTY_HEADER)) is None


@given(st.integers(0, 2**32), st.booleans())
def test_garbage_is_no_header(seed: int, magic: bool) -> None:
    page = random.Random(seed).randbytes(HEADER_BYTES)
    if magic:
        page = headers.MAGIC + page[len(headers.MAGIC) :]
    assert headers.decode(memoryview(page)) is None


def sealed(page: bytearray) -> memoryview:
    struct.pack_into("<Q", page, 4088, xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    return memoryview(page)


def test_a_rightly_summed_header_of_another_format_is_refused() -> None:
    for version, layers in ((2, 6), (0, 6), (1, 0), (1, MAX_LAYERS + 1), (1, 2**32 - 1)):
        page, _ = page_of()
        struct.pack_into("<II", page, 8, version, layers)
        assert headers.decode(sealed(page)) is None


def test_the_rest_of_a_page_is_zero_whatever_stood_there() -> None:
    page = bytearray(b"\xff" * HEADER_BYTES)
    headers.encode_into(memoryview(page), geometry(), key("k"), key("p"), 1, [1] * 6)
    assert not any(page[112:128])
    assert not any(page[128 + 6 * 8 : 4088])


def test_checksums_do_not_depend_on_how_a_layer_is_cut() -> None:
    data = random.Random(1).randbytes(4 * 96)
    view = memoryview(data)
    whole = headers.layer_checksums([view[i : i + 96] for i in range(0, 384, 96)], 4)
    halves = headers.layer_checksums([view[i : i + 48] for i in range(0, 384, 48)], 4)
    odd = [view[i + a : i + b] for i in range(0, 384, 96) for a, b in ((0, 1), (1, 90), (90, 96))]
    assert whole == halves == headers.layer_checksums(odd, 4)
    assert whole == [xxhash.xxh3_64_intdigest(data[i : i + 96]) for i in range(0, 384, 96)]


def test_layers_in_another_order_have_other_checksums() -> None:
    a, b = memoryview(b"a" * 64), memoryview(b"b" * 64)
    assert headers.layer_checksums([a, b], 2) != headers.layer_checksums([b, a], 2)
