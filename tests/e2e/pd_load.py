"""Steady load of agent sessions through routers, and what became of each request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.pd_router import RouterProcess
from tests.support.pd_sessions import FORMS, AnswerError, Session

TURNS = 5
WORKERS = 4
SESSIONS = 3
"""Of each worker, which holds them again and again."""
PATIENCE_S = 60.0
"""A client waits no longer for an answer: then the request hangs."""
_LOOK_S = 2.0


def sessions_of(worker: int) -> list[Session]:
    """New ones; their turns are the same each time."""
    return [
        Session(FORMS[(worker + i) % len(FORMS)], seed=10_000 + 100 * worker + i, first=240, new=12)
        for i in range(SESSIONS)
    ]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, seen by its client. Times are monotonic seconds.

    Args:
        outcome: ``right``, ``wrong``; ``error``: the router said that it failed; ``gone``: the
            router went away; ``hangs``: nobody said anything.
        text: of the error.
    """

    began: float
    ended: float
    outcome: str
    router: int
    text: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass
class Load:
    """Clients, from ``with`` on.

    A client whose router is gone, or says that a request failed, asks the same again; after a
    router is gone, another one.

    Args:
        expected: right answers, by worker and session.
    """

    routers: Sequence[RouterProcess]
    expected: Mapping[tuple[int, int], Sequence[Any]]
    asked: list[Asked] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(worker,), daemon=True)
            for worker in range(WORKERS)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let what is under way end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def more(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait for so many more right answers."""
        since = time.monotonic()
        while (
            len([a for a in list(self.asked) if a.began > since and a.outcome == "right"]) < count
        ):
            assert not self.errors, self.errors
            assert time.monotonic() < since + timeout_s, [a for a in self.asked if a.ended > since]
            time.sleep(0.05)

    def between(self, began: float, ended: float) -> list[Asked]:
        """Those of which any part lies there."""
        return [asked for asked in list(self.asked) if asked.began < ended and asked.ended > began]

    # ---- inside

    def _keep(self, worker: int) -> None:
        try:
            for number in itertools.cycle(range(SESSIONS)):
                self._hold(worker, number)
                if self._stop.is_set():
                    return
        except BaseException as error:
            self.errors.append(error)
            raise

    def _hold(self, worker: int, number: int) -> None:
        session = sessions_of(worker)[number]
        wanted = self.expected[worker, number]
        at = worker % len(self.routers)
        while session.turns < TURNS and not self._stop.is_set():
            at = self._alive(at)
            began = time.monotonic()
            outcome, text = self._turn(session, wanted, at)
            self.asked.append(Asked(began, time.monotonic(), outcome, at, text))
            if outcome == "wrong":
                return
            if outcome in ("gone", "hangs"):
                at = (at + 1) % len(self.routers)

    def _turn(self, session: Session, wanted: Sequence[Any], at: int) -> tuple[str, str]:
        router = self.routers[at]
        turn = session.turns

        def post(path: str, body: Mapping[str, Any]) -> tuple[int, str]:
            return router.post(path, body, timeout_s=PATIENCE_S)

        try:
            said = session.turn(post)
        except AnswerError as error:
            return "error", str(error)
        except TimeoutError as error:
            return "hangs", repr(error)
        except (OSError, http.client.HTTPException) as error:
            return "gone", repr(error)
        if said.answer != wanted[turn]:
            return "wrong", f"{said.answer!r} for {wanted[turn]!r}"
        return "right", ""

    def _alive(self, at: int) -> int:
        """A router that answers, this one if it does."""
        for router in itertools.cycle([*range(at, len(self.routers)), *range(at)]):
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if self.routers[router].get("/health", _LOOK_S)[0]:
                    return router
            if self._stop.is_set():
                return router
        raise AssertionError("there are no routers")


def expected(ask: Callable[[Session], Any]) -> dict[tuple[int, int], list[Any]]:
    """Right answers.

    Args:
        ask: has a server without a cache answer a turn.
    """
    found = {}
    for worker in range(WORKERS):
        for number, session in enumerate(sessions_of(worker)):
            found[worker, number] = [ask(session) for _ in range(TURNS)]
    return found
