"""``dualpath quota``: how much each namespace takes, and may take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    size,
    store_root,
)
from dualpath_sglang.config import DualPathConfig
from dualpath_sglang.sizes import parse_size
from dualpath_storage import Space, StoreOptions
from dualpath_storage.quotas import read_quotas, set_quota


@plain
def quota(
    namespace: Annotated[
        str | None,
        typer.Argument(help="Whose quota to change. Without it, list all.", show_default=False),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Argument(
            metavar="SIZE", help='Such as "100GiB", or "none" for no limit.', show_default=False
        ),
    ] = None,
    root: Root = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show or change how much of the store a namespace may take. Servers obey within seconds.

    What is too much goes at once, least recently used first, and what a tenant stores beyond its
    quota takes the place of its own pages alone.
    """
    config = configuration(root, config_file)
    at = store_root(config)
    if namespace is not None:
        if limit is None:
            fail(f"Say how much the namespace {namespace} may take: a size, or none")
        if config.read_only:
            fail("The configuration says read_only, so nothing is changed")
        set_quota(at, namespace, _bytes(limit))
    rows = _rows(at, config)
    if as_json:
        print_json({"root": str(at), "namespaces": rows})
    elif not rows:
        print_line(f"{at} is empty, and has no quotas.")
    else:
        _print(rows)


def _bytes(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return parse_size(text)
    except ValueError:
        fail(f'A quota is a size such as "100GiB", a number of bytes, or "none", unlike {text!r}')


def _rows(root: Path, config: DualPathConfig) -> list[dict[str, Any]]:
    options: StoreOptions = config.store_options()
    used, quotas = Space(options).usage(), read_quotas(root)
    return [
        {"namespace": name, "used_bytes": used.get(name, 0), "quota_bytes": quotas.get(name)}
        for name in sorted({*used, *quotas})
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    table = new_table("namespace", "used", "quota", "of it", numbers=("used", "quota", "of it"))
    for row in rows:
        limit, used = row["quota_bytes"], row["used_bytes"]
        table.add_row(
            row["namespace"],
            size(used),
            "-" if limit is None else size(limit),
            f"{used / limit:.0%}" if limit else "-",
        )
    print_table(table)
