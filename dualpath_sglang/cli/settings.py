"""``dualpath config``: what is in effect, and where each setting comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic_settings import TomlConfigSettingsSource

from dualpath_sglang.cli.shared import (
    ConfigFile,
    Json,
    Root,
    configuration,
    new_table,
    plain,
    print_json,
    print_line,
    print_table,
    size,
)
from dualpath_sglang.config import ENV_PREFIX, DualPathConfig


@plain
def config(root: Root = None, config_file: ConfigFile = None, as_json: Json = False) -> None:
    """Show every setting in effect, and where it comes from."""
    loaded = configuration(root, config_file)
    given = {"root": root, "config_file": config_file}
    sources = _sources(loaded, {name for name, value in given.items() if value is not None})
    values = loaded.model_dump(mode="json")
    rows: dict[str, dict[str, Any]] = {
        name: {"value": values[name], "source": sources[name]} for name in values
    }
    if as_json:
        print_json(rows)
        return
    table = new_table("setting", "value", "from")
    for name, row in rows.items():
        table.add_row(name, _shown(name, row["value"]), row["source"])
    print_table(table)
    print_line("A server takes these too, below what its own launch line says.")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("capacity", "min_free") and isinstance(value, float):
        return f"{value:.3g} of the file system"
    if name in ("capacity", "segment_size", "max_io_size", "node_memory"):
        return size(value)
    return str(value)


def _sources(loaded: DualPathConfig, given: set[str]) -> dict[str, str]:
    in_file: dict[str, Any] = {}
    if loaded.config_file is not None:
        file = Path(loaded.config_file).expanduser()
        in_file = TomlConfigSettingsSource(DualPathConfig, toml_file=file)()
    sources = {}
    for name in DualPathConfig.model_fields:
        variable = f"{ENV_PREFIX}{name}".upper()
        if name in given:
            sources[name] = "command line"
        elif any(found.upper() == variable for found in os.environ):
            sources[name] = f"environment, {variable}"
        elif name in in_file:
            sources[name] = f"file, {loaded.config_file}"
        else:
            sources[name] = "default"
    return sources
