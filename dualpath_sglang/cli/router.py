"""``dualpath router``: the front door of prefill and decode servers."""

from __future__ import annotations

import importlib.util
import logging
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dualpath_sglang.cli.shared import ConfigFile, Root, Verbose, fail, plain
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.router.options import EngineSpec, OptionsError, RouterOptions

_FORM = "%(asctime)s %(levelname)s: %(message)s"
_NEEDED = ("aiohttp", "orjson", "prometheus_client")
_ENGINE = "URL[,bootstrap_port=N][,node=NAME]"


class PolicyName(Enum):
    """Of ``--policy``."""

    dualpath = "dualpath"
    round_robin = "round_robin"


class PathName(Enum):
    """Of ``--path``."""

    free = "free"
    shorter_queue = "shorter_queue"
    split = "split"
    pe = "pe"
    de = "de"


@plain
def router(
    prefill: Annotated[
        list[str] | None,
        typer.Option("--prefill", metavar=_ENGINE, help="A prefill server; may stand repeatedly."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            "--decode", metavar="URL[,node=NAME][,group=NAME]", help="A decode server; likewise."
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index", help="Redis in which servers and agents report, as the setting `index`."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any.")] = 8000,
    group: Annotated[
        str, typer.Option(help="Routers of one group on one Redis share engines and sessions.")
    ] = "default",
    model: Annotated[
        str, typer.Option(help="Name of the served model.  [default: the first server's]")
    ] = "",
    policy: Annotated[
        PolicyName, typer.Option(help="How requests are placed.")
    ] = PolicyName.dualpath,
    path: Annotated[
        PathName, typer.Option(help="Who reads a hit; `free` leaves it to the servers.")
    ] = PathName.shorter_queue,
    affinity: Annotated[
        bool, typer.Option(help="Sessions return to where their prefix is warm, when it pays.")
    ] = True,
    warm_for: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that engines are believed to keep a prefix in memory."),
    ] = 600.0,
    alpha: Annotated[float, typer.Option(min=0.0, help="The paper's alpha, seconds.")] = 3.0,
    beta: Annotated[float, typer.Option(min=0.0, help="The paper's beta, seconds.")] = 5.0,
    read_rate: Annotated[
        float | None,
        typer.Option(min=1.0, help="Tokens/s that a node reads, until measured.  [default: none]"),
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=1.0, help="Tokens/s of a prefill server, until measured."),
    ] = None,
    poll_interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds between questions for an engine's load.")
    ] = 0.25,
    dead_after: Annotated[
        float, typer.Option(min=0.1, help="Seconds without an answer: an engine is dead.")
    ] = 6.0,
    stuck_after: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds without news of a busy scheduler: likewise."),
    ] = 30.0,
    queue_limit: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 10_000,
    queue_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds one may wait.")] = 60.0,
    engine_wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds one may wait while no engine is ready.")
    ] = 8.0,
    attempts: Annotated[int, typer.Option(min=1, help="How often a request is placed.")] = 3,
    prefill_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a prefill may take, transfer included.")
    ] = 90.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for requests to end after SIGTERM.")
    ] = 30.0,
    reserve_output: Annotated[
        int, typer.Option(min=0, help="Tokens reserved for an answer at most.")
    ] = 1024,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that are remembered.")] = 100_000,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request at most.")] = 64 << 20,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="DUALPATH_ROUTER_ADMIN_KEY", help="Needed to change engines."),
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="Its first line is the admin key.")
    ] = None,
    engine_key_file: Annotated[
        Path | None,
        typer.Option(help="Its first line is the API key of the servers, for the router itself."),
    ] = None,
    lend_engine_key: Annotated[
        bool,
        typer.Option(
            "--lend-engine-key", help="Also send it with requests of clients that send none."
        ),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write each round of placement to this file.")
    ] = None,
    root: Root = None,
    config_file: ConfigFile = None,
    verbose: Verbose = False,
) -> None:
    """Run a router: it takes requests for /generate and OpenAI's endpoints, and gives each to a
    prefill and a decode server.

    Ends on SIGTERM when the requests under way have ended; at once on a second one.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"The router needs {', '.join(missing)}: pip install 'dualpath-sglang[router]'")
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, format=_FORM)
    extra = {"root": root, "config_file": config_file, "index": index}
    config = DualPathConfig.load({k: str(v) for k, v in extra.items() if v is not None})
    key = _first_line(admin_key_file) if admin_key_file is not None else admin_key
    try:
        engines = [EngineSpec.parse(text, "prefill") for text in prefill or ()]
        engines += [EngineSpec.parse(text, "decode") for text in decode or ()]
        options = RouterOptions(
            host=host,
            port=port,
            engines=tuple(engines),
            group=group,
            model=model,
            policy=policy.value,
            path=path.value,
            affinity=affinity,
            warm_s=warm_for,
            alpha_s=alpha,
            beta_s=beta,
            read_rate=read_rate,
            prefill_rate=prefill_rate,
            poll_interval_s=poll_interval,
            dead_after_s=dead_after,
            stuck_after_s=stuck_after,
            queue_limit=queue_limit,
            queue_timeout_s=queue_timeout,
            engine_wait_s=engine_wait,
            attempts=attempts,
            prefill_timeout_s=prefill_timeout,
            drain_timeout_s=drain_timeout,
            max_body=max_body,
            output_tokens=reserve_output,
            sessions=sessions,
            admin_key=key or "",
            engine_key="" if engine_key_file is None else _first_line(engine_key_file),
            lend_engine_key=lend_engine_key,
            record="" if record is None else str(record),
        )
    except OptionsError as error:
        fail(str(error))
    from dualpath_sglang.router.process import run

    run(options, None if config.index == "embedded" else config)


def _first_line(path: Path) -> str:
    lines = path.read_text().splitlines()
    if not lines or not lines[0]:
        fail(f"{path} is empty")
    return lines[0]
