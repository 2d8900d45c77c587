"""Faults and a trace inside a server in streaming mode, switched from the test at any time.

`Server(..., env=Faults(folder).env)` loads this module into the server's processes. A fault is on
while a file of its name is in the folder; its content is the value:

| name | value | effect |
|---|---|---|
| read_delay | seconds | every read of a hit sleeps first |
| read_rate | bytes a second | reads of hits share this bandwidth |
| hang | - | every read of a hit blocks until the file is gone |
| no_wait | - | attention does not wait for layers (negative control) |
| dead_reader | - | the worker that reads dies, once |
| dead_streamer | - | the thread that lands and announces fails in its next step, once |
| lookup_delay | seconds | the index takes so long for a lookup |
| no_scrub | - | blocks beside a damaged one are not checked |

`trace.jsonl` gets a line for every layer that is read, announced, or waited for.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "SGLANG_CPU_FAULTS"


class Faults:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._read = 0

    @property
    def env(self) -> dict[str, str]:
        return {
            FOLDER: str(self.folder),
            "SGLANG_CPU_TEST_HOOKS": "tests.support.server_faults:install",
        }

    def on(self, name: str, value: object = "") -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(str(value))
        temporary.rename(self.folder / name)

    def off(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def is_on(self, name: str) -> bool:
        return (self.folder / name).exists()

    def clear(self) -> None:
        """No fault, and an empty trace."""
        for file in self.folder.iterdir():
            if file.name != "trace.jsonl":
                file.unlink()
        self.trace()

    def trace(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        file = self.folder / "trace.jsonl"
        if not file.exists():
            return []
        with file.open() as lines:
            lines.seek(self._read)
            events = [json.loads(line) for line in lines]
            self._read = lines.tell()
        return events


class _Switches:
    """The server's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_for_bandwidth(self, size_bytes: int) -> None:
        """Sleep until a store of the rate ``read_rate`` has read so many bytes more."""
        rate = self.get("read_rate")
        if rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / float(rate)
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))

    def get(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def take(self, name: str) -> bool:
        """Whether it is on; it is off then."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def trace(self, event: str, **fields: Any) -> None:
        line = json.dumps({"t": time.monotonic(), "pid": os.getpid(), "event": event, **fields})
        with (self._folder / "trace.jsonl").open("a") as file:
            file.write(line + "\n")


def install() -> None:
    """Called in every process of the server."""
    from dualpath_sglang import kvcache, layer_counter, scrubber
    from dualpath_sglang.streaming import reads, streamer

    switches = _Switches(Path(os.environ[FOLDER]))
    _wrap(reads.Read, "run", _around_read(switches))
    _wrap(layer_counter.LayerCounter, "announce", _around_announce(switches))
    _wrap(layer_counter.LayerCounter, "wait_until", _around_wait(switches))
    _wrap(streamer.LayerStreamer, "_step", _around_step(switches))
    _wrap(kvcache.KVCache, "locate", _around_locate(switches))
    _wrap(scrubber.Scrubber, "suspect", _around_suspect(switches))


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **kw: around(original, self, *args, **kw))


def _around_read(switches: _Switches) -> Callable[..., Any]:
    def run(original: Callable[..., Any], read: Any, *args: Any) -> Any:
        if switches.take("dead_reader"):
            raise SystemExit("a fault of the test")
        time.sleep(float(switches.get("read_delay") or 0))
        switches.wait_for_bandwidth(read.payload_bytes)
        while switches.get("hang") is not None:
            time.sleep(0.01)
        result = original(read, *args)
        for layer in range(read.first_layer, read.end_layer):
            switches.trace("read", layer=layer, pool=read.part.load.pool.geometry.pool)
        return result

    return run


def _around_announce(switches: _Switches) -> Callable[..., Any]:
    def announce(original: Callable[..., Any], counter: Any, index: int, *rest: Any) -> None:
        switches.trace("announced", index=index, layer=rest[0])
        original(counter, index, *rest)

    return announce


def _around_wait(switches: _Switches) -> Callable[..., Any]:
    def wait(original: Callable[..., Any], counter: Any, layer: int) -> Any:
        if counter.consumer_index >= 0:
            switches.trace("reached", index=counter.consumer_index, layer=layer)
            if switches.get("no_wait") is not None:
                return None
        return original(counter, layer)

    return wait


def _around_step(switches: _Switches) -> Callable[..., Any]:
    def step(original: Callable[..., Any], streamer: Any) -> Any:
        if streamer._batches and switches.take("dead_streamer"):
            raise RuntimeError("a fault of the test")
        return original(streamer)

    return step


def _around_locate(switches: _Switches) -> Callable[..., Any]:
    def locate(original: Callable[..., Any], cache: Any, *args: Any) -> Any:
        if threading.current_thread().name == "dualpath-lookup":
            time.sleep(float(switches.get("lookup_delay") or 0))
        return original(cache, *args)

    return locate


def _around_suspect(switches: _Switches) -> Callable[..., Any]:
    def suspect(original: Callable[..., Any], watch: Any, *args: Any) -> None:
        if switches.get("no_scrub") is None:
            original(watch, *args)

    return suspect
