"""What a prefill batch holds under a compute quota."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualpath_sglang.scheduling import quota
from dualpath_sglang.scheduling.quota import (
    AttentionModel,
    Rules,
    Work,
    continued,
    fit,
    largest_chunk,
    pack,
    quantities,
)

PAIRS = AttentionModel(pair_s=1e-8)
factors = st.sampled_from([0.0, 0.0, 1e-3]) | st.floats(0, 1e-2)
models = st.builds(
    AttentionModel,
    batch_s=factors,
    request_s=factors,
    token_s=st.floats(0, 1e-4),
    context_s=st.floats(0, 1e-6),
    pair_s=st.floats(0, 1e-8),
    square_s=st.floats(0, 1e-9),
)
works = st.builds(Work, st.integers(0, 100_000), st.integers(1, 40_000))
queues = st.lists(works, min_size=1, max_size=12)
rules_of_the_paper = st.builds(
    Rules, quota_s=st.floats(1e-4, 2), unit=st.sampled_from([1, 16, 64]), share=st.just(0.0)
)
all_rules = st.builds(
    Rules,
    quota_s=st.floats(1e-4, 2),
    unit=st.sampled_from([1, 16, 64]),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
)
limits = st.none() | st.sampled_from([64, 2048, 8192])


# The prediction.


@given(models, works, st.integers(0, 1000), st.integers(0, 1000))
def test_more_work_is_never_predicted_to_be_faster(
    model: AttentionModel, work: Work, cached: int, new: int
) -> None:
    assert model.request(work) <= model.request(Work(work.cached + cached, work.new + new))


@given(models, queues)
def test_a_prediction_is_its_factors_times_their_quantities(
    model: AttentionModel, batch: list[Work]
) -> None:
    named = {name: getattr(model, name) for name in AttentionModel.names()}
    total = sum(f * q for f, q in zip(named.values(), quantities(batch), strict=True))
    assert model.predict(batch) == pytest.approx(total)


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_factors_that_predict_nonsense_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        AttentionModel(pair_s=bad)


@pytest.mark.parametrize(("quota_s", "unit", "share"), [(0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_rules_that_admit_nothing_are_refused(quota_s: float, unit: int, share: float) -> None:
    with pytest.raises(ValueError, match="a quota is above 0"):
        Rules(quota_s, unit, share)


# One chunk.


@given(models, works, st.floats(0, 2), st.sampled_from([1, 16, 64]), limits)
def test_the_largest_chunk_fits_and_one_unit_more_does_not(
    model: AttentionModel, work: Work, budget_s: float, unit: int, most: int | None
) -> None:
    chunk = largest_chunk(model, work, budget_s, unit, most)
    assert chunk == work.new or chunk % unit == 0
    assert 0 <= chunk <= (work.new if most is None else min(most, work.new))
    assert chunk == 0 or model.request(work.cut(chunk)) <= budget_s
    more = chunk + unit
    if chunk < work.new and more <= (work.new if most is None else min(most, work.new)):
        assert model.request(work.cut(more)) > budget_s


def test_a_chunk_by_hand() -> None:
    # 1e-8 * n * (1000 + n / 2) <= 0.01: n = 732.05
    assert largest_chunk(PAIRS, Work(1000, 5000), 0.01, 1) == 732
    assert largest_chunk(PAIRS, Work(1000, 5000), 0.01, 64) == 704
    assert largest_chunk(PAIRS, Work(1000, 700), 0.01, 64) == 700
    assert largest_chunk(PAIRS, Work(1000, 5000), 0.01, 64, most=300) == 256
    assert largest_chunk(PAIRS, Work(10**6, 5000), 0.01, 64) == 0


# A batch, by the paper's rule.


@given(models, rules_of_the_paper, queues, limits)
def test_a_batch_is_the_head_of_the_queue_and_only_its_last_request_is_cut(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None
) -> None:
    batch = pack(model, rules, queue, most=most)
    assert [chunk.index for chunk in batch] == list(range(len(batch)))
    assert batch  # something always goes on
    for chunk in batch[:-1]:
        assert chunk.work == queue[chunk.index]


@given(models, all_rules, queues, limits, st.booleans())
@example(AttentionModel(request_s=1), Rules(0.1, 64), [Work(0, 1000)] * 3, None, False)
def test_a_batch_exceeds_the_quota_by_no_more_than_one_unit(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None, cut: bool
) -> None:
    batch = [c.work for c in pack(model, rules, queue, first_is_continued=cut, most=most)]
    over = model.predict(batch) > rules.quota_s * (1 + 1e-9)
    assert not over or (len(batch) == 1 and batch[0].new <= rules.unit)


@given(models, rules_of_the_paper, queues)
def test_what_was_left_out_did_not_fit(
    model: AttentionModel, rules: Rules, queue: list[Work]
) -> None:
    batch = pack(model, rules, queue)
    taken = [chunk.work for chunk in batch]
    last = batch[-1]
    if last.work.new < queue[last.index].new:
        more = queue[last.index].cut(min(last.work.new + rules.unit, queue[last.index].new))
        assert model.predict([*taken[:-1], more]) > rules.quota_s * (1 - 1e-9)
    elif len(batch) < len(queue):
        assert fit(model, rules, taken, queue[len(batch)]) == 0


# A batch behind a request that is being continued.


@given(models, all_rules, queues, limits)
def test_at_most_one_request_is_in_parts(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None
) -> None:
    batch = pack(model, rules, queue, first_is_continued=True, most=most)
    assert batch[0].index == 0
    cut = [c.work.new < queue[c.index].new for c in batch]
    assert sum(cut) <= 1
    assert rules.share > 0 or not any(cut[:-1])  # by the paper, the last


@given(models, all_rules, queues, limits)
def test_a_continued_request_always_advances_and_keeps_its_part(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None
) -> None:
    first = queue[0]
    new = continued(model, rules, first, queue[1:], most)
    alone = continued(model, rules, first, [], most)
    assert min(first.new, rules.unit) <= new <= alone
    if new < min(alone, first.new - rules.unit):  # it left something: no more than the share
        after = model.predict([first.cut(new + rules.unit)])
        kept = after > (1 - rules.share) * rules.quota_s * (1 - 1e-9) - model.batch_s
        tokens = most is not None and new + rules.unit > (1 - rules.share) * most - rules.unit
        assert kept or tokens


@given(models, all_rules, queues, limits)
def test_with_no_share_or_nobody_behind_nothing_is_left(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None
) -> None:
    paper = Rules(rules.quota_s, rules.unit)
    alone = continued(model, paper, queue[0], [], most)
    assert continued(model, paper, queue[0], queue[1:], most) == alone
    assert continued(model, rules, queue[0], [], most) == alone


@given(models, all_rules, queues, limits)
def test_every_request_gets_through(
    model: AttentionModel, rules: Rules, queue: list[Work], most: int | None
) -> None:
    left = [Work(work.cached, min(work.new, 40 * rules.unit)) for work in queue]
    was_cut = False
    for _ in range(41 * len(queue)):
        batch = pack(model, rules, left, first_is_continued=was_cut, most=most)
        done = {chunk.index: chunk.work.new for chunk in batch}
        assert done
        after = [
            Work(w.cached + done.get(i, 0), w.new - done.get(i, 0)) for i, w in enumerate(left)
        ]
        cut = [w for i, w in enumerate(after) if i in done and w.new]
        was_cut = bool(cut)
        left = [*cut, *(w for i, w in enumerate(after) if w.new and not (i in done and w.new))]
        if not left:
            return
    pytest.fail(f"{left} still wait")


def test_short_requests_ride_along_behind_a_long_one() -> None:
    long, short = Work(8192, 20_000), Work(0, 64)
    queue = [long, Work(0, 20_000), short, short]
    rules = Rules(0.05, 64, share=0.5)
    batch = pack(PAIRS, rules, queue, first_is_continued=True)
    assert [chunk.index for chunk in batch] == [0, 2, 3]
    # Strictly first come, first served, they wait.
    assert [c.index for c in pack(PAIRS, Rules(0.05, 64), queue, first_is_continued=True)] == [0]


def test_short_requests_keep_their_order() -> None:
    rules = Rules(0.05, 1, share=0.5)
    middling = Work(0, 2000)  # 0.02 s of 0.025 s
    queue = [Work(8192, 20_000), middling, middling, Work(0, 10)]
    batch = pack(PAIRS, rules, queue, first_is_continued=True)
    assert [chunk.index for chunk in batch] == [0, 1]


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(quota.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "dataclasses"}
