"""What must not go wrong in a router: found by review, each once a fault."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import pytest

from dualpath_sglang.router.upstream import failed
from tests.router.bed import asynchronous, bed


def connector_error(number: int) -> aiohttp.ClientConnectorError:
    key: Any = None
    return aiohttp.ClientConnectorError(key, OSError(number, "so"))


def test_only_a_refusal_says_that_nobody_is_there() -> None:
    assert failed("decode", connector_error(errno.ECONNREFUSED)).failure == "refused"
    # Our own lack of descriptors or ports, or a slow handshake, is no death of an engine.
    for ours in (
        connector_error(errno.EMFILE),
        connector_error(errno.EADDRNOTAVAIL),
        aiohttp.ConnectionTimeoutError(),
    ):
        assert failed("decode", ours).failure == "connect"


@pytest.mark.parametrize("polls", [False, True])
@asynchronous
async def test_a_router_without_file_descriptors_does_not_take_engines_for_dead(
    polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(dead_after_s=20.0, attempts=1) as b:
        session = b.router._session
        real: Any = session._request

        async def out_of_descriptors(method: str, url: Any, **given: Any) -> Any:
            if "/v1/loads" in str(url) and not polls:
                return await real(method, url, **given)
            raise connector_error(errno.EMFILE)

        monkeypatch.setattr(session, "_request", out_of_descriptors)
        assert (await b.generate())[0] == 503
        await asyncio.sleep(0.3)
        assert not any(engine.dead for engine in b.router.registry)
        assert await b.metric("dualpath_router_engine_deaths_total") == 0
        monkeypatch.undo()
        assert (await b.generate())[0] == 200


