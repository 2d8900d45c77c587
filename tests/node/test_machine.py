"""The directory of a machine: private, one agent at a time, and a look that holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dualpath_sglang.node.machine import AgentInfo, MachineDir
from dualpath_sglang.node.options import NodeError, NodeOptions

HOLD = """
import sys, time
from pathlib import Path
from dualpath_sglang.node.machine import MachineDir
lock = MachineDir(Path(sys.argv[1]), "store").lock(20)
print("held" if lock else "refused", flush=True)
time.sleep(600)
"""


@pytest.fixture
def machine(tmp_path: Path) -> MachineDir:
    return MachineDir(tmp_path / "machine", "store")


def holder(machine: MachineDir) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(machine.path.parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_an_agent_is_seen_while_it_lives_and_no_longer(machine: MachineDir) -> None:
    assert not machine.running()
    with holder(machine) as process:
        assert machine.running()
        assert machine.lock() is None
        process.kill()
        process.wait()
        assert not machine.running(), "the kernel has given the lock back"
    lock = machine.lock()
    assert lock is not None
    assert machine.running()
    lock.close()
    assert not machine.running()


def test_who_waits_becomes_the_agent(machine: MachineDir) -> None:
    lock = machine.lock()
    assert lock is not None
    timer = threading.Timer(0.5, lock.close)
    timer.start()
    other = machine.lock(60)
    timer.join()
    assert other is not None
    other.close()


def test_looking_never_keeps_an_agent_from_starting(machine: MachineDir) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            machine.running()

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(300):
            lock = machine.lock()
            assert lock is not None
            lock.close()
    finally:
        done.set()
        for thread in lookers:
            thread.join()


def test_a_forked_child_does_not_keep_the_lock(machine: MachineDir) -> None:
    lock = machine.lock()
    assert lock is not None
    ours, theirs = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        os.write(say, b".")
        os.read(ours, 1)
        os._exit(0)
    assert os.read(ready, 1) == b"."
    lock._leave()  # as the kernel does for a killed process: nothing is given back, only closed
    assert not machine.running(), "though the child lives"
    for fd in (theirs, ours, ready, say):
        os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_an_agent_tells_is_heard_while_it_lives(machine: MachineDir) -> None:
    info = AgentInfo(7, "here", "0a" * 8, "127.0.0.1", 4711, str(machine.socket_path), "1.2")
    assert machine.info() is None
    lock = machine.lock()
    assert lock is not None
    assert machine.info() is None, "it has said nothing yet"
    machine.tell(info)
    assert machine.info() == info
    lock.close()
    assert machine.info() is None
    lock = machine.lock()
    assert lock is not None
    assert machine.info() is None, "that was the last one"
    machine.path.joinpath("agent.json").write_text('{"pid": 1}')
    assert machine.info() is None
    lock.close()


def test_a_lock_whose_file_is_gone_is_known_to_be_of_no_use(machine: MachineDir) -> None:
    lock = machine.lock()
    assert lock is not None
    assert lock.stands
    (machine.path / "agent.lock").unlink()
    assert not lock.stands
    assert not machine.running()
    lock.close()


def test_one_starts_an_agent_at_a_time(machine: MachineDir) -> None:
    starting = machine.starting()
    assert starting is not None
    assert machine.starting() is None
    lock = machine.lock()
    assert lock is not None, "the agent itself may start all the while"
    lock.close()
    starting.close()
    again = machine.starting()
    assert again is not None
    again.close()


def test_two_stores_of_a_machine_have_two_agents(tmp_path: Path) -> None:
    one, two = MachineDir(tmp_path / "m", "a"), MachineDir(tmp_path / "m", "b")
    locks = [one.lock(), two.lock()]
    assert None not in locks
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    assert one.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(NodeError, match="Others may write to the directory"):
        MachineDir(base, "store")


def test_somebody_elses_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(NodeError, match="belongs to another user"):
        MachineDir(tmp_path / "theirs", "store")


def test_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NodeError, match="is no directory"):
        MachineDir(tmp_path / "link", "store")
    (tmp_path / "file").touch()
    with pytest.raises(NodeError, match="cannot be made"):
        MachineDir(tmp_path / "file", "store")


def test_the_directory_is_the_users_own_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert NodeOptions("s").base == tmp_path / "dualpath"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert NodeOptions("s").base == Path(f"/tmp/dualpath-{os.getuid()}")
    assert NodeOptions("s", directory=tmp_path / "d").base == tmp_path / "d"
