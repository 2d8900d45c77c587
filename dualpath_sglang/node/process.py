"""The agent of a machine as a process: ``dualpath node``.

It waits for whatever is not there yet (the store, Redis), serves until it is told to end, and then
lets the fetches end that are under way. It reads the store and never writes to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_sglang.node.agent import Agent
from dualpath_sglang.node.listen import ListenError, announced, joined
from dualpath_sglang.node.machine import AgentInfo, AgentLock, MachineDir
from dualpath_sglang.node.machine_queue import MachineQueue
from dualpath_sglang.node.options import NodeError, NodeOptions
from dualpath_sglang.node.report import Node
from dualpath_sglang.node.secret import NodeSecret
from dualpath_sglang.transport.base import End
from dualpath_sglang.transport.handshake import VERSION
from dualpath_sglang.transport.local_server import LocalServer
from dualpath_sglang.transport.server import Server, ServerOptions
from dualpath_storage import StoreOptions

logger = logging.getLogger(__name__)

ROLE = "node"
"""Of an agent in its report."""
REPORT_S = 0.5
_TTL_S = 3.0
_WITHDRAWN_S = 0.001
_RETRY_S = 0.5
_SECRET_EVERY_S = 5.0
_LOOK_EVERY_S = 2.0
_FRESHEN_EVERY_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How long an agent waits for what.

    Args:
        wait_s: for another agent of the machine to end; 0 to end with a sentence.
        drain_s: for fetches to end, once it is to end itself.
        idle_s: it ends when nobody else on the machine has used the store for so long; None for
            never.
    """

    wait_s: float = 0.0
    drain_s: float = 30.0
    idle_s: float | None = None


class Signals:
    """SIGTERM and SIGINT: the first asks to end, the second ends at once. For the main thread."""

    def __init__(self) -> None:
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._theirs, False)
        self.name = ""
        """Of the first; empty while none has come."""

    def __enter__(self) -> Signals:
        wanted = {signal.SIGTERM, signal.SIGINT}
        for number in wanted:
            signal.signal(number, self._came)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # whoever started us may block them
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._ours)
        os.close(self._theirs)

    def _came(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name:
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        os.write(self._theirs, b".")

    def wait(self, timeout_s: float) -> bool:
        """Until one has come; whether one has."""
        return bool(self.name or select.select([self._ours], [], [], timeout_s)[0])


class _StoppedError(Exception):
    """It was told to end while it waited."""


class NodeProcess:
    """The agent of this machine, for the main thread of its process.

    Args:
        config: of the store.
        options: of the agent.
        how: how long it waits for what.

    Raises:
        NodeError: the directory of the machine cannot be used.
    """

    def __init__(self, config: DualPathConfig, options: NodeOptions, how: RunOptions) -> None:
        self._config = config
        self._options = options
        self._how = how
        self._signals = Signals()
        self._machine = MachineDir(options.base, options.store)
        self._id = secrets.token_hex(8)
        self._secret = NodeSecret(options.secret, offers=True)

    def run(self) -> int:
        """Serve until a signal, or until nobody is left; the exit status.

        Raises:
            NodeError: it cannot be done: another agent runs, the address cannot be had.
            StoreError: the store cannot be used as asked.
        """
        with self._signals, contextlib.ExitStack() as stack:
            with contextlib.suppress(_StoppedError):
                lock = self._lock()
                stack.callback(lock.close)
                stack.callback(self._machine.forget)
                self._serve(stack, lock)
            logger.info("The agent ends")
        return 0

    def _lock(self) -> AgentLock:
        end = time.monotonic() + self._how.wait_s
        while (lock := self._machine.lock()) is None:
            if time.monotonic() >= end:
                raise NodeError(
                    f"An agent of this store runs on this machine already, see {self._machine.path}"
                )
            self._pause(_RETRY_S)
        return lock

    def _serve(self, stack: contextlib.ExitStack, lock: AgentLock) -> None:
        server_tls = self._options.server_tls()
        queue = MachineQueue(self._machine.queue_path)
        stack.callback(queue.close)
        self._wait_for_store()
        config = self._config
        cache = stack.enter_context(
            KVCache(_read_only(config), index=config.index_source(), machine=queue)
        )
        self._wait_for_secret(cache)
        host, known_as = self._wait_for_address()
        agent = Agent(cache, self._options.memory_bytes, config.stream_options())
        stack.callback(agent.close)
        wanted = ServerOptions(
            host=host,
            port=self._options.listen.port,
            secret=self._secret.value,
            tls=server_tls,
            dscp=self._options.dscp,
        )
        try:
            server = Server(agent, wanted)
        except OSError as error:
            raise NodeError(
                f"The agent cannot listen at {joined(host, wanted.port)}: {error.strerror}"
            ) from error
        stack.callback(server.close)
        nearby = self._serve_nearby(agent)
        if nearby is not None:
            stack.callback(nearby.close)
        name, address = self._options.name, joined(known_as, server.port)
        node = Node(ROLE, host=name, address=address)
        socket = "" if nearby is None else str(nearby.path)
        self._machine.tell(
            AgentInfo(node.pid, name, self._id, known_as, server.port, socket, node.version)
        )
        logger.info("The agent of %s serves %s at %s", name, cache.root, address)
        serving = _Serving(cache, agent, server, nearby, queue, node, self._id)
        self._go_on(serving, lock)
        serving.withdraw()
        end = time.monotonic() + self._how.drain_s
        drained = server.drain(self._how.drain_s)
        if nearby is not None:
            drained = nearby.drain(max(0.0, end - time.monotonic())) and drained
        if not drained:
            logger.warning("Fetches were under way for too long, and are ended")

    def _serve_nearby(self, agent: Agent) -> LocalServer | None:
        """For readers of this machine; without it they read the store, as they do anyway."""
        try:
            return LocalServer(agent, self._machine.socket_path)
        except (OSError, ValueError) as error:
            logger.warning("Processes of this machine cannot read the agent's memory: %s", error)
            return None

    # -- waiting ----------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        if self._signals.wait(seconds):
            raise _StoppedError

    def _wait_for_store(self) -> None:
        """Until somebody has made it, and it is mounted here."""
        root = self._config.store_options().root
        source = self._config.index_source()
        for first in _first():
            with contextlib.suppress(OSError):
                if source.exists(root):
                    return
            if first:
                logger.warning("There is no store at %s yet; the agent waits for it", root)
            self._pause(_RETRY_S)

    def _wait_for_secret(self, cache: KVCache) -> None:
        for first in _first():
            with contextlib.suppress(IndexUnavailableError):
                if not self._secret.value:
                    self._secret.look(cache.index)
            if self._secret.value:
                return
            if first:
                logger.warning("The index does not say what the nodes' secret is; the agent waits")
            self._pause(_RETRY_S)

    def _wait_for_address(self) -> tuple[str, str]:
        """Where to listen, and what others call that."""
        index = self._options.index_address
        for first in _first():
            try:
                host = self._options.listen.resolve(index)
                return host, announced(host, index)
            except ListenError as error:
                raise NodeError(str(error)) from error
            except OSError as error:
                if first:
                    logger.warning("The agent does not know yet where to listen: %s", error)
            self._pause(_RETRY_S)
        raise AssertionError("unreachable")

    # -- going on ---------------------------------------------------------------------------

    def _go_on(self, serving: _Serving, lock: AgentLock) -> None:
        """Tell others, until it is time to end."""
        now = time.monotonic()
        used_at = look_at = now
        secret_at, freshen_at = now + _SECRET_EVERY_S, now + _FRESHEN_EVERY_S
        serving.report()
        while not self._signals.wait(REPORT_S):
            back = serving.report()
            now = time.monotonic()
            if back or now >= secret_at:
                secret_at = now + _SECRET_EVERY_S
                serving.renew_secret(self._secret)
            if now >= freshen_at:
                freshen_at = now + _FRESHEN_EVERY_S
                self._machine.freshen()
            if now < look_at:
                continue
            look_at = now + min(_LOOK_EVERY_S, self._how.idle_s or _LOOK_EVERY_S)
            serving.queue.renew()
            if not lock.stands:
                logger.error("%s was removed: the agent ends", self._machine.path)
                return
            if serving.queue.others():
                used_at = now
            elif self._how.idle_s is not None and now - used_at > self._how.idle_s:
                logger.info("Nobody on this machine uses the store any more: the agent ends")
                return
        logger.info("%s: the agent takes nothing new and lets fetches end", self._signals.name)


class _Serving:
    """An agent at work, and what it tells others of itself."""

    def __init__(
        self,
        cache: KVCache,
        agent: Agent,
        server: Server,
        nearby: LocalServer | None,
        queue: MachineQueue,
        node: Node,
        node_id: str,
    ) -> None:
        self._cache = cache
        self._agent = agent
        self._server = server
        self._nearby = nearby
        self.queue = queue
        self._node = node
        self._id = node_id
        self._name = f"{node.host}:{node.role}:{node_id}"
        self._heard = True

    def report(self) -> bool:
        """Tell the other nodes; whether the index has not answered before, and does again."""
        try:
            self._cache.index.report(self._name, self._told(), _TTL_S)
            heard = True
        except IndexUnavailableError as error:
            heard = False
            if self._heard:
                logger.warning("The agent serves on, but nobody is told of it: %s", error)
        back = heard and not self._heard
        if back:
            logger.info("The agent tells of itself again")
        self._heard = heard
        return back

    def withdraw(self) -> None:
        """Have nobody ask any more."""
        with contextlib.suppress(IndexUnavailableError):
            self._cache.index.report(self._name, {}, _WITHDRAWN_S)

    def renew_secret(self, secret: NodeSecret) -> None:
        """The index may have been emptied, and the nodes share another one by now."""
        with contextlib.suppress(IndexUnavailableError):
            if secret.look(self._cache.index):
                logger.warning("The nodes share another secret from now on")
                self._server.change_secret(secret.value)

    def _told(self) -> dict[str, str | int | float | bool]:
        size, tokens = self.queue.total()
        counts = self._server.counts
        return {
            **self._node.report({}),
            "node_id": self._id,
            "protocol": VERSION,
            "read_queue_bytes": size,
            "read_queue_tokens": tokens,
            "read_rate": round(self._agent.read_rate or 0.0),
            "cached_bytes": self._agent.blocks.used_bytes,
            "memory_bytes": self._agent.blocks.capacity_bytes,
            "served_bytes": counts["bytes"],
            "served_nearby_bytes": 0 if self._nearby is None else self._nearby.counts["bytes"],
            "fetches": sum(counts[end.name.lower()] for end in End),
            "refused": counts["refused"],
        }


def _read_only(config: DualPathConfig) -> StoreOptions:
    return replace(config.store_options(), read_only=True)


def _first() -> Iterator[bool]:
    """True once, then False for ever."""
    yield True
    while True:
        yield False
