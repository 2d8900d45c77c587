"""Where the processes of one machine that use one store meet, and the one agent among them.

| file | what |
|---|---|
| ``agent.lock`` | its first byte is locked while an agent lives, its second while one is started |
| ``agent.json`` | what the agent tells the other processes, see :class:`AgentInfo` |
| ``agent.sock`` | where it serves readers of the machine, if it does |
| ``agent.log`` | of an agent that a server started; ``agent.err`` has its last words |
| ``queue`` | see :mod:`dualpath_sglang.node.machine_queue` |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dualpath_sglang.node import byte_locks
from dualpath_sglang.node.options import NodeError

_LIVES, _STARTS = 0, 1
_ASK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What an agent tells the other processes of its machine.

    Args:
        pid: its process, as it sees itself.
        name: of the machine.
        id: unique, new at each start; stands in its report as ``node_id`` too.
        host, port: where it listens for other nodes.
        socket: path of the Unix socket for readers of this machine; empty when there is none.
        version: of the package.
    """

    pid: int
    name: str
    id: str
    host: str
    port: int
    socket: str
    version: str


class AgentLock:
    """Held by the agent of a machine, or by who starts it, until it is closed or the process ends.

    Made by :meth:`MachineDir.lock` and :meth:`MachineDir.starting`.
    """

    def __init__(self, path: Path, fd: int, at: int) -> None:
        self._path = path
        self._fd = fd
        self._at = at
        byte_locks.close_in_children(self, AgentLock._leave)

    @property
    def stands(self) -> bool:
        """Whether others still see it: nobody has removed or replaced the file."""
        return _same_file(self._fd, self._path)

    def close(self) -> None:
        """Let others have it."""
        if self._fd >= 0:
            byte_locks.give_back(self._fd, self._at)
        self._leave()

    def _leave(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MachineDir:
    """The directory of one store on one machine. Made when it is not there. Thread-safe.

    Args:
        base: the directory of the machine and user.
        store: whatever identifies the store; two stores have two directories.

    Raises:
        NodeError: it cannot be made, belongs to somebody else, or others may write to it.
    """

    def __init__(self, base: Path, store: str) -> None:
        self.path = base / hashlib.sha256(store.encode()).hexdigest()[:16]
        self.make()

    def make(self) -> None:
        """Make it again, should somebody have removed it.

        Raises:
            NodeError: as above.
        """
        _make_private(self.path.parent)
        _make_private(self.path)

    @property
    def queue_path(self) -> Path:
        """The machine's read queue."""
        return self.path / "queue"

    @property
    def socket_path(self) -> Path:
        """Of the agent, for readers of this machine."""
        return self.path / "agent.sock"

    def running(self) -> bool:
        """Whether an agent lives. Takes no lock, so nobody who starts is held up by the look."""
        return self._taken(_LIVES)

    def info(self) -> AgentInfo | None:
        """What the agent says of itself; None while there is none, or it has only begun."""
        if not self.running():
            return None
        try:
            told = json.loads((self.path / "agent.json").read_text())
            return AgentInfo(**{field.name: told[field.name] for field in fields(AgentInfo)})
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def tell(self, info: AgentInfo) -> None:
        """Have the other processes know; by whoever holds the lock.

        Raises:
            OSError: it cannot be written.
        """
        draft = self.path / f".agent.{secrets.token_hex(4)}"
        draft.write_text(json.dumps(asdict(info)) + "\n")
        draft.replace(self.path / "agent.json")

    def forget(self) -> None:
        """What the last agent told is true no more."""
        with contextlib.suppress(OSError):
            (self.path / "agent.json").unlink(missing_ok=True)

    def lock(self, timeout_s: float = 0.0) -> AgentLock | None:
        """Be the agent of this machine; None when another is it for ``timeout_s`` seconds more.

        Raises:
            NodeError: the file cannot be locked.
        """
        end = time.monotonic() + timeout_s
        while (lock := self._take(_LIVES)) is None and time.monotonic() < end:
            time.sleep(_ASK_EVERY_S)
        if lock is not None:
            self.forget()
        return lock

    def starting(self) -> AgentLock | None:
        """Be the one who starts the agent; None when another does.

        Raises:
            NodeError: the file cannot be locked.
        """
        return self._take(_STARTS)

    def freshen(self) -> None:
        """Look used to whoever clears directories of what nobody has touched for days."""
        for path in (self.path / "agent.lock", self.path / "agent.json", self.queue_path):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _open(self) -> int:
        """The file of the locks: the one that stands there, not one that was just removed."""
        path = self.path / "agent.lock"
        try:
            while True:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                if _same_file(fd, path):
                    return fd
                os.close(fd)
        except OSError as error:
            raise NodeError(f"{path} cannot be used: {error}") from error

    def _take(self, at: int) -> AgentLock | None:
        fd = self._open()
        try:
            if byte_locks.take(fd, at):
                lock = AgentLock(self.path / "agent.lock", fd, at)
                fd = -1
                return lock
            return None
        except OSError as error:
            raise NodeError(f"{self.path} is on a file system without locks: {error}") from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _taken(self, at: int) -> bool:
        try:
            fd = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return byte_locks.taken(fd, at)
        except OSError:
            return False
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _make_private(path: Path) -> None:
    """A directory of this user's own, and nobody else's to write to."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise NodeError(f"The directory {path} cannot be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise NodeError(f"{path} is no directory, and is not followed")
    if found.st_uid != os.geteuid():
        raise NodeError(
            f"The directory {path} belongs to another user; set node_dir to one of ours"
        )
    if found.st_mode & 0o022:
        raise NodeError(f"Others may write to the directory {path}; take that right from them")
