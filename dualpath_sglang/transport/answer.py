"""The answer to one fetch, made in a thread of its own, whatever carries it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod

from dualpath_sglang.transport.base import (
    End,
    FetchRequest,
    Missing,
    PeerLostError,
    Piece,
    Served,
)

logger = logging.getLogger(__name__)

_MOST_S = 600.0
"""Nobody's fetch lasts longer."""


class Answer(ABC):
    """See the module.

    Args:
        number: the reader's, of the fetch.
    """

    def __init__(self, number: int, request: FetchRequest) -> None:
        self.number = number
        self.request = request
        self.deadline = time.monotonic() + min(request.timeout_s, _MOST_S)
        self.cancelled = threading.Event()
        self._served: Served | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dualpath-answer", daemon=True)

    def start(self) -> None:
        """Begin; RuntimeError when there is no thread to be had."""
        self._thread.start()

    def join(self) -> None:
        """Until it has ended, if it ever began."""
        if self._thread.ident is not None:
            self._thread.join()

    def cancel(self) -> None:
        """Nobody wants it any more: it ends soon. From any thread."""
        with self._lock:
            self.cancelled.set()
            served = self._served
        if served is not None:
            served.cancel()

    def _run(self) -> None:
        end = End.FAILED
        try:
            end = self._answer()
        except TimeoutError:
            end = End.TIMEOUT
        except PeerLostError:
            self.broke()
        except Exception:
            logger.exception("A fetch could not be answered")
        self.ended(end)

    def _answer(self) -> End:
        if self.cancelled.is_set():
            return End.CANCELLED
        begun = self.serve()
        if isinstance(begun, End):
            return begun
        with begun as served:
            with self._lock:
                self._served = served
                if self.cancelled.is_set():
                    return End.CANCELLED
            with self.sending(served):
                for part in served:
                    if self.cancelled.is_set():
                        break
                    self.send(part)
        return End.CANCELLED if self.cancelled.is_set() else End.OK

    # -- what carries it --------------------------------------------------------------------

    @abstractmethod
    def serve(self) -> contextlib.AbstractContextManager[Served] | End:
        """Begin to make it, or why not."""

    @abstractmethod
    def send(self, part: Piece | Missing) -> None:
        """Have a part of it sent.

        Raises:
            TimeoutError: its turn does not come by the deadline.
            PeerLostError: the connection is of no use any more.
        """

    @abstractmethod
    def ended(self, end: End) -> None:
        """The last that is done; says so to the reader."""

    def sending(self, served: Served) -> contextlib.AbstractContextManager[None]:
        """Around everything that is sent."""
        del served
        return contextlib.nullcontext()

    @abstractmethod
    def broke(self) -> None:
        """The connection broke while something was sent, perhaps in the middle of a frame."""
