"""``python -m dualpath_sglang.cli`` is ``dualpath``."""

from __future__ import annotations

from dualpath_sglang.cli.app import app

app(prog_name="dualpath")
