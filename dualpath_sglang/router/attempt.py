"""A request on its two engines: both are asked at once, and neither is left waiting for the other.

Whatever ends an attempt before its answer (a failure, a dead engine, a client that goes away) ends
it on both sides: the connections are closed, and SGLang is told to abort the request. A decode
server would else wait minutes for KV that never comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.router import logprobs
from dualpath_sglang.router.dispatch import Seat
from dualpath_sglang.router.engines import Engine
from dualpath_sglang.router.options import Role
from dualpath_sglang.router.requests import PATHS, Incoming
from dualpath_sglang.router.upstream import (
    Answer,
    UpstreamError,
    bodies,
    check_answer,
    failed,
    first_events,
    read_answer,
)

logger = logging.getLogger(__name__)

_BLAME_S = 0.2
"""How long to wait for the other side, to see whose fault a failure is."""
_LINGER_S = 2.0
"""How long a prefill answer may come after that of decode."""
_ABORT_S = 2.0
_ABORT_AGAIN_S = 1.0
"""SGLang passes over an abort of what it has not yet seen."""
_ABORTS_AT_ONCE = 16
"""To one engine: one that does not answer keeps nothing from the others."""


class Aborter:
    """Tells engines to give requests up, behind the requests.

    Args:
        session: connections to engines.
        headers: sent along.
    """

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._session = session
        self._headers = dict(headers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._some: WeakKeyDictionary[Engine, asyncio.Semaphore] = WeakKeyDictionary()
        self._ending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def abort(self, engine: Engine, rids: Sequence[str], *, again: bool) -> None:
        """Begin to tell it.

        Args:
            again: once more after a moment, because the engine may not have seen them yet.
        """
        task = asyncio.create_task(self._abort(engine, rids, again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float = _ABORT_S) -> None:
        """Wait for what was begun."""
        self._ending.set()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()

    async def _abort(self, engine: Engine, rids: Sequence[str], again: bool) -> None:
        await asyncio.gather(*(self._tell(engine, rid) for rid in rids))
        if again:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _ABORT_AGAIN_S)
            await asyncio.gather(*(self._tell(engine, rid) for rid in rids))

    async def _tell(self, engine: Engine, rid: str) -> None:
        some = self._some.get(engine)
        if some is None:
            some = self._some[engine] = asyncio.Semaphore(_ABORTS_AT_ONCE)
        async with some:
            if engine.dead:
                return  # it aborts what lost its connection when it comes back
            try:
                async with self._session.post(
                    f"{engine.spec.url}/abort_request",
                    json={"rid": rid},
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=_ABORT_S),
                ) as answer:
                    await answer.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.debug("%s cannot be told to abort: %r", engine.name, error)


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that has begun well.

    Args:
        first: its first bytes, as they came.
        ended: whether there are no more.
    """

    response: aiohttp.ClientResponse
    first: bytes
    ended: bool

    @property
    def content_type(self) -> str:
        """Of the stream."""
        return self.response.headers.get("Content-Type", "text/event-stream")


class Attempt:
    """One try to have a request served by the two engines of a seat.

    Args:
        prefilled: called once with the prefill server's good answer.
        prefill_ended: called once, when the prefill server has nothing to do for it any more.
        patience_s: how long the prefill server may take.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        aborter: Aborter,
        seat: Seat,
        incoming: Incoming,
        hint: ReadHint | None,
        headers: Mapping[str, str],
        prefilled: Callable[[Answer], None],
        prefill_ended: Callable[[], None],
        patience_s: float,
    ) -> None:
        self.seat = seat
        self.aborted = False
        """The client said so."""
        self._session = session
        self._aborter = aborter
        self._incoming = incoming
        self._headers = headers
        self._prefilled = prefilled
        self._prefill_ended = prefill_ended
        made = bodies(incoming, seat.prefill, hint)
        self.rids = made.rids
        """As the engines know it."""
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._dead: asyncio.Future[UpstreamError] = asyncio.get_running_loop().create_future()
        self._stream: Stream | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._done: set[Role] = set()
        seat.on_death = self._on_death
        # In lists, out of which they are taken: prompts are long, and nobody needs them once sent.
        self._prefill = asyncio.create_task(self._ask_prefill([made.prefill]))
        self._decode = asyncio.create_task(self._ask_decode([made.decode]))

    async def begin(self) -> Answer | Stream:
        """The decode server's answer, or the prefill server's refusal of the request.

        Raises:
            UpstreamError: one of the two failed; nothing has reached the client.
        """
        got: Answer | Stream | None = None
        waiting: set[asyncio.Future[Any]] = {self._prefill, self._decode, self._dead}
        while True:
            done, waiting = await asyncio.wait(
                waiting, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                message = f"the prefill server has not answered for {self._patience_s:g} s"
                raise UpstreamError("prefill", "late", message)
            if self._dead in done:
                raise self._dead.result()
            if self._prefill in done:
                answer = self._prefill.result()
                if answer.refused:
                    return answer
            if self._decode in done:
                got = await self._decoded()
            if got is not None and self._may_go(got):
                return self._merged(got) if isinstance(got, Answer) else got

    def _left_s(self) -> float | None:
        """How much longer to wait; None when that is bounded by the decode server's life alone.

        Both may live, and wait for each other: when KV cannot be sent from one to the other.
        """
        if self._prefill.done():
            return None
        return max(0.0, self._began + self._patience_s - time.monotonic())

    def _may_go(self, got: Answer | Stream) -> bool:
        """Logprobs of the prompt may be needed first."""
        refused = isinstance(got, Answer) and got.refused
        return refused or not self._incoming.logprobs or self._prefill.done()

    def _merged(self, answer: Answer) -> Answer:
        if answer.refused or not self._logprobs:
            return answer
        body = logprobs.merge_answer(answer.body, self._logprobs)
        return Answer(answer.status, answer.content_type, body)

    async def _decoded(self) -> Answer | Stream:
        try:
            return self._decode.result()
        except UpstreamError:
            # A prefill server that dies takes the transfer with it: see whose fault it is.
            if not self._prefill.done():
                other: set[asyncio.Future[Any]] = {self._prefill, self._dead}
                await asyncio.wait(other, timeout=_BLAME_S)
            if self._dead.done():
                raise self._dead.result() from None
            if self._prefill.done():
                self._prefill.result()
            raise

    @property
    def prefill_answered(self) -> bool:
        """Whether the prefill server has done its part."""
        return "prefill" in self._done

    async def chunks(self, stream: Stream) -> AsyncIterator[bytes]:
        """The bytes of a stream as they come, with logprobs of the prompt where wanted.

        Raises:
            UpstreamError: it breaks off.
        """
        events = logprobs.Events() if self._logprobs else None
        try:
            chunk, left = stream.first, not stream.ended
            while True:
                if events is None:
                    yield chunk
                elif whole := events.feed(chunk):
                    merged = [logprobs.merge_event(e, self._logprobs) for e in whole]
                    yield b"".join(event + b"\n\n" for event in merged)
                if not left:
                    break
                chunk = await stream.response.content.readany()
                if not chunk:
                    break
                self.seat.decode.told_changed_at = time.monotonic()  # it works
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._dead.done():
                raise self._dead.result() from None
            raise failed("decode", error) from None
        if events is not None and events.rest:
            yield events.rest
        self._done.add("decode")
        stream.response.release()

    def abort(self) -> None:
        """The client does not want it any more; what the engines answer is its answer."""
        self.aborted = True
        for engine in (self.seat.prefill, self.seat.decode):
            self._aborter.abort(engine, self.rids, again=False)

    def close(self) -> None:
        """End it on both sides, as far as it has not ended there."""
        self.seat.on_death = None
        again = time.monotonic() - self._began < _ABORT_AGAIN_S
        good = "decode" in self._done
        if not good:
            self._decode.cancel()
            if self._stream is not None:
                self._stream.response.close()
            self._abort(self.seat.decode, again)
        if "prefill" not in self._done:
            if good:  # its answer is on its way
                self._aborter.keep(asyncio.create_task(self._linger()))
            else:
                self._prefill.cancel()
                self._abort(self.seat.prefill, again)
        for task in (self._prefill, self._decode):
            task.add_done_callback(_seen)
        self._dead.cancel()

    def _abort(self, engine: Engine, again: bool) -> None:
        if not engine.dead:
            self._aborter.abort(engine, self.rids, again=again)

    async def _linger(self) -> None:
        await asyncio.wait({self._prefill}, timeout=_LINGER_S)
        if not self._prefill.done():
            self._prefill.cancel()
            self._abort(self.seat.prefill, again=False)

    def _on_death(self, engine: Engine) -> None:
        role: Role = "prefill" if engine is self.seat.prefill else "decode"
        if role in self._done or self._dead.done():
            return
        error = UpstreamError(role, "dead", f"the {role} server is dead: {engine.reason}", 503)
        self._dead.set_result(error)
        if role == "decode" and self._stream is not None:
            self._stream.response.close()

    async def _ask_prefill(self, body: list[bytes]) -> Answer:
        try:
            async with self._session.post(
                self.seat.prefill.spec.url + PATHS[self._incoming.kind],
                data=body.pop(),
                headers=self._headers,
            ) as response:
                answer = check_answer("prefill", await read_answer(response), aborted=self.aborted)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise failed("prefill", error) from None
        finally:
            self._prefill_ended()
        self._done.add("prefill")
        self.seat.prefill.told_changed_at = time.monotonic()  # it works
        if not answer.refused:
            if self._incoming.logprobs:
                self._logprobs = logprobs.of_prefill(answer.body)
            self._prefilled(answer)
        return answer

    async def _ask_decode(self, body: list[bytes]) -> Answer | Stream:
        try:
            response = await self._session.post(
                self.seat.decode.spec.url + PATHS[self._incoming.kind],
                data=body.pop(),
                headers=self._headers,
            )
            try:
                kind = response.headers.get("Content-Type", "")
                if response.status == 200 and kind.startswith("text/event-stream"):
                    first, ended = await first_events(response, self._incoming.kind, self._wanted)
                    self._stream = Stream(response, first, ended)
                    return self._stream
                answer = check_answer("decode", await read_answer(response), aborted=self.aborted)
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise failed("decode", error) from None
        self._done.add("decode")
        return answer

    def _wanted(self) -> bool:
        return not self.aborted


def _seen(task: asyncio.Task[object]) -> None:
    """What it raised is of no interest any more."""
    if not task.cancelled():
        task.exception()
