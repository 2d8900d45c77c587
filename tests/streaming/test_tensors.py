"""Landing in an engine's tensors: the code of a CUDA device, on CPU tensors."""

from __future__ import annotations

import random

import pytest
import torch

from dualpath_sglang.streaming.landing import Staged
from dualpath_sglang.streaming.load import LoadRequest, PoolLoad
from dualpath_sglang.streaming.tensors import DeviceCopier, TensorLanding
from dualpath_storage import Geometry
from dualpath_storage.memory import aligned
from dualpath_storage.ranges import RangeShape
from tests.streaming.bed import Bed, block_bytes, chain, geometry

TOKENS, PAGES = 4, 9
CPU = torch.device("cpu")


def copiers() -> list[DeviceCopier | None]:
    return [None, DeviceCopier(CPU, 1 << 16), DeviceCopier(CPU, 16)]


def mha(layers: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    return [
        [torch.zeros(PAGES * TOKENS + 1, 2, 40, dtype=dtype) for _ in range(2)]
        for _ in range(layers)
    ]


def mla(layers: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    return [[torch.zeros(PAGES * TOKENS, 1, 36, dtype=dtype)] for _ in range(layers)]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def page(layers: list[list[torch.Tensor]], number: int, rows: int) -> bytes:
    """A page as a Full Block."""
    span = slice(number * rows, (number + 1) * rows)
    return b"".join(raw(tensor[span]) for layer in layers for tensor in layer)


@pytest.mark.parametrize("copier", copiers(), ids=["memory", "copied", "copied, growing"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("pool_of", [mha, mla])
def test_blocks_land_in_their_pages(
    bed: Bed, pool_of: object, dtype: torch.dtype, copier: DeviceCopier | None
) -> None:
    layers = pool_of(5, dtype)  # type: ignore[operator]
    landing = TensorLanding(layers, page_rows=TOKENS, copier=copier)
    assert landing.pages == PAGES and len(set(landing.layer_bytes)) == 1
    pool = bed.cache.attach(geometry(layers=5, layer_bytes=landing.layer_bytes[0]))
    keys = chain(1, 6)
    bed.write(pool, keys)
    numbers = [8, 0, 3, 5, 1, 2]
    part = PoolLoad(pool, landing, keys, numbers, range(5))
    fences: list[object] = []
    load = bed.streamer.start(
        [LoadRequest("a", [part], after=object())],
        layers=5,
        deadline=load_deadline(),
        on_layer=lambda layer, found: fences.append(found),
    )
    assert load.wait(20)["a"].ok
    for key, number in zip(keys, numbers, strict=True):
        assert page(layers, number, TOKENS) == block_bytes(pool, key)
    for number in set(range(PAGES)) - set(numbers):
        assert set(page(layers, number, TOKENS)) == {0}
    assert all(len(found) == (copier is not None) for found in fences)  # type: ignore[arg-type]


def load_deadline() -> float:
    import time

    return time.monotonic() + 20


def test_rows_may_lie_apart_and_begin_anywhere_when_a_row_is_a_page() -> None:
    whole = torch.zeros(6, 3, 7, dtype=torch.int16)
    layers = [[whole[1:, i]] for i in range(3)]
    landing = TensorLanding(layers, page_rows=1)
    assert landing.pages == 5 and landing.layer_bytes == (14, 14, 14)
    shape = RangeShape(shape_geometry(3, 14), 1, 3, header=False)
    area = aligned(2 * shape.stride)
    data = random.Random(1).randbytes(56)
    for block in range(2):
        for layer in (1, 2):
            begin = (2 * block + layer - 1) * 14
            shape.layer(area, block, layer)[:] = data[begin : begin + 14]
    landing.target([4, 2]).land(Staged(area, shape, 0, 2))
    assert raw(whole[5, 1:]) == data[:28] and raw(whole[3, 1:]) == data[28:]
    assert int(whole[:, 0].abs().sum()) == 0 and int(whole[[0, 1, 2, 4]].abs().sum()) == 0


def shape_geometry(layers: int, layer_bytes: int) -> Geometry:
    return geometry(layers=layers, layer_bytes=layer_bytes)


def test_only_the_blocks_of_the_piece_are_written() -> None:
    layers = mla(2, torch.float32)
    landing = TensorLanding(layers, page_rows=TOKENS, copier=DeviceCopier(CPU, 1 << 16))
    g = shape_geometry(2, landing.layer_bytes[0])
    shape = RangeShape(g, 0, 1, header=True)
    area = aligned(shape.stride)
    shape.layer(area, 0, 0)[:] = b"\x07" * g.layer_bytes
    landed = landing.target([5, 6, 7]).land(Staged(area, shape, 1, 1))
    assert len(landed.layers) == 1 and landed.copied is not None
    for fence in (*landed.layers, landed.copied):
        fence.wait()
        fence.synchronize()
        assert fence.finished()
    assert set(page(layers[:1], 6, TOKENS)) == {7}
    assert all(set(page(layers, n, TOKENS)) == {0} for n in (5, 7))
    assert set(page(layers[1:], 6, TOKENS)) == {0}


@pytest.mark.parametrize(
    ("layers", "rows"),
    [
        ([], 1),
        ([[]], 1),
        ([[torch.zeros(4, 3, 2).transpose(1, 2)]], 1),  # rows in pieces
        ([[torch.zeros(4, 6)[:, :3]]], 2),  # rows of a page apart
        ([[torch.zeros(3, 2)]], 4),  # not one page
    ],
)
def test_tensors_that_are_no_pages_are_refused(layers: list[list[torch.Tensor]], rows: int) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        TensorLanding(layers, page_rows=rows)


def test_pages_that_are_not_there_are_refused() -> None:
    landing = TensorLanding(mla(1, torch.float32), page_rows=TOKENS)
    for pages in ([PAGES], [-1], [0, 99]):
        with pytest.raises(ValueError, match="pages"):
            landing.target(pages)
    assert landing.target([]) is not None
