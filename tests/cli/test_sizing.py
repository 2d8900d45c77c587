"""`dualpath sizing`: the range of P/D, and whether a cluster lies in it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from dualpath_sglang.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sizing", *arguments])


def test_the_papers_nodes_are_the_default() -> None:
    told = json.loads(run("--json").stdout)
    assert told["least"] == pytest.approx(1 / 7)
    assert told["most"] == pytest.approx(7 / 2)
    assert (told["binds_below"], told["binds_above"]) == (
        ["PE CNIC write"],
        ["DE CNIC write", "DE DRAM"],
    )
    assert told["possible"] is True
    assert len(told["constraints"]) == 6


def test_a_person_is_told_in_a_table_and_a_sentence() -> None:
    done = run()
    assert done.exit_code == 0
    assert "P/D from 0.143 (PE CNIC write) to 3.5" in done.stdout
    assert "DE DRAM" in done.stdout


@pytest.mark.parametrize(("prefill", "decode", "limit"), [(2, 4, ""), (8, 1, "DE "), (1, 8, "PE ")])
def test_a_cluster_is_checked(prefill: int, decode: int, limit: str) -> None:
    done = run("--prefill", str(prefill), "--decode", str(decode))
    assert done.exit_code == (1 if limit else 0)
    assert (f"the limit is {limit}" if limit else "balanced") in done.stdout


def test_nodes_with_more_storage_than_their_nics_carry_have_no_ratio() -> None:
    done = run("--gpus", "1", "--snic", "800gbit")
    assert done.exit_code == 0
    assert "no ratio" in done.stdout
    assert json.loads(run("--gpus", "1", "--snic", "800gbit", "--json").stdout)["possible"] is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cnic", "fast"], "A rate is a number and a unit"),
        (["--dram", "0"], "A bandwidth of DRAM"),
        (["--dram", "much"], "A bandwidth of DRAM"),
        (["--prefill", "2"], "say both"),
    ],
)
def test_nonsense_is_answered_with_a_sentence(arguments: list[str], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
