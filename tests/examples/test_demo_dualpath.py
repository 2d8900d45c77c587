"""The demo of both paths: its checks fail when what they check does not hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.agent_session import Turn
from examples.demo import DemoError
from examples.demo_dualpath import AGENTS, PREFILL, Demo, Step, grown

TURN = Turn(1, 640, 8, 0, 0, 0, 0, 0.1, 0.2, "answer")


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """After two turns in which all held."""
    demo = Demo(tmp_path, "redis://127.0.0.1:1", 2)
    nothing = dict.fromkeys((PREFILL, *AGENTS), 0)
    second = replace(TURN, number=2, storage_tokens=640)
    demo.steps = [Step(TURN, nothing, ""), Step(second, dict.fromkeys(nothing, 1), "")]
    demo.reference = [TURN, replace(TURN, number=2)]
    demo.check()
    return demo


def test_another_answer_fails_the_demo(demo: Demo) -> None:
    demo.reference[1] = replace(demo.reference[1], answer="another")
    with pytest.raises(DemoError, match="Turn 2"):
        demo.check()


def test_a_turn_without_a_hit_fails_the_demo(demo: Demo) -> None:
    step = demo.steps[1]
    demo.steps[1] = replace(step, turn=replace(step.turn, storage_tokens=0))
    with pytest.raises(DemoError, match="Turn 2 found nothing"):
        demo.check()


@pytest.mark.parametrize("name", [PREFILL, *AGENTS])
def test_a_node_that_reads_nothing_fails_the_demo(demo: Demo, name: str) -> None:
    demo.steps[1].node_bytes[name] = 0
    with pytest.raises(DemoError, match=f"by {name}"):
        demo.check()


def test_a_process_that_is_gone_adds_nothing_and_a_new_one_all() -> None:
    before = {(PREFILL, ""): 5, (AGENTS[0], "x"): 7, (AGENTS[1], "y"): 9}
    after = {(PREFILL, ""): 6, (AGENTS[0], "x"): 7, (AGENTS[1], "z"): 2}
    assert grown(before, after) == {PREFILL: 1, AGENTS[0]: 0, AGENTS[1]: 2}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_demo_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_dualpath", "--turns", "6"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every answer is right" in done.stdout
    assert " NO " not in done.stdout
