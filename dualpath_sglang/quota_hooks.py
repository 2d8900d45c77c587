"""The hook into SGLang 0.5.23 for the compute quota, for the processes that schedule.

``Scheduler.__init__``, after
    Where the settings ask for it, the scheduler packs its prefill batches by quota and records
    them (`prefill.serving`). Where they do not, nothing of it is touched.

The settings are those of the storage backend, if DualPath is one; a server without gets the quota
from the environment (``DUALPATH_PREFILL_QUOTA_S``) or the file that ``DUALPATH_CONFIG_FILE`` names.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from dualpath_sglang.config import ENV_PREFIX, ConfigError, DualPathConfig
from dualpath_sglang.plugin import BACKEND_NAME

logger = logging.getLogger(__name__)

_TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"
_KEPT = "_dualpath_prefill_quota"
_OWN = ("PREFILL_QUOTA_S", "PREFILL_TRACE")


def register() -> None:
    """Register the hook; SGLang applies it when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, install, HookType.AFTER)


def install(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Give a new scheduler its quota, if it shall have one.

    Raises:
        ConfigError: it shall, and cannot; SGLang ends the launch with it.
    """
    settings = settings_of(scheduler.server_args)
    if settings is None or (settings.prefill_quota_s is None and settings.prefill_trace is None):
        return
    if settings.prefill_quota_s is not None:
        require_chunks(scheduler.chunked_prefill_size is not None)
    from dualpath_sglang.prefill.served_key import served_key
    from dualpath_sglang.prefill.serving import PrefillQuota

    quota = PrefillQuota(scheduler, settings, served_key(scheduler.server_args))
    setattr(scheduler, _KEPT, quota)


def settings_of(server_args: Any) -> DualPathConfig | None:
    """The settings of a server, or None for one that asked for nothing of DualPath.

    Raises:
        ConfigError: it did, and they cannot be used.
    """
    extra = _extra(server_args)
    names = {name.upper() for name in os.environ}
    asked = extra is not None or any(ENV_PREFIX + name in names for name in _OWN)
    if not asked and f"{ENV_PREFIX}CONFIG_FILE" not in names:
        return None
    try:
        return DualPathConfig.load(extra)
    except ConfigError as error:
        if asked:
            raise
        logger.warning("A server that does not ask for DualPath has no use for: %s", error)
        return None


def require_chunks(on: bool | None) -> None:
    """A quota needs chunked prefill.

    Args:
        on: None where SGLang has not chosen yet; it then turns chunked prefill on.

    Raises:
        ConfigError: it is off.
    """
    if on is False:
        raise ConfigError(
            "DualPath's prefill_quota_s cuts prompts by chunked prefill, which is off on this "
            "server: leave out --chunked-prefill-size, or give it a number above 0."
        )


def _extra(server_args: Any) -> dict[str, Any] | None:
    """What the launch line says, if it names DualPath as storage."""
    from sglang.srt.arg_groups.overrides import resolution_result

    def given(name: str) -> Any:
        return resolution_result(server_args, name, None)

    if given("hicache_storage_backend") == BACKEND_NAME:
        from dualpath_sglang.launch_args import check_settings

        return check_settings(given("hicache_storage_backend_extra_config"))
    linker = given("unified_cache_external_linker_config")
    if isinstance(linker, dict) and linker.get("linker_module_path") == "dualpath_sglang.linker":
        return dict(linker.get("linker_extra_config") or {})
    return None
