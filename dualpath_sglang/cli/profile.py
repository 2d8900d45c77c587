"""``dualpath profile``: how long a model's attention takes on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dualpath_sglang.cli.shared import (
    ConfigFile,
    Json,
    Root,
    configuration,
    fail,
    new_table,
    plain,
    print_json,
    print_line,
    print_table,
    say,
)
from dualpath_sglang.prefill import sweep
from dualpath_sglang.prefill.engine import EngineError, engine
from dualpath_sglang.prefill.fit import FitError, Point
from dualpath_sglang.prefill.profile import Profile, default_path
from dualpath_sglang.prefill.sweep import SweepError
from dualpath_sglang.prefill.trace import Header, read_header

_SHOWN = 12


@plain
def profile(
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- FLAGS",
            help="Launch flags of the server that is to have a quota, after two dashes.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure a server that runs already, with prefill_trace set, instead.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="With --url: the file that its prefill_trace names.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the profile.  [default: where servers look, under the root]",
            show_default=False,
        ),
    ] = None,
    most_context: Annotated[
        int, typer.Option(min=256, metavar="TOKENS", help="Longest context to measure.")
    ] = 32768,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each prompt is measured.")] = 3,
    most_error: Annotated[
        float,
        typer.Option(min=0.0, help="Median error above which the profile is not written."),
    ] = 0.15,
    start_timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="For the server to be ready.")
    ] = 1800.0,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Measure the attention of a model on this machine, for prefill_quota_s.

    Starts SGLang with your flags, sends prompts of many lengths, fits a prediction to the times
    of its batches, checks it on batches that were kept from the fit, and writes it to where
    servers look for it. Takes some minutes; the machine should have nothing else to do.

    dualpath profile -- --model-path Qwen/Qwen3-32B --tp-size 4
    """
    if bool(flags) == bool(url):
        fail("Say either the flags of a server, after two dashes, or --url of one that runs")
    if (url is None) != (trace is None):
        fail("--url and --trace go together")
    config = configuration(root, config_file)
    try:
        with _server(flags or [], url, trace, start_timeout) as (address, file, header):
            points = sweep.run(
                address,
                header,
                file,
                rounds=rounds,
                most_tokens=most_context,
                say=_progress,
                timeout_s=600.0,
            )
        made, checked = sweep.fitted(header, points)
    except (EngineError, SweepError, FitError) as error:
        fail(str(error))
    if not as_json:
        _print(made, checked)
    if made.error > most_error:
        fail(
            f"The prediction is off by {made.error:.0%} in the median, more than {most_error:.0%}, "
            "so it was not written: measure while the machine has nothing else to do, or allow "
            "more with --most-error"
        )
    path = out or default_path(config.root.expanduser().absolute(), header.key)
    made.save(path)
    if as_json:
        print_json({"path": str(path), **asdict(made)})
    else:
        print_line(f"Written to {path}.")


@contextlib.contextmanager
def _server(
    flags: list[str], url: str | None, trace: Path | None, start_timeout: float
) -> Iterator[tuple[str, Path, Header]]:
    if url is None or trace is None:
        with engine(flags, start_timeout, say) as started:
            yield started
        return
    header = read_header(trace)
    if header is None:
        fail(f"{trace} holds nothing: the server needs prefill_trace set to it")
    yield url, trace, header


def _progress(done: int, total: int) -> None:
    """A line that is written over, at a terminal."""
    if typer.get_text_stream("stderr").isatty():
        typer.echo(f"\r{done} of {total} requests", err=True, nl=done == total)
    elif done == total or done % max(1, total // 10) == 0:
        say(f"{done} of {total} requests")


def _print(made: Profile, checked: list[tuple[Point, float]]) -> None:
    key = made.key
    print_line(f"{key.model} on {key.device}, {key.attention_backend}, tp {key.tp}, {key.dtype}")
    table = new_table(
        *("requests", "cached", "new", "measured ms", "predicted ms", "error"),
        numbers=("requests", "cached", "new", "measured ms", "predicted ms", "error"),
    )
    for point, predicted in checked[:: max(1, len(checked) // _SHOWN)]:
        table.add_row(
            str(len(point.batch)),
            str(sum(work.cached for work in point.batch)),
            str(sum(work.new for work in point.batch)),
            f"{1000 * point.seconds:.2f}",
            f"{1000 * predicted:.2f}",
            f"{(predicted - point.seconds) / point.seconds:+.0%}",
        )
    print_table(table)
    factors = ", ".join(f"{n} {v:.3g}" for n, v in asdict(made.model).items() if v)
    print_line(f"Seconds a batch: {factors}")
    print_line(
        f"{made.points} batches up to {made.most_tokens} tokens; over the {made.held_out} kept "
        f"from the fit, the median error is {made.error:.1%}, nine in ten are within "
        f"{made.error_p90:.1%}."
    )
