"""The HTTP server of a router, and everything it is made of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.index.source import RedisSource
from dualpath_sglang.router.admin import AdminApi, Membership
from dualpath_sglang.router.attempt import Aborter
from dualpath_sglang.router.dispatch import Dispatcher
from dualpath_sglang.router.engines import Engine, Registry
from dualpath_sglang.router.errors import error_response
from dualpath_sglang.router.forward import Forwarder, Parts, rid_of
from dualpath_sglang.router.loads import LoadPoller
from dualpath_sglang.router.metrics import Gauges, Metrics
from dualpath_sglang.router.nodes import IndexReports, ReadQueues, engines_among
from dualpath_sglang.router.options import RouterOptions
from dualpath_sglang.router.requests import PATHS, BadRequestError, Kind
from dualpath_sglang.router.sessions import Sessions
from dualpath_sglang.router.shared import Shared
from dualpath_sglang.router.trace import Recorder

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 2.0
"""Shorter than uvicorn's 5 s: no engine ends a connection just as it is used again."""
_CLIENT_KEEP_ALIVE_S = 3600.0
_MODELS_S = 10.0
_CHUNK_BYTES = 1 << 18

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """A router, to be used within its context, on an event loop.

    Args:
        config: names the index in Redis, where there is one.
    """

    def __init__(self, options: RouterOptions, config: DualPathConfig | None = None) -> None:
        self.options = options
        self._config = config
        self.registry = Registry(options.model)
        self.reads = ReadQueues()
        self.sessions = Sessions(options.sessions)
        self._ending = False

    async def __aenter__(self) -> Router:
        self._stack = contextlib.AsyncExitStack()
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self) -> None:
        _allow_connections()
        options = self.options
        recorder = None
        if options.record:
            recorder = Recorder(Path(options.record))
            self._stack.callback(recorder.close)
        self.dispatcher = Dispatcher(self.registry, self.reads, options, recorder)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=60)
        session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
            auto_decompress=False,
            read_bufsize=_CHUNK_BYTES,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        await self._stack.enter_async_context(session)
        self.metrics = Metrics(
            self.registry,
            Gauges(
                waiting=lambda: len(self.dispatcher),
                active=lambda: len(self.forwarder),
                sessions=lambda: len(self.sessions),
                rounds=lambda: self.dispatcher.rounds,
                read_queues=self.reads.queues,
                index_answers=self.index_answers,
            ),
        )
        self.registry.on_death = self._on_death
        poller = LoadPoller(
            self.registry, session, options, lambda s: self.metrics.poll_seconds.observe(s)
        )
        self._stack.push_async_callback(poller.close)
        self._session = session
        key = options.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.aborter = Aborter(session, headers)
        self._stack.push_async_callback(self.aborter.close)
        self.membership = Membership(self.registry, poller, None)
        self._reports: IndexReports | None = None
        self._shared = self._share()
        self.membership.given(options.engines)
        self.forwarder = Forwarder(
            Parts(
                self.registry,
                self.dispatcher,
                poller,
                session,
                self.aborter,
                self.sessions,
                self._shared,
                self.metrics,
                options,
            )
        )

    def _share(self) -> Shared | None:
        """Begin to listen to Redis, where there is one."""
        source = None if self._config is None else self._config.index_source()
        if self._config is None or not isinstance(source, RedisSource):
            return None
        shared = Shared(
            source.settings, self.options.group, self.membership.heard, self.sessions.remember
        )
        self.membership.shared = shared
        shared.start()
        self._stack.push_async_callback(shared.close)
        self._reports = IndexReports(self._config, self._learn)
        self._reports.start()
        self._stack.push_async_callback(self._reports.close)
        return shared

    def _learn(self, reports: object) -> None:
        told = list(reports.values()) if isinstance(reports, dict) else []
        self.reads.learn(told)
        self.membership.reported(engines_among(told))
        self.dispatcher.changed()

    def _on_death(self, engine: Engine) -> None:
        self.metrics.deaths.labels(engine.name).inc()

    def index_answers(self) -> bool:
        """Whether all that is shared is up to date; true where nothing is."""
        reports = self._reports is None or bool(self._reports.answers)
        return reports and (self._shared is None or bool(self._shared.answers))

    # -- HTTP ---------------------------------------------------------------------------------

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application(
            client_max_size=self.options.max_body, middlewares=[self._plain_errors]
        )
        for kind, path in PATHS.items():
            app.router.add_post(path, self._serving(kind))
        app.add_routes(
            [
                web.post("/abort_request", self._abort),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                *AdminApi(self.registry, self.membership, self.options).routes(),
            ]
        )
        return app

    def end(self) -> None:
        """Take nothing new."""
        self._ending = True

    @web.middleware
    async def _plain_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        kind = next((k for k, path in PATHS.items() if path == request.path), None)
        if kind is None and request.path.startswith("/v1/"):
            kind = "chat"
        try:
            return await handler(request)
        except web.HTTPException as error:
            message = error.text or error.reason
            if error.status == 413:
                message = f"The body is larger than {self.options.max_body} bytes"
            elif error.status == 404:
                message = f"There is no {request.path} here"
            return error_response(kind, error.status, message)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("A request failed in the router")
            if request.writer.output_size:
                raise  # the answer has begun: only the end of the connection can tell
            return error_response(kind, 500, "The router failed; its log says how")

    def _serving(self, kind: Kind) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            if self._ending:
                response = error_response(kind, 503, "The router is shutting down")
                response.force_close()
                return response
            return await self.forwarder.serve(request, kind)

        return serve

    async def _abort(self, request: web.Request) -> web.Response:
        try:
            rid = rid_of(await request.read())
        except BadRequestError as error:
            return error_response(None, error.status, error.message)
        found = self.forwarder.abort(rid)
        return web.json_response({"rid": rid, "found": found})  # like SGLang, no error if not

    async def _models(self, request: web.Request) -> web.Response:
        headers = {}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        elif self.options.engine_key and self.options.lend_engine_key:
            headers["Authorization"] = f"Bearer {self.options.engine_key}"
        for engine in (*self.registry.ready("decode"), *self.registry.ready("prefill")):
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.get(
                    f"{engine.spec.url}/v1/models",
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=_MODELS_S),
                ) as answer:
                    body = await answer.read()
                    if answer.status < 500:
                        return web.Response(
                            body=body, status=answer.status, content_type="application/json"
                        )
        return error_response("chat", 503, "No server answers")

    async def _health(self, request: web.Request) -> web.Response:
        del request
        counts = {
            f"{role}_{'ready' if ready else 'known'}": len(
                self.registry.ready(role) if ready else self.registry.of(role)
            )
            for role in ("prefill", "decode")
            for ready in (True, False)
        }
        healthy = not self._ending and all(counts[f"{r}_ready"] for r in ("prefill", "decode"))
        told = {
            "status": "ending" if self._ending else "ok" if healthy else "no engines",
            **counts,
            "waiting": len(self.dispatcher),
            "active": len(self.forwarder),
            "index_answers": self.index_answers(),
        }
        return web.json_response(told, status=200 if healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self.metrics.text(), headers={"Content-Type": _PROMETHEUS})


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.asynccontextmanager
async def listening(router: Router) -> AsyncIterator[tuple[web.AppRunner, web.TCPSite, int]]:
    """Serve a router; the runner, the site, and the port.

    Raises:
        OSError: the address cannot be had.
    """
    runner = web.AppRunner(
        router.app(),
        handler_cancellation=True,  # a client that goes away ends its request
        access_log=None,
        keepalive_timeout=_CLIENT_KEEP_ALIVE_S,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, router.options.host, router.options.port, backlog=4096)
        await site.start()
        yield runner, site, runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _allow_connections() -> None:
    """As many as the system lets us have: each request takes three."""
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
