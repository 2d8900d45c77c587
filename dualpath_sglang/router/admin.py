"""Engines join, leave and drain: by a call, by what they report, or at another router."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from dualpath_sglang.router.engines import Registry
from dualpath_sglang.router.errors import error_response
from dualpath_sglang.router.loads import LoadPoller
from dualpath_sglang.router.options import EngineSpec, OptionsError, RouterOptions
from dualpath_sglang.router.shared import Shared

logger = logging.getLogger(__name__)


class Membership:
    """Which engines there are, from all that say so.

    What was said by a call counts before what engines report and before the command line, until it
    is said otherwise by a call; routers on one Redis share it.
    """

    def __init__(self, registry: Registry, poller: LoadPoller, shared: Shared | None) -> None:
        self._registry = registry
        self._poller = poller
        self.shared = shared
        self._records: dict[str, Mapping[str, object]] = {}
        self._reported: dict[str, EngineSpec] = {}
        self._flags: dict[str, EngineSpec] = {}

    def given(self, specs: Iterable[EngineSpec]) -> None:
        """Of the command line."""
        self._flags = {spec.name: spec for spec in specs}
        self._settle()

    def reported(self, specs: Mapping[str, EngineSpec]) -> None:
        """What engines say of themselves. One that says nothing any more stays while it answers."""
        for name in set(self._reported) - set(specs):
            engine = self._registry.get(name)
            if engine is None or engine.dead:
                del self._reported[name]
        self._reported.update(specs)
        self._settle()

    def heard(self, records: Mapping[str, Mapping[str, object]]) -> None:
        """What was said by a call, at any router.

        Records are never deleted. One that is missing was lost, with Redis' memory or with the
        key, and is told again.
        """
        lost = {name: record for name, record in self._records.items() if name not in records}
        if self.shared is not None:
            for name, record in lost.items():
                self.shared.put_engine(name, record)
        self._records = {**lost, **records}
        self._settle()

    def join(self, spec: EngineSpec) -> None:
        """By a call."""
        self._say(spec.name, {**spec.as_json(), "state": "ready"})

    def drain(self, name: str) -> bool:
        """By a call; whether there is such an engine."""
        engine = self._registry.get(name)
        if engine is None:
            return False
        self._say(name, {**engine.spec.as_json(), "state": "draining"})
        return True

    def remove(self, name: str) -> bool:
        """By a call; whether there was such an engine."""
        engine = self._registry.get(name)
        if engine is None:
            return False
        self._say(name, {**engine.spec.as_json(), "state": "removed"})
        return True

    def _say(self, name: str, record: Mapping[str, object]) -> None:
        self._records[name] = record
        if self.shared is not None:
            self.shared.put_engine(name, record)
        self._settle()

    def _settle(self) -> None:
        """Make the registry what all of them say."""
        wanted: dict[str, tuple[EngineSpec, Any]] = {}
        for name, spec in self._flags.items():
            wanted[name] = (spec, "flags")
        for name, spec in self._reported.items():
            known = wanted.get(name)
            if known is None:
                wanted[name] = (spec, "index")
            elif not known[0].node:
                wanted[name] = (replace(spec, group=known[0].group), known[1])
        draining = set()
        for name, record in self._records.items():
            state = record.get("state")
            if state == "removed":
                wanted.pop(name, None)
                continue
            fields = {k: v for k, v in record.items() if k != "state"}
            try:
                spec = EngineSpec.of(fields)
            except OptionsError:
                continue
            if spec.name != name:
                continue
            known = wanted.get(name)
            if known is None or state == "ready":
                node = spec.node or (known[0].node if known else "")
                wanted[name] = (replace(spec, node=node), "admin")
            if state == "draining":
                draining.add(name)
        for engine in self._registry:
            if engine.name not in wanted:
                self._registry.remove(engine.name, "nobody names it any more")
        for name, (spec, source) in wanted.items():
            engine = self._registry.add(spec, source)
            self._registry.drain(engine, name in draining)
        self._poller.follow()


class AdminApi:
    """The endpoints of :class:`Membership`."""

    def __init__(self, registry: Registry, membership: Membership, options: RouterOptions) -> None:
        self._registry = registry
        self._membership = membership
        self._key = options.admin_key

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        return [
            web.get("/engines", self.list_engines),
            web.post("/engines", self.join),
            web.delete("/engines/{name}", self.remove),
            web.post("/engines/{name}/drain", self.drain),
        ]

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self._key:
            if _is_here(request.remote):
                return None
            return error_response(
                None, 403, "From another machine this needs a router with an admin key"
            )
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        sent = given.encode("utf-8", "surrogateescape")  # whatever bytes the client chose
        if hmac.compare_digest(sent, self._key.encode()):
            return None
        return error_response(None, 401, "This needs the router's admin key as bearer token")

    async def list_engines(self, request: web.Request) -> web.Response:
        """All engines and what is known of them."""
        del request
        return web.json_response({"engines": [engine.as_json() for engine in self._registry]})

    async def join(self, request: web.Request) -> web.Response:
        """An engine joins, or takes requests again."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            fields = orjson.loads(await request.read())
            if not isinstance(fields, dict):
                raise OptionsError("The body must be a JSON object")
            spec = EngineSpec.of(fields)
        except orjson.JSONDecodeError as error:
            return error_response(None, 400, f"The body is no JSON: {error}")
        except OptionsError as error:
            return error_response(None, 400, str(error))
        self._membership.join(spec)
        return self._told(spec.name)

    async def remove(self, request: web.Request) -> web.Response:
        """An engine leaves at once; its requests are placed again."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        name = request.match_info["name"]
        if not self._membership.remove(name):
            return self._unknown(name)
        return web.json_response({"name": name, "state": "removed"})

    async def drain(self, request: web.Request) -> web.Response:
        """An engine gets nothing new."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        name = request.match_info["name"]
        if not self._membership.drain(name):
            return self._unknown(name)
        return self._told(name)

    def _told(self, name: str) -> web.Response:
        engine = self._registry.get(name)
        return self._unknown(name) if engine is None else web.json_response(engine.as_json())

    @staticmethod
    def _unknown(name: str) -> web.Response:
        return error_response(None, 404, f"There is no engine {name}")


def _is_here(address: str | None) -> bool:
    """Whether a caller is on this machine."""
    try:
        return ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False
