"""Whether Layer Blocks that came are what their checksums say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from dualpath_storage.header import layer_checksums

_BITE_BYTES = 64 << 10
"""Above it xxhash lets go of the interpreter, and to get it back can take milliseconds."""


def bad_layer_blocks(
    views: Sequence[memoryview], layer_bytes: int, checksums: Sequence[int]
) -> list[int]:
    """Positions of the Layer Blocks whose bytes do not match; every other one was looked at.

    Best called as soon as the bytes have come, while they are in the processor's cache.

    Args:
        views: the bytes of the Layer Blocks, in order; a view may hold several, or a part of one.
        layer_bytes: of each.
        checksums: xxh3-64 of each.

    Raises:
        ValueError: the views are not as many bytes as that.
    """
    if sum(map(len, views)) != len(checksums) * layer_bytes:
        raise ValueError(f"these are not the bytes of {len(checksums)} Layer Blocks")
    digest = xxhash.xxh3_64_intdigest
    if not checksums:
        return []
    size = len(views[0])
    if size and layer_bytes % size == 0 and all(len(view) == size for view in views):
        found = layer_checksums(views, len(checksums))
    elif layer_bytes > _BITE_BYTES or any(len(view) % layer_bytes for view in views):
        found = [sum_ for parts in _cut(views, layer_bytes) for sum_ in layer_checksums(parts, 1)]
    else:
        found = [
            digest(view[at : at + layer_bytes])
            for view in views
            for at in range(0, len(view), layer_bytes)
        ]
    if found == list(checksums):
        return []
    return [i for i, (a, b) in enumerate(zip(found, checksums, strict=True)) if a != b]


def _cut(views: Sequence[memoryview], layer_bytes: int) -> Iterator[list[memoryview]]:
    """The parts of each Layer Block."""
    parts: list[memoryview] = []
    need = layer_bytes
    for view in views:
        while len(view):
            part = view[:need]
            parts.append(part)
            need -= len(part)
            view = view[len(part) :]
            if need == 0:
                yield parts
                parts, need = [], layer_bytes
