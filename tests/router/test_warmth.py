"""What a router believes to be warm is so for a time; that it was computed once stays known."""

from __future__ import annotations

import pytest

from tests.router.bed import asynchronous, bed


@pytest.mark.parametrize(("warm_s", "returned", "read"), [(600.0, 1, False), (0.0, 0, True)])
def test_a_prefix_is_believed_warm_for_a_time(warm_s: float, returned: int, *, read: bool) -> None:
    @asynchronous
    async def turns() -> None:
        async with bed(3, 3, warm_s=warm_s) as b:
            messages = [{"role": "user", "content": "hello " * 50}]
            await b.post("/v1/chat/completions", messages=messages, max_tokens=2)
            messages += [{"role": "assistant", "content": "w0 w1"}]
            messages += [{"role": "user", "content": "more"}]
            await b.post("/v1/chat/completions", messages=messages, max_tokens=2)
            placed = await b.metric('dualpath_router_warm_total{placed="both"}')
            assert placed == returned
            assert (await b.metric("dualpath_router_read_tokens_total") > 0) == read

    turns()
