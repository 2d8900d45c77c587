"""Puts the commands together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from dualpath_sglang.cli.adopt import adopt
from dualpath_sglang.cli.care import clear, scan, verify
from dualpath_sglang.cli.node import node
from dualpath_sglang.cli.profile import profile
from dualpath_sglang.cli.qos import qos
from dualpath_sglang.cli.quota import quota
from dualpath_sglang.cli.router import router
from dualpath_sglang.cli.settings import config
from dualpath_sglang.cli.show import inspect, status
from dualpath_sglang.cli.sizing import sizing

app = typer.Typer(
    name="dualpath",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at a DualPath store, check it, mend it, empty it; run the agent of a machine. Every "
    "command may run beside servers that use the store.",
    epilog="Exit status: 0 all is well, 1 damage was found and is still there, 2 it could not be "
    "done.",
)
COMMANDS = (
    *(status, verify, scan, clear, quota, adopt, inspect, config, node, router),
    *(profile, qos, sizing),
)
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"dualpath {version('dualpath-sglang')}")
        except PackageNotFoundError:
            typer.echo("dualpath (not installed)")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version
