"""A router as a process: it serves until it is told to end, and then lets requests end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.router.app import Router, listening
from dualpath_sglang.router.options import RouterOptions

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
_HERE = ("127.0.0.1", "localhost", "::1")


def run(
    options: RouterOptions,
    config: DualPathConfig | None,
    started: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once.

    Args:
        started: called with the port, once it serves.

    Raises:
        OSError: the address cannot be had, or the record cannot be written.
    """
    _run(_serve(options, config, started))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(
    options: RouterOptions, config: DualPathConfig | None, started: Callable[[int], None]
) -> None:
    told = asyncio.Event()

    def end(number: int) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    async with Router(options, config) as router, listening(router) as (_, site, port):
        logger.info("The router serves at http://%s:%d", options.host, port)
        if not (options.admin_key or options.host in _HERE):
            logger.info("Without --admin-key only callers of this machine may change its engines")
        started(port)
        await told.wait()
        logger.info("The router takes nothing new and lets %d requests end", len(router.forwarder))
        router.end()
        with contextlib.suppress(RuntimeError):
            await site.stop()
        end_at = time.monotonic() + options.drain_timeout_s
        while len(router.forwarder) and time.monotonic() < end_at:
            await asyncio.sleep(_LOOK_EVERY_S)
        if len(router.forwarder):
            logger.warning("%d requests took too long, and are ended", len(router.forwarder))
    logger.info("The router ends")
