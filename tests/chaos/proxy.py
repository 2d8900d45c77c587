"""A process in front of an agent: passes bytes on, and does what it is told to them.

``python -m tests.chaos.proxy HOST PORT TARGET_PORT``. It says when it listens. Each line of its
standard input is a fault in place of the last one; it ends with the input:

| line | what |
|---|---|
| ``{}`` | everything passes |
| ``{"flip_every": n}`` | one random bit is flipped about every n bytes, either way |
| ``{"stop_after": n}`` | of each connection, from the agent, n bytes more pass and then nothing |
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
import threading
from typing import Any

_BUFFER = 1 << 16


class Proxy:
    """See the module."""

    def __init__(self, host: str, port: int, target: int) -> None:
        self._host, self._target = host, target
        self._fault: dict[str, int] = {}
        self._changed = threading.Condition()
        self._dice = random.Random(1)
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._listen, daemon=True).start()

    def set(self, fault: dict[str, int]) -> None:
        """From now on."""
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def _listen(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                agent = socket.create_connection((self._host, self._target), timeout=2.0)
            except OSError:
                client.close()
                continue
            agent.settimeout(None)
            for pair in ((client, agent, False), (agent, client, True)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, from_agent: bool) -> None:
        passed: dict[int, int] = {}
        with contextlib.suppress(OSError):
            while data := source.recv(_BUFFER):
                fault = self._fault
                if "flip_every" in fault:
                    data = self._flipped(data, fault["flip_every"])
                if "stop_after" in fault and from_agent:
                    already = passed.setdefault(id(fault), 0)
                    passed[id(fault)] += len(data)
                    left = max(0, fault["stop_after"] - already)
                    if left < len(data):
                        sink.sendall(data[:left])
                        data = data[left:]
                        self._wait_while(fault)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _flipped(self, data: bytes, every: int) -> bytes:
        hurt = bytearray(data)
        if self._dice.random() < len(data) / every:
            bit = self._dice.randrange(8 * len(data))
            hurt[bit // 8] ^= 1 << bit % 8
        return bytes(hurt)

    def _wait_while(self, fault: dict[str, int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not fault, 60.0)


def main() -> None:
    """Run until the standard input ends."""
    host, port, target = sys.argv[1:]
    proxy = Proxy(host, int(port), int(target))
    print("listens", flush=True)
    for line in sys.stdin:
        fault: dict[str, Any] = json.loads(line)
        proxy.set(fault)


if __name__ == "__main__":
    main()
