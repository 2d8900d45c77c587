"""Put first on the path of a Python process, has its wall clock go wrong, by a file's seconds."""

from __future__ import annotations

import os
import time

_PATH = os.environ["WRONG_CLOCK"]
_right, _right_ns = time.time, time.time_ns


def _wrong_by() -> float:
    with open(_PATH) as file:
        return float(file.read() or 0.0)


def _time() -> float:
    return _right() + _wrong_by()


def _time_ns() -> int:
    return _right_ns() + int(1e9 * _wrong_by())


time.time, time.time_ns = _time, _time_ns
