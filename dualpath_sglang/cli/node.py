"""``dualpath node``: the agent of this machine."""

from __future__ import annotations

import json
import logging
import math
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated

import typer

from dualpath_sglang.cli.shared import ConfigFile, Root, Verbose, configuration, fail, plain
from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.node.options import NodeError

_LOG_BYTES = 1 << 20
_FORM = "%(asctime)s %(levelname)s: %(message)s"


@plain
def node(
    root: Root = None,
    config_file: ConfigFile = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="How long fetches may take to end after SIGTERM."
        ),
    ] = 30.0,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Where another agent runs, wait until it ends; else that ends the command.",
        ),
    ] = False,
    verbose: Verbose = False,
    auto: Annotated[bool, typer.Option("--auto", hidden=True)] = False,
    idle_timeout: Annotated[float, typer.Option(hidden=True, min=0.1)] = 30.0,
    settings_on_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
    log_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run this machine's agent: it reads for other nodes what they ask for, and passes it on.

    Servers start one by themselves where `node` is "auto". Where your service manager does, set it
    to "off". Ends on SIGTERM when the fetches under way have ended; at once on a second one.
    """
    _begin_log(log_file, verbose)
    config = _handed_over() if settings_on_stdin else configuration(root, config_file)
    options = config.node_options()
    if options is None:
        fail(
            "The index is a file of this machine alone, so no other node can ask for anything: an "
            "agent needs the index in Redis"
        )
    from dualpath_sglang.node.process import NodeProcess, RunOptions

    how = RunOptions(
        wait_s=math.inf if wait else 0.0,
        drain_s=drain_timeout,
        idle_s=idle_timeout if auto else None,
    )
    try:
        status = NodeProcess(config, options, how).run()
    except NodeError as error:
        fail(str(error))
    raise typer.Exit(status)


def _handed_over() -> DualPathConfig:
    """The settings of the server that starts this process. They hold passwords, hence the pipe."""
    try:
        return DualPathConfig.load(json.loads(sys.stdin.read()))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        fail("The settings on the standard input are no JSON")


def _begin_log(file: Path | None, verbose: bool) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        handler = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1)
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format=_FORM, handlers=[handler]
    )
