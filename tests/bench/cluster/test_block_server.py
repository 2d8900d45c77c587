"""The storage host of the bench: bytes, errors, a server that is killed, one that hangs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster.block_server import HEAD, READ, BlockServer
from bench.cluster.remote import Link, RemoteBackend
from dualpath_sglang.kvcache import KVCache
from tests.kvcache.caches import STORED, options, read, write
from tests.support.blocks import chain, geometry

NAME = f"{'ab' * 16}/seg-00000001"
DATA = bytes(range(256)) * 4096
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.parent.mkdir()
    path.write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(root: Path) -> Iterator[BlockServer]:
    server = BlockServer(root)
    yield server
    server.close()


@pytest.fixture
def link(server: BlockServer) -> Iterator[Link]:
    link = Link(("127.0.0.1", server.port), timeout_s=30.0)
    yield link
    link.close()


def blank(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("sizes", [(1,), (4096,), (1 << 20,), (1, 4095, 100_000), (7,) * 3000])
def test_ranges_fill_the_buffers_in_turn(link: Link, sizes: tuple[int, ...]) -> None:
    for offset in (0, 1, 12_345):
        buffers = blank(*sizes)
        wanted = DATA[offset : offset + sum(sizes)]
        assert link.read(NAME, offset, buffers) == len(wanted)
        assert b"".join(buffers)[: len(wanted)] == wanted
    assert link.read(NAME, len(DATA) - 5, blank(10, 10)) == 5
    assert link.read(NAME, len(DATA) + 5, blank(10)) == 0


def test_bytes_that_are_written_are_in_the_file(link: Link, root: Path) -> None:
    parts = [memoryview(os.urandom(size)) for size in (3, 100_000, *(5,) * 1500)]
    size = sum(map(len, parts))
    assert link.write(NAME, 77, parts) == size
    assert (root / NAME).read_bytes()[77 : 77 + size] == b"".join(parts)
    (after,) = blank(size)
    assert link.read(NAME, 77, [after]) == size
    assert after == b"".join(parts)


def test_errors_come_with_their_number_and_the_connection_goes_on(link: Link, root: Path) -> None:
    for _ in range(5):
        with pytest.raises(FileNotFoundError):
            link.read(f"{'cd' * 16}/seg-00000001", 0, blank(10))
        with pytest.raises(FileNotFoundError):
            link.write(f"{'cd' * 16}/seg-00000001", 0, blank(3_000_000))
        for bad in ("../x", "/etc/passwd", f"{'ab' * 16}/../{NAME}"):
            with pytest.raises(OSError, match="the block server said so") as caught:
                link.read(bad, 0, blank(10))
            assert caught.value.errno == errno.EINVAL
        assert link.read(NAME, 0, blank(10)) == 10
    assert len(link._idle) == 1
    (root / NAME).unlink()
    with pytest.raises(FileNotFoundError):
        link.read(NAME, 0, blank(10))


def test_many_threads_share_a_few_connections(link: Link) -> None:
    failed: list[object] = []

    def use(number: int) -> None:
        for i in range(100):
            offset = (7919 * (number + i)) % len(DATA)
            (buffer,) = blank(5000)
            got = link.read(NAME, offset, [buffer])
            if buffer[:got] != DATA[offset : offset + 5000]:
                failed.append((number, i))

    threads = [threading.Thread(target=use, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(link._idle) <= 4


def test_nonsense_ends_the_connection_and_nothing_else(server: BlockServer, link: Link) -> None:
    for head in (HEAD.pack(9, b"x", 0, 1), HEAD.pack(READ, NAME.encode(), 0, 1 << 60)):
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            sock.sendall(head)
            assert sock.recv(1) == b""
    assert link.read(NAME, 0, blank(10)) == 10


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(listener.getsockname(), connections=1, timeout_s=0.3)
        for _ in range(2):
            with pytest.raises(OSError, match="late") as caught:
                link.read(NAME, 0, blank(10))
            assert caught.value.errno == errno.ETIMEDOUT


def started(root: Path, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    argv = [sys.executable, "-m", "bench.cluster.block_server", str(root), "127.0.0.1", str(port)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_cache_over_the_network_survives_a_killed_server(tmp_path: Path) -> None:
    process, port = started(tmp_path)
    link = Link(("127.0.0.1", port), timeout_s=30.0)
    try:
        with KVCache(options(tmp_path), RemoteBackend(tmp_path, link)) as cache:
            pool = cache.attach(geometry("mha"))
            names = chain("remote", 40)
            assert set(write(pool, cache, names)) == {STORED}
            assert all(read(pool, cache, names))  # compares every byte
            assert all(read(pool, cache, names, layers=(2, 4)))
            assert link.read_bytes > len(names) * pool.geometry.block_bytes
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not any(read(pool, cache, names))
            assert all(cache.lookup(pool, names)), "an absent server says nothing about blocks"
            process, _ = started(tmp_path, port)
            assert all(read(pool, cache, names))
    finally:
        process.kill()
        process.wait()
        link.close()


def test_bytes_that_changed_in_the_store_are_no_hit(tmp_path: Path) -> None:
    server = BlockServer(tmp_path)
    link = Link(("127.0.0.1", server.port), timeout_s=30.0)
    with KVCache(options(tmp_path), RemoteBackend(tmp_path, link)) as cache:
        pool = cache.attach(geometry("mha"))
        names = chain("remote", 8)
        write(pool, cache, names)
        (path,) = tmp_path.glob("*/seg-*")
        (place,) = cache.locate(pool, [names[3]])
        assert place is not None
        with path.open("r+b") as file:
            file.seek(place.slot * pool.geometry.slot_bytes + 5000)
            file.write(b"not what was there")
        assert read(pool, cache, names) == [i != 3 for i in range(8)]
    link.close()
    server.close()
