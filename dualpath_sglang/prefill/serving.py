"""The compute quota of one of SGLang 0.5.23's schedulers, and what is recorded of its batches.

Put onto a scheduler that has just been made, and only where the settings ask for it: its methods
are wrapped on the object, so other schedulers run SGLang's code alone.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from dualpath_sglang.config import ConfigError, DualPathConfig
from dualpath_sglang.metrics import Metrics
from dualpath_sglang.prefill.packing import Packing
from dualpath_sglang.prefill.profile import Profile, ProfileError, ProfileKey, default_path, load
from dualpath_sglang.prefill.trace import Batch, Header, TraceWriter
from dualpath_sglang.scheduling.quota import AttentionModel, Rules, Work

logger = logging.getLogger(__name__)


class PrefillQuota:
    """What a scheduler keeps to, and records.

    Args:
        scheduler: ready to run.

    Raises:
        ConfigError: there is no profile for this server, or no trace can be written.
    """

    def __init__(self, scheduler: Any, settings: DualPathConfig, key: ProfileKey) -> None:
        self._scheduler = scheduler
        self._failed = False
        self._metrics = Metrics("prefill", _ranks()[0], enabled=_has_metrics(scheduler))
        self._model: AttentionModel | None = None
        if settings.prefill_quota_s is not None:
            profile = _same_on_all_ranks(scheduler, settings, key)
            self._model = profile.model
            rules = Rules(
                settings.prefill_quota_s, scheduler.page_size, settings.prefill_quota_share
            )
            packing = Packing(scheduler, profile.model, rules, self._note_failure)
            choose = scheduler.get_prefill_adder_class
            scheduler.get_prefill_adder_class = lambda: functools.partial(packing.adder, choose())
            logger.info(
                "DualPath packs prefill batches up to %g s of attention (median error of the "
                "prediction %.0f %%)",
                settings.prefill_quota_s,
                100 * profile.error,
            )
        self._trace, self._timer = self._recorder(settings, key)
        self._wrap("get_new_batch_prefill", self._plan)
        if self._timer is not None:
            self._wrap("run_batch", self._run)

    def _wrap(self, name: str, method: Callable[..., Any]) -> None:
        setattr(self._scheduler, name, functools.partial(method, getattr(self._scheduler, name)))

    def _recorder(self, settings: DualPathConfig, key: ProfileKey) -> tuple[Any, Any]:
        """The trace and the timer, in the one process that writes."""
        scheduler = self._scheduler
        if settings.prefill_trace is None or any(_ranks()):
            return None, None
        from dualpath_sglang.prefill.attention_timer import AttentionTimer

        path = settings.prefill_trace.expanduser()
        header = Header(
            key,
            scheduler.page_size,
            scheduler.chunked_prefill_size,
            min(scheduler.max_req_input_len, scheduler.max_total_num_tokens),
        )
        try:
            trace = TraceWriter(path, header)
        except OSError as error:
            raise ConfigError(f"DualPath cannot write its prefill_trace: {error}.") from error
        model = scheduler.tp_worker.model_runner.model
        timer = AttentionTimer(model, cuda=str(scheduler.device).startswith("cuda"))
        logger.info("DualPath writes prefill batches to %s", path)
        return trace, timer

    # -- each batch -----------------------------------------------------------------------------

    def _plan(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        if plan.batch_to_run is not None and self._model is not None:
            try:
                batch = plan.batch_to_run
                self._metrics.observe(
                    "prefill_predicted_seconds", self._model.predict(_works(batch))
                )
                outcome = "whole" if batch.chunked_req is None else "cut"
                self._metrics.count("prefill_batches", outcome=outcome)
            except Exception as error:  # noqa: BLE001 -- figures are not worth a request
                self._note_failure(error)
        return plan

    def _run(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Time a prefill batch. It is described before it runs: requests go on meanwhile."""
        if not batch.forward_mode.is_extend_or_draft_extend_or_mixed():
            return original(batch, *args, **kwargs)
        described = None
        try:
            works = _works(batch)
            predicted = None if self._model is None else self._model.predict(works)
            described = Batch(works, predicted, None, None, batch.chunked_req is not None)
            self._timer.begin()
        except Exception as error:  # noqa: BLE001 -- figures are not worth a request
            self._note_failure(error)
        began = time.perf_counter()
        result = original(batch, *args, **kwargs)
        took = time.perf_counter() - began
        if described is not None:
            try:
                self._timer.end(functools.partial(self._measured, described, took))
            except Exception as error:  # noqa: BLE001 -- figures are not worth a request
                self._note_failure(error)
        return result

    def _measured(self, described: Batch, took: float, attention_s: float | None) -> None:
        on_cpu = not str(self._scheduler.device).startswith("cuda")
        self._trace.write(
            Batch(
                described.requests,
                described.predicted_s,
                attention_s,
                took if on_cpu else None,
                described.cut,
            )
        )
        if attention_s is not None:
            self._metrics.observe("prefill_attention_seconds", attention_s)

    def _note_failure(self, error: Exception) -> None:
        self._metrics.count("prefill_failures")
        if not self._failed:
            self._failed = True
            logger.error("DualPath's compute quota fails, and SGLang goes on: %r", error)


def _works(batch: Any) -> tuple[Work, ...]:
    """What the requests of a prefill batch compute; decodes that are mixed in compute one token."""
    return tuple(
        Work(int(cached), int(new))
        for cached, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)
    )


def _ranks() -> tuple[int, int, int]:
    """This process's place in tensor, pipeline and data parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.pp_rank), int(parallel.dp_rank or 0)


def _has_metrics(scheduler: Any) -> bool:
    from sglang.srt.arg_groups.overrides import resolution_result

    return bool(resolution_result(scheduler.server_args, "enable_metrics", False))


def _same_on_all_ranks(scheduler: Any, settings: DualPathConfig, key: ProfileKey) -> Profile:
    """The profile that the first rank reads: ranks that cut differently would wait for ever."""
    found: Profile | str
    try:
        found = _read(settings, key)
    except ProfileError as error:
        found = str(error)
    group = scheduler.tp_group
    if group.world_size > 1:
        from sglang.srt.utils import broadcast_pyobj

        source = group.ranks[0]
        (found,) = broadcast_pyobj([found], group.rank, group.cpu_group, src=source)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _read(settings: DualPathConfig, key: ProfileKey) -> Profile:
    path = settings.prefill_profile
    if path is None:
        path = default_path(settings.root.expanduser().absolute(), key)
    profile = load(path.expanduser())
    profile.require(key, path)
    return profile
