"""What the quota tells SGLang's adder, decision by decision, and what it does when it cannot."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from dualpath_sglang.prefill.packing import Packing
from dualpath_sglang.scheduling.quota import AttentionModel, Rules

PAGE = 16
TOKENS = AttentionModel(token_s=1e-3)
"""A token takes a millisecond: quotas are in tokens."""


def request(new: int, cached: int = 0) -> Any:
    tokens = array("q", range(cached + new))
    return SimpleNamespace(
        full_untruncated_fill_ids=tokens,
        origin_input_ids=tokens,
        output_ids=[],
        prefix_len=cached,
        host_hit_length=0,
        extend_end=None,
    )


class Adder:
    """The parts of SGLang's adder that are used, which note what they were told."""

    def __init__(self) -> None:
        self.dllm_config = None
        self.page_size = PAGE
        self.mamba_chunk_grid = 1
        self.is_hybrid_ssm_cache = False
        self.rem_chunk_tokens: int | None = 2048
        self.chunked_req_limit: int | None = None
        self.new_chunked_req: Any = None
        self.can_run_list: list[Any] = []
        self.told: list[int | None] = []

    def _replay_len(self, req: Any, prefix_len: int) -> int:
        return 0

    def add_chunked_req(self, req: Any) -> Any:
        self.told.append(self.chunked_req_limit)
        return req

    def _select_prefill_admission(
        self, req: Any, *, host_hit_length: int, has_chunked_req: bool = False
    ) -> Any:
        self.told.append(self.rem_chunk_tokens)
        assert self.rem_chunk_tokens is not None
        new = len(req.full_untruncated_fill_ids) - req.prefix_len - host_hit_length
        return SimpleNamespace(is_chunked=new > self.rem_chunk_tokens)

    def add_one_req_ignore_eos(self, req: Any) -> Any:
        self.told.append(self.rem_chunk_tokens)
        assert self.rem_chunk_tokens is not None
        self.rem_chunk_tokens -= 10
        return AddReqResult.CONTINUE


def packed(
    quota_tokens: int, share: float = 0.5, **scheduler: Any
) -> tuple[Any, Any, list[Exception]]:
    state = {
        "truncation_align_size": None,
        "waiting_queue": [],
        "chunked_req": None,
        "chunked_prefill_size": 2048,
        **scheduler,
    }
    failures: list[Exception] = []
    rules = Rules(quota_tokens / 1000 + 1e-9, PAGE, share)
    made = SimpleNamespace(**state)
    packing = Packing(made, TOKENS, rules, failures.append)
    return packing.adder(Adder), made, failures


def select(adder: Any, req: Any, *, hit: int = 0, chunked: bool = False) -> Any:
    return adder._select_prefill_admission(req, host_hit_length=hit, has_chunked_req=chunked)


def running(adder: Any, new: int) -> None:
    req = request(new)
    req.extend_end = new
    adder.can_run_list.append(req)


def test_what_fits_is_left_alone_and_what_does_not_is_cut_at_a_page() -> None:
    adder, _, failures = packed(100)
    assert not select(adder, request(100)).is_chunked
    assert select(adder, request(101)).is_chunked
    assert adder.told == [2048, 96]
    assert adder.rem_chunk_tokens == 2048
    assert not failures


def test_a_hit_in_a_lower_tier_costs_nothing_here() -> None:
    adder, _, _ = packed(100)
    assert not select(adder, request(500), hit=400).is_chunked


def test_what_is_in_the_batch_counts_and_a_full_one_ends() -> None:
    adder, _, _ = packed(100)
    running(adder, 60)
    assert select(adder, request(60)).is_chunked
    assert adder.told == [32]
    running(adder, 32)
    assert select(adder, request(60)) is AddReqResult.OTHER
    assert not select(adder, request(8)).is_chunked


def test_an_empty_batch_takes_a_page_or_what_kernels_need() -> None:
    adder, _, _ = packed(1)
    assert select(adder, request(60)).is_chunked
    assert adder.told == [PAGE]
    adder, _, _ = packed(1, truncation_align_size=64)
    assert select(adder, request(600)).is_chunked
    assert adder.told == [64]


def test_what_was_cut_is_the_last() -> None:
    adder, _, _ = packed(1000)
    adder.new_chunked_req = request(1)
    assert select(adder, request(8)) is AddReqResult.OTHER
    assert adder.told == []


@pytest.mark.parametrize(
    ("new", "verdict"),
    [(40, AddReqResult.OTHER), (900, AddReqResult.CONTINUE)],
    ids=["short: the next batch is its turn", "long: passed over"],
)
def test_no_second_request_is_cut(new: int, verdict: AddReqResult) -> None:
    adder, _, _ = packed(100, chunked_req=request(5000))
    running(adder, 80)
    assert select(adder, request(new), chunked=True) is verdict
    assert not select(adder, request(20), chunked=True).is_chunked


def test_nor_when_it_is_sglang_that_would_cut_it() -> None:
    adder, _, _ = packed(5000, chunked_req=request(5000))
    adder.rem_chunk_tokens = 100
    assert select(adder, request(900), chunked=True) is AddReqResult.OTHER
    assert adder.rem_chunk_tokens == 100
    assert adder.add_one_req_ignore_eos(request(900)) is AddReqResult.OTHER
    assert adder.told == [100]


def test_nor_passed_over_where_its_state_would_be_lost() -> None:
    adder, _, _ = packed(100, chunked_req=request(5000))
    adder.is_hybrid_ssm_cache = True
    assert select(adder, request(900), chunked=True) is AddReqResult.OTHER


def test_the_papers_rule_adds_nothing_behind_a_request_in_parts() -> None:
    adder, _, _ = packed(100, share=0.0, chunked_req=request(5000))
    assert select(adder, request(8), chunked=True) is AddReqResult.OTHER


def test_a_request_in_parts_leaves_what_short_ones_can_use() -> None:
    adder, scheduler, _ = packed(200)
    adder.add_chunked_req(request(1000))
    assert adder.told == [192]
    adder, scheduler, _ = packed(200)
    scheduler.waiting_queue = [request(4000), request(50), request(40), request(60)]
    adder.add_chunked_req(request(1000))
    assert adder.told == [96]  # 200 - 50 - 40, in pages
    adder, _, _ = packed(200)
    adder.chunked_req_limit = 64  # SGLang's own
    adder.add_chunked_req(request(1000))
    assert adder.told == [64]
    adder, _, _ = packed(200)
    adder.add_chunked_req(request(150))
    assert adder.told == [None]


def test_without_a_radix_cache() -> None:
    adder, _, _ = packed(100)
    assert adder.add_one_req_ignore_eos(request(500)) is AddReqResult.CONTINUE
    assert adder.told == [96]
    assert adder.rem_chunk_tokens == 2038
    adder.new_chunked_req = request(1)
    assert adder.add_one_req_ignore_eos(request(5)) is AddReqResult.OTHER


@pytest.mark.parametrize("field", ["dllm_config", "rem_chunk_tokens"])
def test_adders_that_cut_nothing_are_left_alone(field: str) -> None:
    def make() -> Adder:
        adder = Adder()
        setattr(adder, field, None if field == "rem_chunk_tokens" else object())
        return adder

    scheduler = SimpleNamespace(truncation_align_size=None)
    packing = Packing(scheduler, TOKENS, Rules(1.0), lambda _: None)
    assert "add_chunked_req" not in vars(packing.adder(make))


def test_a_failure_is_told_and_the_request_goes_in_as_without_a_quota() -> None:
    adder, scheduler, failures = packed(100)
    running(adder, 60)
    adder.can_run_list[0].extend_end = None
    assert not select(adder, request(500)).is_chunked
    assert adder.told == [2048]
    scheduler.waiting_queue = [object()]
    adder.add_chunked_req(request(1000))
    assert adder.told[-1] is None
    assert [type(error) for error in failures] == [TypeError, AttributeError]
