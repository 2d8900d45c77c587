"""Sizes as people write them."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

_BYTES: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_FORM = re.compile(r"[0-9]+|[0-9]+(\.[0-9]+)?\s*[A-Za-z]+")


def parse_size(value: object) -> int:
    """Bytes from a number or a text such as ``64MiB``.

    Raises:
        ValueError: it is something else; half a text never counts for the whole.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a size is a number of bytes or a text")
    if isinstance(value, str):
        value = value.strip()
        if not _FORM.fullmatch(value):
            raise ValueError("a size is a number and a unit")
    elif value != int(value):
        raise ValueError("there are no fractions of a byte")
    return int(_BYTES.validate_python(value))
