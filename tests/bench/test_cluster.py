"""The cluster's bench: it runs through its command line, and notices what it must. Needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from bench.cluster.__main__ import Row
from bench.cluster.bed import Shape, bed
from bench.cluster.driver import Playing, fill, run
from bench.cluster.model import MODELS
from bench.cluster.systems import SYSTEMS
from bench.cluster.workload import Trajectory, Turn
from bench.netns import _ip

ROOT = Path(__file__).parents[2]
NOBODY = """
import os, typer
from bench.cluster.__main__ import main
os.geteuid = lambda: 65534  # who really is somebody else may not even read this Python
typer.run(main)
"""
COMMAND = [sys.executable, "-m", "bench.cluster"]


def quiet(text: str) -> None:
    del text


def test_the_command_plays_a_workload(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = (
        "--quick --pd 1x1 --systems layerwise,split --workloads io_bound --agents 2 --turns 1 "
        f"--json {out} --dir {tmp_path}"
    )
    done = subprocess.run(
        [*COMMAND, *options.split()], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone, split = json.loads(out.read_text())
    assert (alone["system"], split["system"], split["failed"]) == ("layerwise", "split", 0)
    assert alone["snic_max_avg"] == pytest.approx(2.0, abs=0.1), "the DE's NIC is idle"
    assert split["snic_max_avg"] < 1.9, "both NICs read"


@pytest.mark.slow
def test_the_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = (
        f"--quick --pd 1x1 --systems {','.join(SYSTEMS)} --workloads bandwidth,io_bound "
        f"--agents 2 --turns 1 --json {out} --dir {tmp_path}"
    )
    done = subprocess.run(
        [*COMMAND, *options.split()], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert [(row["workload"], row["system"]) for row in rows] == [
        *(("bandwidth", system) for system in SYSTEMS if system != "oracle"),
        *(("io_bound", system) for system in SYSTEMS),
    ]
    for row in rows:
        assert set(row) == {field.name for field in fields(Row)}
        assert (row["engine"], row["p"], row["d"], row["failed"]) == ("model", 1, 1, 0)
        both = row["system"] in ("dualpath", "split")
        assert row["aggregate_mbit_s"] <= (400 if both else 200), "no more than the NICs bring"
    by_system = {(row["workload"], row["system"]): row for row in rows}
    for row in rows[:4]:
        assert row["aggregate_mbit_s"] > 0
    for row in rows[:2]:
        assert row["snic_max_avg"] == pytest.approx(2.0, abs=0.1), "the DE's NIC is idle"
    assert rows[3]["snic_max_avg"] < 1.9, "both NICs read"
    assert by_system["io_bound", "oracle"]["aggregate_mbit_s"] == 0
    for system in ("basic", "layerwise", "dualpath", "split"):
        row = by_system["io_bound", system]
        assert row["turns"] == 2
        assert row["jct_s"] > by_system["io_bound", "oracle"]["jct_s"] > 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
    assert list(tmp_path.iterdir()) == [out], "nothing is left behind"


@pytest.mark.parametrize(
    "system",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("basic", "layerwise")), "split"],
)
def test_a_damaged_store_is_noticed_and_computed_around(tmp_path: Path, system: str) -> None:
    page = MODELS["compute_bound"].page_tokens
    agents = [Trajectory(f"a{i}", 8 * page, [Turn(page, 0)]) for i in range(2)]
    with bed(Shape(1, 1), "compute_bound", system, tmp_path, 16 << 20) as hosts:
        fill(hosts, [("a1", 8)], quiet)
        for path in hosts.root.glob("*/seg-*"):
            # Behind the stamp of the first Layer Block: only its checksum tells.
            at = MODELS["compute_bound"].geometry.slot_bytes * 3 + 4096 + 1000
            with path.open("r+b") as file:  # it must not be shorter for a moment
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
        found = run(Playing("compute_bound", agents, 1, 0.0), hosts, quiet)
    assert found.failed == 1
    assert len(found.ttft_s) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run_is_said_in_a_sentence(tmp_path: Path) -> None:
    def said(*options: str, command: Sequence[str] = COMMAND) -> str:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}", "COLUMNS": "300"}
        done = subprocess.run(
            [*command, "--dir", str(tmp_path), *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "There is no system fast" in said("--systems", "fast")
    assert "There is no workload fast" in said("--workloads", "fast")
    assert "PxD" in said("--pd", "2")
    assert "A rate is a number and a unit" in said("--storage-rate", "fast")
    assert "--trace FILE" in said("--workloads", "trace")
    assert "Network namespaces need root" in said("--quick", command=[sys.executable, "-c", NOBODY])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    options = f"--pd 1x1 --systems layerwise --workloads bandwidth --dir {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    run = subprocess.Popen(
        [*COMMAND, *options.split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not any(tmp_path.glob(".bench-cluster-*/*/seg-*")):  # all hosts are up by then
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        hosts = [name for name in namespaces() if f"-{run.pid}-" in name]
        assert len(hosts) == 4
        inside = [int(pid) for name in hosts for pid in _ip(None, "netns", "pids", name).split()]
        assert len(inside) >= 5
        run.send_signal(how)
        assert run.wait(120) != 0
    finally:
        run.kill()
        run.wait()
    assert not set(hosts) & set(namespaces())
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert list(tmp_path.iterdir()) == []


def namespaces() -> list[str]:
    return [line.split()[0] for line in _ip(None, "netns", "list").splitlines() if line.strip()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_server_is_the_pe(tmp_path: Path) -> None:
    """The bench itself compares the answers, and that all prefixes were found in the store."""
    out = tmp_path / "rows.json"
    options = "--engine sglang --pd 1x1 --systems basic,layerwise,split --quick"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    subprocess.run(
        [*COMMAND, *options.split(), "--dir", str(tmp_path), "--json", str(out)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=800,
    )
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert {row["engine"] for row in rows.values()} == {"sglang"}
    for system in ("basic", "layerwise"):
        assert rows[system]["snic_max_avg"] == pytest.approx(2.0, abs=0.1), "the DE's NIC is idle"
    assert rows["split"]["snic_max_avg"] < 1.7, "both NICs read"
    assert all(row["aggregate_mbit_s"] > 0 and row["ttft_p50_s"] > 0 for row in rows.values())
