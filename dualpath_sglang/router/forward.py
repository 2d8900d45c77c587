"""A request's way through the router: parsed, placed, served, and placed again when that fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp import web

from dualpath_sglang.read_hint import ReadHint
from dualpath_sglang.router.attempt import Aborter, Attempt, Stream
from dualpath_sglang.router.dispatch import Dispatcher, NoPlaceError, Seat
from dualpath_sglang.router.engines import Registry
from dualpath_sglang.router.errors import error_event, error_response
from dualpath_sglang.router.loads import LoadPoller
from dualpath_sglang.router.metrics import Metrics
from dualpath_sglang.router.options import RouterOptions
from dualpath_sglang.router.requests import PASSED_ON, BadRequestError, Incoming, Kind, parse
from dualpath_sglang.router.sessions import Sessions, Warm
from dualpath_sglang.router.shared import Shared
from dualpath_sglang.router.tokens import TokenEstimator
from dualpath_sglang.router.upstream import Answer, UpstreamError, prompt_tokens
from dualpath_sglang.scheduling.engines import Request

logger = logging.getLogger(__name__)

_MOST_PARSED = 1 << 20
"""A longer prefill answer is not looked at for token counts."""
_LARGE = 1 << 18
"""Bytes of a body that is not taken apart on the event loop: 50 MB of token ids take seconds."""
_GONE = 499
_STALL_S = 120.0
"""A client that reads nothing for so long is gone."""
_READ_S = 120.0
"""Nor may the body of a request take longer."""
PREFILL_HEADER = "x-dualpath-prefill"
DECODE_HEADER = "x-dualpath-decode"
READ_HEADER = "x-dualpath-read"
"""Of an answer: the engines that served it, and the nodes that were to read its hit."""


@dataclass(slots=True, eq=False)
class Active:
    """A request under way.

    Args:
        number: its turn.
        attempt: None while it waits for the first time.
        aborted: whether the client has said so.
    """

    incoming: Incoming
    number: int
    attempt: Attempt | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What a forwarder works with."""

    registry: Registry
    dispatcher: Dispatcher
    poller: LoadPoller
    session: aiohttp.ClientSession
    aborter: Aborter
    sessions: Sessions
    shared: Shared | None
    metrics: Metrics
    options: RouterOptions


class Forwarder:
    """Serves requests."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tokens = TokenEstimator()
        self._active: set[Active] = set()
        self._by_rid: dict[str, Active] = {}
        self._large = asyncio.Semaphore(1)

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._active)

    async def serve(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """One request of a client."""
        began = time.monotonic()
        outcome = "cancelled"
        try:
            try:
                incoming = await self._parsed(kind, await self._body(request), request.headers)
            except BadRequestError as error:
                outcome = "bad_request"
                return error_response(kind, error.status, error.message, error.param)
            except TimeoutError:
                outcome = "bad_request"
                return error_response(kind, 408, "The body of the request did not come in time")
            active = Active(incoming, self._parts.dispatcher.number())
            self._begin(active)
            try:
                response, outcome = await self._serve(request, active, began)
                return response
            finally:
                self._end(active)
        finally:
            self._parts.metrics.requests.labels(kind, outcome).inc()

    async def _body(self, request: web.Request) -> bytes:
        """The body, which is not kept by the request: prompts are long, and answers take time.

        Raises:
            HTTPRequestEntityTooLarge, TimeoutError: so it is.
        """
        most, body = self._parts.options.max_body, bytearray()
        async with asyncio.timeout(_READ_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(most)
        return bytes(body)

    async def _parsed(self, kind: Kind, raw: bytes, headers: Mapping[str, str]) -> Incoming:
        """What :func:`parse` says; a large body holds up nobody else."""
        if len(raw) <= _LARGE:
            return parse(kind, raw, headers)
        async with self._large:
            return await asyncio.to_thread(parse, kind, raw, headers)

    def abort(self, rid: str) -> bool:
        """Have a request given up; whether there is one with that id."""
        active = self._by_rid.get(rid)
        if active is None:
            return False
        active.aborted = True
        if active.attempt is not None:
            active.attempt.abort()
        self._parts.dispatcher.withdraw(active.number)
        return True

    def _begin(self, active: Active) -> None:
        self._active.add(active)
        for rid in active.incoming.rids:
            self._by_rid[rid] = active

    def _end(self, active: Active) -> None:
        self._active.discard(active)
        self._name(active, active.attempt, None)
        for rid in active.incoming.rids:
            if self._by_rid.get(rid) is active:
                del self._by_rid[rid]

    def _name(self, active: Active, before: Attempt | None, now: Attempt | None) -> None:
        """What engines call it is what its answer calls it, so it can be aborted by that too."""
        for rid in before.rids if before is not None else ():
            self._by_rid.pop(rid, None)
        for rid in now.rids if now is not None else ():
            self._by_rid[rid] = active
        active.attempt = now

    async def _serve(
        self, request: web.Request, active: Active, began: float
    ) -> tuple[web.StreamResponse, str]:
        parts, incoming = self._parts, active.incoming
        kind = incoming.kind
        asked, found = self._request(incoming)
        excluded: frozenset[str] = frozenset()
        last: UpstreamError | None = None
        for count in range(parts.options.attempts):
            if active.aborted:
                return error_response(kind, _GONE, "The request was aborted"), "aborted"
            asked = replace(asked, id=f"{active.number}.{count}", excluded=excluded)
            try:
                seat = await parts.dispatcher.place(asked, active.number)
            except NoPlaceError as error:
                message = error.message if last is None else f"{last.message}; then: {error}"
                return error_response(kind, error.status, message), error.kind
            attempt: Attempt | None = None
            try:
                self._placed(asked, seat, began if not count else None)
                attempt = self._attempt(request, incoming, seat)
                self._name(active, active.attempt, attempt)
                got = await attempt.begin()
                parts.metrics.first_seconds.observe(time.monotonic() - began)
                if not (isinstance(got, Answer) and got.refused):
                    self._remember(asked, incoming, seat, found)
                response: web.StreamResponse
                if isinstance(got, Answer):
                    response = _whole(got, self._told(seat))
                    outcome = "refused" if got.refused else "ok"
                else:
                    response, outcome = await self._stream(request, attempt, got)
                return response, "aborted" if active.aborted else outcome
            except UpstreamError as error:
                last = error
                excluded |= self._blame(error, seat, attempt)
            finally:
                if attempt is not None:
                    attempt.close()
                parts.dispatcher.release(seat)
            if count + 1 < parts.options.attempts:
                parts.metrics.retries.inc()
        assert last is not None
        status = last.status if last.status in (500, 503) else 502
        return error_response(kind, status, f"{last.message} (tried {count + 1} times)"), "failed"

    # -- where to -----------------------------------------------------------------------------

    def _request(self, incoming: Incoming) -> tuple[Request, int | None]:
        """The request as scheduling sees it, and the key under which its session stood."""
        options = self._parts.options
        tokens = incoming.size if incoming.exact else self._tokens.estimate(incoming.size)
        most = options.output_tokens * incoming.items
        output = most if incoming.output_tokens is None else min(most, incoming.output_tokens)
        # Whether it fits is for the engine to say, which counts its tokens.
        room = [
            e.load.capacity_tokens
            for e in self._parts.registry.ready("decode")
            if e.load is not None and e.load.capacity_tokens
        ]
        if room and tokens + output > max(room):
            output = max(0, min(output, max(room) - tokens))
            tokens = min(tokens, max(room))
        key, warm = self._find(incoming)
        known = 0 if warm is None else min(warm.tokens, tokens)
        asked = Request("", tokens, known, output)
        if warm is not None and time.monotonic() - warm.at < options.warm_s:
            asked = replace(
                asked, warm_prefill=warm.prefill, warm_decode=warm.decode, warm_tokens=known
            )
        return asked, key

    def _find(self, incoming: Incoming) -> tuple[int | None, Warm | None]:
        sessions = self._parts.sessions
        if incoming.session:
            keys = [incoming.session]
        else:
            keys = [boundary.key for boundary in incoming.boundaries]
            if incoming.user:
                keys.insert(0, incoming.user)
        found = sessions.find(keys)
        return (None, None) if found is None else found

    def _remember(self, asked: Request, incoming: Incoming, seat: Seat, found: int | None) -> None:
        """It was served there."""
        tokens = asked.tokens
        if incoming.session:
            key = incoming.session
        elif incoming.boundaries:
            last = incoming.boundaries[-1]
            key = last.key
            tokens = round(tokens * min(1.0, last.size / max(1, incoming.size)))
        else:
            return
        warm = Warm(seat.prefill.name, seat.decode.name, tokens)
        if found == incoming.user:
            found = None
        self._parts.sessions.remember(key, warm, found)
        if incoming.user and not incoming.session:
            self._parts.sessions.remember(incoming.user, warm)
        if self._parts.shared is not None:
            self._parts.shared.say(key, warm)

    def _placed(self, asked: Request, seat: Seat, began: float | None) -> None:
        metrics, placement = self._parts.metrics, seat.placement
        metrics.placements.labels(placement.prefill, placement.decode).inc()
        if began is not None:
            metrics.queue_seconds.observe(time.monotonic() - began)
        if asked.warm_tokens:
            went = [n for n in ("prefill", "decode") if getattr(placement, f"warm_{n}")]
            metrics.warm.labels("both" if len(went) == 2 else went[0] if went else "none").inc()
        if placement.read_tokens:
            for node, weight in placement.shares:
                metrics.read_tokens.labels(node).inc(weight * placement.read_tokens)

    def _attempt(self, request: web.Request, incoming: Incoming, seat: Seat) -> Attempt:
        parts = self._parts
        return Attempt(
            parts.session,
            parts.aborter,
            seat,
            incoming,
            self._hint(seat),
            self._headers(request.headers),
            lambda answer: self._learn(incoming, answer),
            lambda: parts.dispatcher.release_prefill(seat),
            parts.options.prefill_timeout_s,
        )

    def _hint(self, seat: Seat) -> ReadHint | None:
        """Who is to read, if servers can be told: they know nodes by name."""
        if self._parts.options.path == "free":
            return None
        if not (seat.prefill.spec.node and seat.decode.spec.node):
            return None
        try:
            return ReadHint(seat.placement.shares)
        except ValueError:
            return None

    def _told(self, seat: Seat) -> dict[str, str]:
        """Where a request went, for the client's log: names of engines, and of who reads."""
        hint = self._hint(seat)
        nodes = () if hint is None else [quote(name) for name, _ in hint.shares]
        return {
            PREFILL_HEADER: seat.prefill.name,
            DECODE_HEADER: seat.decode.name,
            READ_HEADER: ",".join(nodes),
        }

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        passed = {name: headers[name] for name in PASSED_ON if name in headers}
        passed["Content-Type"] = "application/json"
        options = self._parts.options
        key = options.engine_key if options.lend_engine_key else ""
        if key and "Authorization" not in passed:
            passed["Authorization"] = f"Bearer {key}"
        return passed

    # -- and back -----------------------------------------------------------------------------

    def _learn(self, incoming: Incoming, answer: Answer) -> None:
        if len(answer.body) > _MOST_PARSED:
            return
        tokens, cached = prompt_tokens(answer.body)
        self._parts.metrics.prompt_tokens.inc(tokens)
        self._parts.metrics.cached_tokens.inc(cached)
        if tokens:
            self._parts.dispatcher.hits.learn(tokens, cached)
        if not incoming.exact:
            self._tokens.learn(incoming.size, tokens)

    def _blame(self, error: UpstreamError, seat: Seat, attempt: Attempt | None) -> frozenset[str]:
        """Engines that are not to be tried again."""
        parts = self._parts
        engine = seat.prefill if error.role == "prefill" else seat.decode
        parts.metrics.failures.labels(error.role, error.failure).inc()
        logger.debug("%s failed a request: %s", engine.name, error.message)
        if error.failure == "refused":
            parts.registry.refused(engine, "nobody listens there", at_once=True)
        elif error.failure in ("connect", "lost"):
            parts.poller.ask_now(engine)
        answered = attempt is not None and attempt.prefill_answered
        either = error.role == "decode" and error.failure in ("status", "abort") and not answered
        if either or error.failure == "late":
            return frozenset((seat.prefill.name, seat.decode.name))  # either may be at fault
        return frozenset((engine.name,))

    async def _stream(
        self, request: web.Request, attempt: Attempt, stream: Stream
    ) -> tuple[web.StreamResponse, str]:
        response = web.StreamResponse(
            headers={
                "Content-Type": stream.content_type,
                "Cache-Control": "no-cache",
                **self._told(attempt.seat),
            }
        )
        await response.prepare(request)
        outcome = "ok"
        try:
            async for chunk in attempt.chunks(stream):
                async with asyncio.timeout(_STALL_S):
                    await response.write(chunk)
        except TimeoutError:
            outcome = "cancelled"
            raise ConnectionResetError("The client does not read") from None
        except UpstreamError as error:
            outcome = "broken"
            engine = attempt.seat.prefill if error.role == "prefill" else attempt.seat.decode
            self._parts.metrics.broken_streams.labels(error.role).inc()
            self._parts.poller.ask_now(engine)
            await response.write(error_event(error.role, error.message))
        await response.write_eof()
        return response, outcome


def _whole(answer: Answer, told: Mapping[str, str]) -> web.Response:
    headers = {"Content-Type": answer.content_type, **told}
    return web.Response(body=answer.body, status=answer.status, headers=headers)


def rid_of(raw: bytes) -> str:
    """The id in the body of ``/abort_request``.

    Raises:
        BadRequestError: there is none.
    """
    try:
        body = orjson.loads(raw)
    except ValueError:
        body = None
    rid = body.get("rid") if isinstance(body, dict) else None
    if not isinstance(rid, str) or not rid:
        raise BadRequestError('The body must be {"rid": "..."}', "rid")
    return rid
