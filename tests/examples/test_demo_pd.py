"""The demo of prefill and decode servers: its checks fail when what they check does not hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.agent_session import Turn
from examples.demo import DemoError
from examples.demo_pd import Demo, RoundBytes, Step, line

FIRST = Turn(1, 640, 8, 0, 0, 0, 0, 0.1, 0.24, "answer")
SECOND = replace(FIRST, number=2, storage_tokens=640)
MIB = 1 << 20


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """After two turns of two sessions in which all held."""
    demo = Demo(tmp_path, "redis://127.0.0.1:1", sessions=2, turns=2, engines=2)
    for number in (1, 2):
        names = (f"prefill-{number}", f"decode-{number}", "DE")
        demo.steps += [Step(number, FIRST, *names), Step(number, SECOND, *names)]
    demo.rounds = [RoundBytes({"d": 0}, 0), RoundBytes({"p": 30 * MIB, "d": 71 * MIB}, 100 * MIB)]
    demo.least_bytes = 100 * MIB
    demo.reference = [[FIRST, SECOND], [FIRST, SECOND]]
    demo.check()
    return demo


def test_another_answer_fails_the_demo(demo: Demo) -> None:
    demo.reference[1][1] = replace(SECOND, answer="another")
    with pytest.raises(DemoError, match="Turn 2 of session 2 was answered"):
        demo.check()


def test_a_turn_without_a_hit_fails_the_demo(demo: Demo) -> None:
    demo.steps[3] = replace(demo.steps[3], turn=replace(SECOND, storage_tokens=0))
    with pytest.raises(DemoError, match="Turn 2 of session 2 found nothing"):
        demo.check()


def test_a_server_without_a_request_fails_the_demo(demo: Demo) -> None:
    demo.steps = [replace(step, decode="decode-1") for step in demo.steps]
    with pytest.raises(DemoError, match="Only decode-1"):
        demo.check()


@pytest.mark.parametrize(
    ("size", "sentence"), [(99, "were read, where all hits"), (201, "more than once")]
)
def test_hits_that_were_read_twice_or_not_at_all_fail_the_demo(
    demo: Demo, size: int, sentence: str
) -> None:
    demo.rounds[1] = RoundBytes({"p": size * MIB}, 100 * MIB)
    with pytest.raises(DemoError, match=sentence):
        demo.check()


def test_a_line_tells_the_time_a_token() -> None:
    assert line(Step(1, FIRST, "p", "d", "PE")).split()[-2:] == ["100", "20"]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_demo_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_pd", "--turns", "3", "--sessions", "2"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every answer is right" in done.stdout
