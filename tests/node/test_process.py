"""`dualpath node` in a process of its own: it serves what was stored, and ends as it should."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dualpath_sglang.node.listen import parted
from dualpath_sglang.node.machine_queue import MachineQueue
from dualpath_sglang.read_queue import ReadQueue
from dualpath_sglang.transport.base import End, Load, PeerLostError, RefusedError
from dualpath_sglang.transport.handshake import VERSION
from tests.cli.stores import dualpath
from tests.node.agents import AgentProcess, Place, agents, begin, fetch, wait_for
from tests.support.blocks import chain, geometry
from tests.support.certificates import authority, certificate
from tests.support.redis_server import RedisServer

Start = Callable[..., AgentProcess]
KEYS = chain("a", 40)


def secret_of(place: Place) -> bytes:
    """What the nodes share over the index, once there is an agent."""
    place.info()
    with place.cache() as cache:
        return cache.index.secret()


def test_a_fetch_brings_what_was_stored(place: Place, start: Start) -> None:
    of = geometry("mha")
    place.store(of, KEYS)
    agent = start(place)
    connection = place.connect(secret_of(place))
    fetched = fetch(connection, of, KEYS)
    assert fetched.ends == [End.OK]
    assert fetched.right(of) == set(range(40))
    assert fetch(connection, of, [*KEYS[:3], *chain("never", 2)]).lacking == {3, 4}
    connection.close()
    with place.cache() as cache:
        wait_for(lambda: any(r["fetches"] == 2 for r in agents(cache)), "a report of both")
        (told,) = agents(cache)
        info = place.info()
        assert parted(str(told["address"])) == (info.host, info.port)
        assert (told["node_id"], told["host"], told["pid"]) == (info.id, "here", agent.pid)
        assert told["served_bytes"] == 43 * of.block_bytes
        assert 40 * of.block_bytes <= int(told["cached_bytes"]) < 44 * of.block_bytes
        assert told["memory_bytes"] == 32 << 20
        assert told["protocol"] == VERSION
    agent.terminate()
    assert agent.ends() == 0


def test_an_agent_that_ends_lets_a_fetch_end_whole(place: Place, start: Start) -> None:
    # More than the buffers of the connection hold: it cannot be over before it is read.
    of = geometry("large", layers=30)
    place.settings |= {"node_memory": "256MiB", "capacity": "512MiB", "stream_staging": "16MiB"}
    keys = chain("big", 40)
    place.store(of, keys)
    agent = start(place)
    secret = secret_of(place)
    connection, idle = place.connect(secret), place.connect(secret)
    began: list[bool] = []

    def hold(layer: int, first: int) -> None:
        del layer, first
        if not began:
            began.append(True)
            agent.terminate()
            agent.says("lets fetches end")

    fetched = begin(connection, of, keys)
    fetched.on_landed = hold
    wait_for(lambda: began, "the first piece")
    agent.says("lets fetches end")
    assert fetch(idle, of, keys[:1]).ends in ([End.BUSY], [End.LOST]), "nothing new is taken"
    assert fetched.fetch.wait(90)
    assert fetched.ends == [End.OK]
    assert fetched.right(of) == set(range(40))
    assert agent.ends() == 0
    with place.cache() as cache:
        assert agents(cache) == [], "it has withdrawn its report"
    connection.close()
    idle.close()
    assert not place.machine().running()


def test_a_fetch_that_never_ends_is_ended_after_a_while(place: Place, start: Start) -> None:
    of = geometry("large", layers=30)
    place.settings |= {"node_memory": "256MiB", "capacity": "512MiB", "stream_staging": "16MiB"}
    keys = chain("big", 40)
    place.store(of, keys)
    agent = start(place, "--drain-timeout", "0.5")
    connection = place.connect(secret_of(place))
    ended: list[int] = []

    def hold(layer: int, first: int) -> None:
        if not ended:
            agent.terminate()
            ended.append(agent.ends())

    fetched = begin(connection, of, keys)
    fetched.on_landed = hold
    assert fetched.fetch.wait(90)
    assert ended == [0]
    assert fetched.ends == [End.LOST]
    assert "under way for too long" in agent.log
    connection.close()


def test_a_second_signal_ends_it_at_once(place: Place, start: Start) -> None:
    of = geometry("large", layers=30)
    place.settings |= {"node_memory": "256MiB", "capacity": "512MiB", "stream_staging": "16MiB"}
    keys = chain("big", 40)
    place.store(of, keys)
    agent = start(place, "--drain-timeout", "600")
    connection = place.connect(secret_of(place))
    statuses: list[int] = []

    def hold(layer: int, first: int) -> None:
        if not statuses:
            agent.process.send_signal(signal.SIGINT)
            agent.says("lets fetches end")
            agent.process.send_signal(signal.SIGINT)
            statuses.append(agent.ends())

    fetched = begin(connection, of, keys)
    fetched.on_landed = hold
    assert fetched.fetch.wait(90)
    assert statuses == [128 + signal.SIGINT]
    connection.close()


def test_a_second_agent_of_a_machine_is_refused_or_waits(place: Place, start: Start) -> None:
    place.store(geometry(), KEYS[:1])
    first = start(place)
    before = place.info()
    second = start(place, log="second.txt")
    assert second.ends() == 2
    assert "runs on this machine already" in second.log
    assert "Traceback" not in second.log
    third = start(place, "--wait", log="third.txt")
    time.sleep(1)
    assert third.process.poll() is None
    assert place.info() == before
    first.kill()
    third.says("serves")
    assert place.info().pid == third.pid
    fourth = start(place, "--wait", log="fourth.txt")
    fourth.terminate()
    assert fourth.ends() in (0, -signal.SIGTERM), "also while it waits"
    third.terminate()
    assert third.ends() == 0


def test_who_does_not_know_the_secret_is_refused_counted_and_logged_once(
    place: Place, start: Start
) -> None:
    of = geometry()
    place.store(of, KEYS)
    agent = start(place)
    place.info()
    for wrong in (b"a wrong one, quite long", b"", b"another wrong one, long"):
        with pytest.raises((RefusedError, PeerLostError)):
            place.connect(wrong)
    with place.cache() as cache:
        wait_for(lambda: agents(cache) and agents(cache)[0]["refused"] == 3, "the count of three")
        secret = cache.index.secret()
    assert agent.log.count("is refused") == 1
    assert secret.decode() not in agent.log
    connection = place.connect(secret)
    assert fetch(connection, of, KEYS).right(of) == set(range(40))
    connection.close()


def test_the_secret_of_the_settings_counts(place: Place, start: Start) -> None:
    of = geometry()
    place.store(of, KEYS[:2])
    place.settings["node_secret"] = "a secret of this test"
    start(place)
    place.info()
    assert secret_of(place) == b"", "none is shared"
    with pytest.raises((RefusedError, PeerLostError)):
        place.connect(b"another secret, as long")
    connection = place.connect(b"a secret of this test")
    assert fetch(connection, of, KEYS[:2]).right(of) == {0, 1}
    connection.close()


def test_two_machines_share_a_secret_over_redis(
    place: Place, start: Start, tmp_path: Path, redis_server: RedisServer
) -> None:
    of = geometry()
    place.store(of, KEYS)
    (tmp_path / "b").mkdir()
    other = Place(place.folder, place.url, {"node_dir": str(tmp_path / "b"), "node_name": "there"})
    one, two = start(place), start(other, log="other.txt")
    for at in (place, other):
        connection = at.connect(secret_of(place))
        assert fetch(connection, of, KEYS[:5]).right(of) == set(range(5))
        connection.close()
    with place.cache() as cache, redis_server.admin() as admin:
        wait_for(lambda: len(agents(cache)) == 2, "two reports")
        before = cache.index.secret()
        admin.flushall()  # as a Redis that is restarted and keeps nothing

        def stands() -> dict[bytes, bytes]:
            return {name: admin.get(name) for name in admin.keys("dualpath:*:secret")}

        wait_for(lambda: before in stands().values(), "the old secret")
        (name,) = stands()
        admin.set(name, b"another one that somebody made first")
        for agent in (one, two):
            agent.says("share another secret")
    connection = place.connect(b"another one that somebody made first")
    connection.close()


def test_an_agent_that_is_killed_is_forgotten_and_started_again(place: Place, start: Start) -> None:
    of = geometry()
    place.store(of, KEYS)
    agent = start(place)
    connection = place.connect(secret_of(place))
    before = place.info()
    agent.kill()
    assert not place.machine().running()
    assert place.machine().info() is None
    wait_for(lambda: connection.lost, "the end of the connection")
    connection.close()
    with place.cache() as cache:
        wait_for(lambda: not agents(cache), "the end of its report")
    start(place, log="again.txt")
    after = place.info()
    assert after.id != before.id
    connection = place.connect(secret_of(place))
    assert fetch(connection, of, KEYS).right(of) == set(range(40))
    connection.close()


def test_it_listens_where_it_is_told(place: Place, start: Start) -> None:
    place.store(geometry(), KEYS[:1])
    place.settings["node_listen"] = "127.0.0.0/8"
    agent = start(place)
    assert place.info().host == "127.0.0.1"
    agent.terminate()
    assert agent.ends() == 0
    place.settings["node_listen"] = "203.0.113.0/24"
    lost = start(place, log="lost.txt")
    assert lost.ends() == 2
    assert "no address in the network 203.0.113.0/24" in lost.log
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place.settings["node_listen"] = f"127.0.0.1:{taken.getsockname()[1]}"
        late = start(place, log="late.txt")
        assert late.ends() == 2
        assert "cannot listen at 127.0.0.1:" in late.log
        assert "Traceback" not in late.log
    again = start(place, log="again.txt")
    again.says("serves")
    assert place.info().port == int(place.settings["node_listen"].rpartition(":")[2])


def test_redis_may_be_away_at_the_start_and_later(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = geometry()
    with RedisServer() as server:
        place = Place(tmp_path, server.url)
        place.store(of, KEYS)
        server.kill()
        agent = start(place)
        agent.says("the agent waits")
        server.start()
        with place.cache():  # some server fills the index again
            agent.says("serves")
            secret = secret_of(place)
            connection = place.connect(secret)
            wait_for(lambda: fetch(connection, of, KEYS).right(of) == set(range(40)), "a hit")
            server.kill()
            agent.says("nobody is told")
            ended = fetch(connection, of, KEYS)
            assert ended.ends == [End.OK]
            ended.right(of)  # whatever came is right
            again = place.connect(secret)
            again.close()
            server.start()
            agent.says("tells of itself again")
            wait_for(lambda: fetch(connection, of, KEYS).right(of) == set(range(40)), "a hit")
            assert secret_of(place) == secret, "it has brought it back"
            connection.close()
        agent.terminate()
        assert agent.ends() == 0


def test_the_store_may_come_later(place: Place, start: Start) -> None:
    of = geometry()
    agent = start(place)
    agent.says("no store at")
    place.store(of, KEYS)
    agent.says("serves")
    assert agent.log.count("no store at") == 1
    connection = place.connect(secret_of(place))
    wait_for(lambda: fetch(connection, of, KEYS).right(of) == set(range(40)), "a hit")
    connection.close()
    agent.terminate()
    assert agent.ends() == 0


def test_the_queue_that_is_told_is_that_of_the_machine(place: Place, start: Start) -> None:
    of = geometry()
    place.store(of, KEYS)
    start(place)
    machine = place.machine()
    place.info()
    queue = MachineQueue(machine.queue_path)
    with place.cache() as cache, ReadQueue(queue).holding(1 << 33, 123):
        wait_for(
            lambda: agents(cache) and agents(cache)[0]["read_queue_bytes"] == 1 << 33, "a report"
        )
        connection = place.connect(cache.index.secret())
        assert fetch(connection, of, KEYS[:1]).load == Load(1 << 33, 123)
        connection.close()
    queue.close()


def test_status_shows_the_agents(place: Place, start: Start) -> None:
    of = geometry()
    place.store(of, KEYS)
    start(place)
    info = place.info()
    with place.cache() as cache:
        connection = place.connect(cache.index.secret())
        fetch(connection, of, KEYS)
        connection.close()
        wait_for(lambda: agents(cache) and agents(cache)[0]["fetches"] == 1, "a report")
    file = place.folder / "settings.toml"
    file.write_text("".join(f'{name} = "{value}"\n' for name, value in place.extra().items()))
    told = dualpath("status", "--config", file, "--json").json
    (node,) = told["nodes"].values()
    assert (node["role"], node["address"]) == ("node", f"127.0.0.1:{info.port}")
    shown = dualpath("status", "--config", file)
    (line,) = [line for line in shown.out.splitlines() if f"127.0.0.1:{info.port}" in line]
    assert "node" in line
    assert "of 32.0 MiB" in line


def test_tls_keeps_out_who_has_no_certificate(place: Place, start: Start, tmp_path: Path) -> None:
    of = geometry()
    place.store(of, KEYS)
    ca = authority(tmp_path)
    cert, key = certificate(ca, "node", "127.0.0.1")
    files = {"node_tls_cert": cert, "node_tls_key": key, "node_tls_ca": ca}
    place.settings |= {name: str(path) for name, path in files.items()}
    start(place)
    secret = secret_of(place)
    connection = place.connect(secret, tls=place.options().client_tls())
    assert fetch(connection, of, KEYS).right(of) == set(range(40))
    connection.close()
    with pytest.raises(PeerLostError):
        place.connect(secret)


def test_an_automatic_agent_ends_when_nobody_is_left(place: Place, start: Start) -> None:
    place.store(geometry(), KEYS[:1])
    queue = MachineQueue(place.machine().queue_path)
    agent = start(place, "--auto", "--idle-timeout", "1")
    agent.says("serves")
    time.sleep(4)
    assert agent.process.poll() is None, "while somebody is there it stays"
    queue.close()
    assert agent.ends() == 0
    assert "Nobody on this machine" in agent.log


def test_an_agent_whose_directory_is_removed_ends(place: Place, start: Start) -> None:
    place.store(geometry(), KEYS[:1])
    agent = start(place)
    place.info()
    (place.machine().path / "agent.lock").unlink()
    assert agent.ends() == 0
    assert "was removed" in agent.log


def test_an_agent_of_one_machine_alone_is_of_no_use(tmp_path: Path) -> None:
    outcome = dualpath("node", "--root", tmp_path)
    assert outcome.status == 2
    assert "needs the index in Redis" in outcome.err
