"""What ``--hicache-storage-backend dualpath`` means among SGLang 0.5.23's launch arguments.

SGLang resolves its arguments in named steps, in the launcher and before any model is loaded;
these wrap three of them. Nothing that the user gave is changed.

With ``--enable-hierarchical-cache`` the name is a storage backend below SGLang's host tier (HiCache
mode). Without, prefix hits are streamed into the forward (streaming mode).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.plugin import BACKEND_NAME
from dualpath_sglang.quota_hooks import require_chunks, settings_of

logger = logging.getLogger(__name__)

PAGE_TOKENS = 64
"""A page is a Full Block: SGLang's default of one token would make the smallest ones possible."""

LINKER = {"linker": "DualPathLinker", "linker_module_path": "dualpath_sglang.linker"}
"""What SGLang's loader of dynamic linkers looks for."""

Step = Callable[[Any], None]


def register() -> None:
    """Wrap the resolution steps, in the order in which SGLang runs them."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_hicache_ratio_default")(check_and_enable)
    # The first that looks at the decode server's caches; the model's configuration is known.
    register_resolution_hook("handle_pd_disaggregation")(restore_on_decode)
    # The last step before SGLang falls back to its own page size: model and attention backend
    # have said by then which size they need.
    register_resolution_hook("handle_mxfp8_kv_cache_compatibility")(default_page_size)
    register_resolution_hook("handle_hicache")(stream_by_default)
    register_resolution_hook("handle_hicache")(default_layout)
    register_resolution_hook("handle_hicache")(keep_promises)


def check_and_enable(server_args: Any, previous: Step) -> None:
    """Refuse settings that cannot work, and turn the hierarchical cache on where it must serve.

    Raises:
        ConfigError: a setting is unknown or malformed.
    """
    cfg = _view(server_args)
    if cfg.hicache_storage_backend == BACKEND_NAME:
        check_settings(cfg.hicache_storage_backend_extra_config)
        _choose_mode(server_args, cfg)
    check_quota(server_args, cfg)
    previous(server_args)


def check_quota(server_args: Any, cfg: Any) -> None:
    """Refuse a compute quota where nothing can be cut, long before the scheduler would.

    Raises:
        ConfigError: chunked prefill was turned off.
    """
    settings = settings_of(server_args)
    chunk = cfg.chunked_prefill_size
    if settings is not None and settings.prefill_quota_s is not None:
        require_chunks(None if chunk is None else chunk > 0)


def check_settings(extra_config: str | None) -> dict[str, Any]:
    """Read the settings as the backend will, long before it does.

    Raises:
        ConfigError: they cannot be used.
    """
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    try:
        extra = HybridCacheController.parse_storage_backend_extra_config(extra_config)[0]
    except Exception as error:
        raise ConfigError(
            f"DualPath cannot read --hicache-storage-backend-extra-config: {error}."
        ) from error
    settings = DualPathConfig.load(extra)
    settings.store_options()
    settings.stream_options()
    return dict(extra)


def _choose_mode(server_args: Any, cfg: Any) -> None:
    """Stream, unless the hierarchical cache was asked for or streaming cannot be."""
    if cfg.enable_hierarchical_cache:
        return
    if cfg.disable_radix_cache:
        raise ConfigError(
            "DualPath keeps what SGLang's radix cache keeps; leave out --disable-radix-cache or "
            f"--hicache-storage-backend {BACKEND_NAME}."
        )
    if cfg.disaggregation_mode == "decode":
        return  # see restore_on_decode
    if (why := _cannot_stream(cfg)) is not None:
        _declare(server_args, enable_hierarchical_cache=True)
        logger.info("DualPath turns on --enable-hierarchical-cache: it cannot stream with %s", why)


_NO_STREAMING = (
    ("pp_size", lambda n: (n or 1) > 1, "pipeline parallelism"),
    ("dcp_size", lambda n: (n or 1) > 1, "decode-context parallelism"),
    ("enable_unified_memory", bool, "--enable-unified-memory"),
    ("enable_hisparse", bool, "--enable-hisparse"),
    ("enable_kv_cache_sharding", bool, "--enable-kv-cache-sharding"),
    ("enable_lmcache", bool, "--enable-lmcache"),
    ("radix_cache_backend", bool, "--radix-cache-backend"),
)
"""What SGLang's linker, or DualPath's, does not go together with."""


def _cannot_stream(cfg: Any) -> str | None:
    for name, stands_against, words in _NO_STREAMING:
        if stands_against(getattr(cfg, name, None)):
            return words
    return None


def restore_on_decode(server_args: Any, previous: Step) -> None:
    """A decode server computes no prefixes to stream into: it restores them in HiCache mode.

    SGLang has it do so only with its radix cache on. What prefill then sends is the rest.
    """
    cfg = _view(server_args)
    if (
        cfg.hicache_storage_backend == BACKEND_NAME
        and cfg.disaggregation_mode == "decode"
        and not cfg.enable_hierarchical_cache
        and not cfg.disaggregation_decode_enable_offload_kvcache  # to store, and no more
    ):
        _turn_restoring_on(server_args, cfg)
    previous(server_args)


def _turn_restoring_on(server_args: Any, cfg: Any) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    why = _cannot_restore(cfg)
    if why is None and model_config_of(server_args).is_hybrid_swa:
        why = "sliding-window layers"
    if why is not None:
        logger.warning(
            "DualPath is idle on this decode server, which cannot restore prefixes with %s: all "
            "of its KV comes from prefill. Add --disaggregation-decode-enable-offload-kvcache to "
            "store what it decodes.",
            why,
        )
        return
    _declare(
        server_args,
        enable_hierarchical_cache=True,
        disaggregation_decode_enable_radix_cache=True,
    )
    logger.info(
        "DualPath restores prefixes on this decode server: it turns on "
        "--enable-hierarchical-cache and --disaggregation-decode-enable-radix-cache"
    )


_NO_RESTORE = (
    ("enable_hisparse", bool, "--enable-hisparse"),
    ("disaggregation_transfer_backend", lambda s: s == "fake", "the transfer backend fake"),
    (
        "disaggregation_decode_allocation_policy",
        lambda s: s == "prefill_complete",
        "--disaggregation-decode-allocation-policy prefill_complete",
    ),
    (
        "disaggregation_decode_retraction_backup",
        lambda s: s == "host_pool",
        "--disaggregation-decode-retraction-backup host_pool",
    ),
    (
        "disaggregation_decode_host_receive_threshold",
        lambda share: share is not None and share < 1,
        "--disaggregation-decode-host-receive-threshold below 1",
    ),
    (
        "speculative_algorithm",
        lambda name: name not in (None, "EAGLE", "EAGLE3", "NEXTN", "DSPARK"),
        "this --speculative-algorithm",
    ),
)
"""What a decode server's radix cache, or its hierarchical cache, does not go together with."""


def _cannot_restore(cfg: Any) -> str | None:
    for name, stands_against, words in _NO_RESTORE:
        if stands_against(getattr(cfg, name, None)):
            return words
    return None


def keep_promises(server_args: Any, previous: Step) -> None:
    """On a decode server, wait for what is read.

    Prefill has been told by then not to send it, so that a read that ends early fails the request.
    How long one may take is `read_timeout_s`.
    """
    cfg = _view(server_args)
    if (
        cfg.hicache_storage_backend == BACKEND_NAME
        and cfg.disaggregation_mode == "decode"
        and cfg.disaggregation_decode_enable_radix_cache
        and cfg.hicache_storage_prefetch_policy == "timeout"
        and not _typed(server_args, r"hicache[-_]storage[-_]p")
    ):
        _declare(server_args, hicache_storage_prefetch_policy="wait_complete")
        logger.info(
            "DualPath defaults to --hicache-storage-prefetch-policy wait_complete on a decode "
            "server"
        )
    previous(server_args)


def stream_by_default(server_args: Any, previous: Step) -> None:
    """Without the hierarchical cache, the name means SGLang's external linker, with ours."""
    cfg = _view(server_args)
    if (
        cfg.hicache_storage_backend == BACKEND_NAME
        and not cfg.enable_hierarchical_cache
        and cfg.disaggregation_mode != "decode"
    ):
        settings = check_settings(cfg.hicache_storage_backend_extra_config)
        _declare(
            server_args,
            hicache_storage_backend=None,
            hicache_storage_backend_extra_config=None,
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config={**LINKER, "linker_extra_config": settings},
        )
        logger.info("DualPath streams prefix hits layer by layer")
    previous(server_args)


def default_page_size(server_args: Any, previous: Step) -> None:
    """Pages of 64 tokens where neither the user nor the model asked for another size."""
    previous(server_args)
    cfg = _view(server_args)
    if cfg.hicache_storage_backend != BACKEND_NAME or cfg.page_size is not None:
        return
    if (why := _needs_small_pages(cfg)) is not None:
        logger.info("DualPath leaves SGLang's default page size alone: %s", why)
        return
    _declare(server_args, page_size=PAGE_TOKENS)
    logger.info("DualPath defaults to --page-size %d", PAGE_TOKENS)


def _needs_small_pages(cfg: Any) -> str | None:
    if cfg.uses_mamba_radix_cache and cfg.mamba_radix_cache_strategy == "no_buffer":
        return "the Mamba cache strategy no_buffer needs pages of one token"
    if cfg.uses_mamba_radix_cache and cfg.mamba_track_interval % PAGE_TOKENS:
        return f"--mamba-track-interval is no multiple of {PAGE_TOKENS}"
    if (cfg.speculative_eagle_topk or 0) > 1:
        return "tree-shaped drafts need pages of one token"
    if (cfg.chunked_prefill_size or 0) > 0 and cfg.chunked_prefill_size % PAGE_TOKENS:
        return f"--chunked-prefill-size is no multiple of {PAGE_TOKENS}"
    return None


def default_layout(server_args: Any, previous: Step) -> None:
    """The host layout that is a Full Block as it lies in memory, and the copies it needs."""
    cfg = _view(server_args)
    streams = not cfg.enable_hierarchical_cache and cfg.disaggregation_mode != "decode"
    if (
        cfg.hicache_storage_backend == BACKEND_NAME
        and not streams
        and _may_choose_layout(server_args, cfg)
    ):
        _declare(server_args, hicache_mem_layout="page_first_direct", hicache_io_backend="direct")
        logger.info(
            "DualPath defaults to --hicache-mem-layout page_first_direct --hicache-io-backend "
            "direct"
        )
    previous(server_args)


def _may_choose_layout(server_args: Any, cfg: Any) -> bool:
    """Whether the user left both open and nothing else stands against it."""
    if (cfg.hicache_mem_layout, cfg.hicache_io_backend) not in (
        ("page_first", "kernel"),
        ("page_first", "direct"),
    ):
        return False
    if _typed(server_args, r"hicache[-_]m"):
        return False
    if cfg.hicache_io_backend == "kernel" and _typed(server_args, r"hicache[-_]i"):
        return False
    return cfg.device != "npu" and cfg.kv_cache_dtype != "mxfp8" and not cfg.enable_hisparse


def _typed(server_args: Any, beginning: str) -> bool:
    """Whether the user gave a flag: argparse takes any unique beginning of one."""
    asked = getattr(server_args, "launch_command", None) or ""
    return re.search(beginning, asked) is not None


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _declare(server_args: Any, **fields: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, BACKEND_NAME, **fields)
