"""SGLang's entry point: ``--hicache-storage-backend dualpath`` becomes a valid choice.

SGLang calls :func:`register` in the launcher, before it parses its flags, and in every process
that it spawns. What is registered, for SGLang 0.5.23:

- in the launcher, the name among the choices, modes, defaults and early checks (`launch_args`);
- in the scheduler, what HiCache mode needs (`controller_hooks`), and streaming mode
  (`linker_hooks`), and the compute quota (`quota_hooks`).

A server that was not asked for DualPath runs as if it were not installed. On a version of SGLang
that it does not know, DualPath touches nothing and refuses to be asked for.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

BACKEND_NAME = "dualpath"
KNOWN_VERSIONS = ("0.5.23",)

_SCHEDULER_MODULES = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.cache_controller",
)


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``.

    Raises:
        SystemExit: this launch asks for DualPath on a version of SGLang that it does not know.
            (SGLang logs other exceptions of a plugin and goes on without it.)
    """
    version = sglang_version()
    if not known(version):
        _refuse(version)
        return
    from dualpath_sglang import launch_args

    offer_name()
    launch_args.register()
    # Hooks import what they hook, so they wait for a process that needs it. The detokenizer and
    # the launcher, which load plugins as well, do not.
    if any(module in sys.modules for module in _SCHEDULER_MODULES):
        from dualpath_sglang import controller_hooks, hint_hooks, linker_hooks, quota_hooks

        controller_hooks.register()
        hint_hooks.register()
        linker_hooks.register()
        quota_hooks.register()


def sglang_version() -> str:
    """The installed version, or an empty text."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def known(version: str) -> bool:
    """Whether the hooks were written for this version, or for one that it is a rebuild of."""
    release = re.split(r"\+|\.post", version, maxsplit=1)[0]
    return release in KNOWN_VERSIONS


def offer_name() -> None:
    """Add the name to the choices, which the parser and SGLang's own checks share."""
    import typing

    from sglang.srt.server_args import ServerArgs

    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    choices = hints["hicache_storage_backend"].__metadata__[0].choices
    if BACKEND_NAME not in choices:
        choices.append(BACKEND_NAME)


def _refuse(version: str) -> None:
    sentence = (
        f"DualPath does not know SGLang {version or '(of unknown version)'}: it works with "
        f"{', '.join(KNOWN_VERSIONS)}. Install one of these, or a DualPath made for yours, or "
        f"leave out --hicache-storage-backend {BACKEND_NAME}."
    )
    if asked_for(sys.argv):
        raise SystemExit(sentence)
    logger.info("DualPath stays out of the way: %s", sentence)
    try:
        _refuse_later(sentence)
    except Exception as error:  # noqa: BLE001 -- an unknown version may have none of this
        logger.debug("No way to refuse an Engine on this version: %s", error)


def asked_for(argv: Sequence[str]) -> bool:
    """Whether a command line names this storage backend."""
    text = " ".join(argv)
    return re.search(rf"--hicache-storage-b[a-z-]*[ =]{BACKEND_NAME}(\s|$)", text) is not None


def _refuse_later(sentence: str) -> None:
    """For ``sglang.Engine`` and configuration files, whose wishes no command line shows."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    def refuse(server_args: Any, previous: Any) -> None:
        if getattr(server_args, "hicache_storage_backend", None) == BACKEND_NAME:
            raise ValueError(sentence)
        previous(server_args)

    register_resolution_hook("handle_hicache_ratio_default")(refuse)
    offer_name()
