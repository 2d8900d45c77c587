"""Geometries: what makes blocks interchangeable, and the file that says so."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath_storage import Geometry, StoreError, key_bytes, pieces_of
from dualpath_storage.geometry import MAX_LAYERS
from tests.support.blocks import geometry

OTHER = {
    "model": "other",
    "weights": "1",
    "pool": "indexer",
    "dtype": "float8_e4m3fn",
    "page_tokens": 32,
    "layers": 7,
    "layer_bytes": 8193,
    "form": "mla [token,dim=576]",
    "shard": "tp0/2",
    "namespace": "tenant",
}


def test_every_field_changes_the_id() -> None:
    names = {f.name for f in fields(Geometry) if f.init}
    assert names == set(OTHER), "a new field: add another value of it to this test"
    ids = {geometry().id, *(geometry(**{name: value}).id for name, value in OTHER.items())}
    assert len(ids) == len(OTHER) + 1


def test_fields_cannot_run_into_each_other() -> None:
    assert geometry(model="a", weights="bc").id != geometry(model="ab", weights="c").id
    assert geometry(model='a","b', weights="c").id != geometry(model="a", weights='b","c').id


@pytest.mark.parametrize("name", ["pool", "dtype", "layers", "layer_bytes", "form", "shard"])
def test_pools_and_shards_of_a_page_are_one_unit(name: str) -> None:
    assert geometry(**{name: OTHER[name]}).unit == geometry().unit


@pytest.mark.parametrize("name", ["namespace", "model", "weights", "page_tokens"])
def test_other_pages_are_other_units(name: str) -> None:
    assert geometry(**{name: OTHER[name]}).unit != geometry().unit


text = st.text(min_size=1, max_size=40)


@given(text, text, text, text, text, text, st.text(max_size=20), st.integers(1, 1 << 20))
def test_its_file_gives_back_every_field(
    model: str, weights: str, pool: str, dtype: str, form: str, name: str, shard: str, size: int
) -> None:
    before = Geometry(model, weights, pool, dtype, 64, 4, size, form, shard, name)
    after = Geometry.from_json(before.to_json())
    assert after == before
    assert (after.id, after.unit) == (before.id, before.unit)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        geometry().to_json().replace('"layers": 6', '"layers": "6"'),
        geometry().to_json().replace('"layers": 6', '"layers": 0'),
        geometry().to_json().replace('"pool": "kv"', '"pool": ""'),
        geometry().to_json()[:-20],
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_refused(damaged: str) -> None:
    with pytest.raises(StoreError):
        Geometry.from_json(damaged)


def test_a_field_of_another_type_is_refused_or_is_another_geometry() -> None:
    values = json.loads(geometry().to_json())
    for name in OTHER:
        for odd in (None, 1.5, [], {}, True, "x", 3):
            try:
                read = Geometry.from_json(json.dumps({**values, name: odd}))
            except StoreError:
                continue
            assert read.id != geometry().id or read == geometry()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        {"weights": ""},
        {"pool": ""},
        {"namespace": ""},
        {"layers": 0},
        {"layers": MAX_LAYERS + 1},
        {"layer_bytes": 0},
        {"page_tokens": 0},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(StoreError):
        geometry(**changes)


@given(st.integers(1, MAX_LAYERS), st.integers(1, 100_000))
def test_a_slot_is_a_page_and_the_padded_payload(layers: int, layer_bytes: int) -> None:
    of = geometry(layers=layers, layer_bytes=layer_bytes)
    assert of.block_bytes == layers * layer_bytes
    assert of.slot_bytes % 4096 == 0
    assert of.block_bytes + 4096 <= of.slot_bytes < of.block_bytes + 2 * 4096


def test_a_contiguous_block_is_cut_into_its_layers() -> None:
    of = geometry("mla")
    buffer = bytearray(of.block_bytes + 10)
    pieces = pieces_of(memoryview(buffer), of)
    assert [len(piece) for piece in pieces] == [of.layer_bytes] * of.layers
    pieces[1][0] = 7
    assert buffer[of.layer_bytes] == 7


def test_hex_names_are_taken_as_they_are_and_others_hashed() -> None:
    digits = "0123456789abcdef" * 4
    assert key_bytes(digits) == bytes.fromhex(digits)
    assert key_bytes(digits.upper()) == bytes.fromhex(digits)
    for odd in ("", "abc", digits + "00", "g" * 64, "é" * 64, "\ud800", " " * 64):
        assert len(key_bytes(odd)) == 32
        assert key_bytes(odd) == key_bytes(odd)
    assert len({key_bytes(odd) for odd in ("", "abc", digits, digits + "00")}) == 4


def test_white_space_in_a_name_is_no_hex() -> None:
    digits = "0123456789abcdef" * 4
    spaced = " " + digits[:62] + " "
    assert len(spaced) == 64
    assert len(key_bytes(spaced)) == 32


def test_equal_fields_are_equal_geometries() -> None:
    assert replace(geometry()) == geometry()
    assert hash(replace(geometry())) == hash(geometry())
