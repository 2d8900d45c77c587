"""What the commands have in common: options, opening a store, sentences, tables, JSON.

Exit statuses: 0 all is well, 1 damage was found and is still there, 2 it could not be done.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.index import IndexUnavailableError
from dualpath_sglang.kvcache import KVCache
from dualpath_storage import StoreError
from dualpath_storage.paths import geometry_directories

EXIT_DAMAGE = 1
EXIT_UNABLE = 2

REASONS = {
    "checksum": "the payload is not what was written",
    "header": "the header is not valid",
    "generation": "another block stands in the slot",
    "short": "the segment ends too early",
    "missing": "the segment is gone",
    "io_error": "the device cannot read it",
    "timeout": "not read in time",
    "geometry": "the directory's geometry file cannot be read",
}
"""What is wrong with a block, by reason."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        "-r",
        help="Directory of the store.  [env: DUALPATH_ROOT, or root in the configuration file]",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file (TOML).  [env: DUALPATH_CONFIG_FILE]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the log of the store too.")]


def plain(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """End a failing command with a sentence and a status instead of a traceback."""

    @functools.wraps(command)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except (ConfigError, StoreError, IndexUnavailableError) as error:
            fail(str(error))
        except BrokenPipeError:
            raise  # the reader of the output has seen enough, which typer ends quietly
        except OSError as error:
            fail(f"{error}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return guarded


def fail(sentence: str) -> NoReturn:
    """Say why it could not be done, and end."""
    say(f"dualpath: {sentence.rstrip('.')}.")
    raise typer.Exit(EXIT_UNABLE)


def ask(question: str, *, as_json: bool) -> None:
    """Remove something only if the person at the terminal says yes; without one, say how to."""
    if as_json or not sys.stdin.isatty():
        fail(f"{question} Say --yes to do it without being asked")
    if not typer.confirm(question):
        say("Nothing was removed.")
        raise typer.Exit(0)


def say(text: str) -> None:
    """A line for the person at the terminal, kept out of what is piped on."""
    typer.echo(text, err=True)


def configuration(root: Path | None, config_file: Path | None) -> DualPathConfig:
    """The settings with the command line on top.

    Raises:
        ConfigError: a setting is unknown or malformed.
    """
    extra: dict[str, Any] = {}
    if root is not None:
        extra["root"] = root
    if config_file is not None:
        extra["config_file"] = str(config_file)
    return DualPathConfig.load(extra)


def store_root(config: DualPathConfig) -> Path:
    """The root of an existing store: none is ever made by looking for it.

    Raises:
        StoreError: there is none.
    """
    root = config.root.expanduser().absolute()
    if not root.is_dir():
        raise StoreError(f"There is no store at {root}")
    if not config.index_source().exists(root) and not geometry_directories(root):
        raise StoreError(f"{root} is a directory, but no store of DualPath")
    return root


@contextlib.contextmanager
def opened(config: DualPathConfig, *, write: bool, verbose: bool) -> Iterator[KVCache]:
    """The existing store of a configuration.

    Args:
        write: open it as a server does, which rebuilds a damaged index; else change nothing.

    Raises:
        StoreError: there is no store, or it cannot be used as asked.
    """
    level = logging.INFO if verbose else logging.CRITICAL
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    root = store_root(config)
    if write and config.read_only:
        raise StoreError("The configuration says read_only, so nothing is changed")
    options = replace(config.store_options(), root=root, read_only=not write)
    with KVCache(options, index=config.index_source()) as cache:
        yield cache


def print_json(value: Any, *, line: bool = False) -> None:
    """One object, as it is; on one line when many follow each other."""
    typer.echo(json.dumps(value, indent=None if line else 1))


def print_line(text: str) -> None:
    """A line that is never wrapped: keys and paths stay whole."""
    typer.echo(text)


def print_table(table: Table) -> None:
    """A table as wide as the terminal, or as it needs when there is none."""
    width = None if Console().is_terminal else 400
    console = Console(highlight=False, markup=False, emoji=False, width=width)  # names are names
    console.print(table)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; ``numbers`` names the columns that are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def ago(when_us: int) -> str:
    """Time since a moment in microseconds since 1970."""
    if when_us <= 0:
        return "never"
    seconds = max(0.0, time.time() - when_us / 1e6)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def many(count: int, noun: str) -> str:
    """``1 block``, ``2,000 blocks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
