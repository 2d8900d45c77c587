"""Servers whose prefill batches are recorded, with and without a quota."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualpath_sglang.prefill.profile import Profile
from dualpath_sglang.prefill.trace import Batch, Header, read_batches, read_header
from dualpath_sglang.scheduling.quota import AttentionModel
from tests.support.server import Answer, Server, random_tokens

PAGE_TOKENS = 16
CHUNK_TOKENS = 512
QUOTA_S = 0.1
SHARE = "0.5"
MODEL = AttentionModel(batch_s=1e-3, request_s=1e-3, token_s=1e-4, pair_s=1e-6)
"""Made up: what matters is that the server keeps to what is predicted, not when that is right."""

LONG = [random_tokens(1200 + 7 * i, seed=i) for i in range(2)]
SHORT = [random_tokens(40 + 11 * i, seed=10 + i) for i in range(8)]
FLAGS = [
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--page-size", str(PAGE_TOKENS), "--chunked-prefill-size", str(CHUNK_TOKENS)),
]


def recorded(
    model: Path,
    folder: Path,
    *flags: str,
    quota: Path | None = None,
    share: str = SHARE,
    env: Mapping[str, str] | None = None,
) -> Server:
    """A server that writes `folder/trace`, with the quota of a profile if one is named."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"DUALPATH_PREFILL_TRACE": str(folder / "trace"), **(env or {})}
    if quota is not None:
        settings["DUALPATH_PREFILL_QUOTA_S"] = str(QUOTA_S)
        settings["DUALPATH_PREFILL_QUOTA_SHARE"] = share
        settings["DUALPATH_PREFILL_PROFILE"] = str(quota)
    return Server(model, [*FLAGS, *flags], env=settings, log=folder / "server.log")


def header(folder: Path) -> Header:
    found = read_header(folder / "trace")
    assert found is not None
    return found


def made_up_profile(folder: Path, path: Path, model: AttentionModel = MODEL) -> Path:
    """A profile with the key of the server that wrote `folder/trace`."""
    Profile(header(folder).key, model, 1, 1, 0.0, 0.0, 8192).save(path)
    return path


def batches(folder: Path) -> list[Batch]:
    return read_batches(folder / "trace")


def answers(server: Server, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """All prompts in one moment, in their order."""
    found: dict[int, Answer] = {}

    def ask(i: int) -> None:
        found[i] = server.generate(list(prompts[i]), 8)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[i] for i in range(len(prompts))]


def over_quota(found: Sequence[Batch], model: AttentionModel = MODEL) -> list[Batch]:
    """Batches of more than the quota, as predicted, and of more than a page."""
    return [
        batch
        for batch in found
        if model.predict(batch.requests) > QUOTA_S * (1 + 1e-9)
        and not (len(batch.requests) == 1 and batch.requests[0].new <= PAGE_TOKENS)
    ]
