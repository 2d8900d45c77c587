"""Whether KV in a lane of its own leaves the model's traffic alone, on a link between namespaces.

``python -m bench.lanes --json FILE``, as root. Two hosts and a switch; each end of both links is
shaped by exactly what ``dualpath qos --print tc`` prints. The decode node serves Layer Blocks to
the prefill node through the transport, over four connections. Beside that it sends messages of
16 KiB, which are answered by as much: the model's traffic.

| what | |
|---|---|
| ``idle`` | messages alone |
| ``beside KV`` | KV saturates the link, in its own lane; once over IPv4, once over IPv6 |
| ``no lanes`` | the same on links of that rate with one queue: what lanes are for |
| ``KV alone`` | what KV takes of the link |
| ``model alone`` | what a flood of the model takes |
| ``both flood`` | how the link is divided between the two |

Rows: {what, p50_ms, p99_ms, bound_ms, kv_share, model_share, requests}. Shares are of the link's
rate, in bytes on the wire. ``bound_ms`` is what the p50 beside KV may be: 1.5 times that of
``idle``, and for each packet of the message the time of one packet of KV.
"""

from __future__ import annotations

import json as json_module
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.lane_traffic import MESSAGE_BYTES
from bench.measure import BenchError, median, percentile, write_rows
from bench.netns import MTU, Network, NetworkError, Port, end_on_sigterm
from dualpath_sglang.qos import tc
from dualpath_sglang.qos.rates import DEFAULT_DSCP, parse_rate, parse_share

WHATS = (
    "idle",
    "beside KV",
    "beside KV, IPv6",
    "no lanes",
    "KV alone",
    "model alone",
    "both flood",
)
KV_ALONE = 0.95
"""What KV takes of an idle link, at least."""
_PREFILL, _DECODE, _NETWORK = "prefill", "decode", "compute"
_ADDRESSES = {
    _PREFILL: {4: "10.82.0.1", 6: "fd82::1"},
    _DECODE: {4: "10.82.0.2", 6: "fd82::2"},
}
_KV_PORT, _MODEL_PORT = 9000, 9100
_HEAD_BYTES, _ETHERNET_BYTES = 52, 14
_SETTLE_S = 1.0
_START_S = 60.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Row:
    """What happened to whom."""

    what: str
    p50_ms: float | None = None
    p99_ms: float | None = None
    bound_ms: float | None = None
    kv_share: float | None = None
    model_share: float | None = None
    requests: int = 0


class Bed:
    """Two hosts with lanes between them.

    Args:
        bit_s: rate of both links.
        share: weights, such as ``99:1``.
    """

    def __init__(self, net: Network, bit_s: int, share: str) -> None:
        self._net = net
        self._bit_s = bit_s
        self._share = parse_share(share)
        for host, addresses in _ADDRESSES.items():
            net.host(host)
            net.join(host, _NETWORK, f"{addresses[4]}/24")
            net.add_address(host, _NETWORK, f"{addresses[6]}/64")
        self._cables = [net.cable(host, _NETWORK) for host in _ADDRESSES]
        self._leaves = net.cable(_DECODE, _NETWORK).host

    def lanes(self) -> None:
        """Make them at each end of both links, as an operator would, and look at what came of it.

        Raises:
            BenchError: ``dualpath qos --check`` finds something.
        """
        for cable in self._cables:
            for port in cable.ports:
                lanes = tc.Lanes(port.device, self._bit_s, share=self._share)
                self._net.run(port, ["sh", "-c", tc.script(lanes)])
        command = f"-m dualpath_sglang.cli qos --check --device {self._leaves.device}"
        options = ["--rate", f"{self._bit_s}bit", "--share", str(self._share)]
        check = self._popen(_DECODE, [*command.split(), *options])
        said, _ = check.communicate(timeout=_START_S)
        if check.returncode != 0:
            raise BenchError(f"The lanes are not as they should be:\n{said}")

    def no_lanes(self) -> None:
        """Links of the same rate, with one queue at each end."""
        for host in _ADDRESSES:
            self._net.set_rate(host, _NETWORK, f"{self._bit_s}bit")

    @contextmanager
    def kv(self, version: int = 4) -> Iterator[None]:
        """Layer Blocks from the decode node to the prefill node, as many as go."""
        address = _ADDRESSES[_DECODE][version]
        with (
            self._process(_DECODE, "serve-kv", address, _KV_PORT, DEFAULT_DSCP),
            self._process(_PREFILL, "fetch-kv", address, _KV_PORT, DEFAULT_DSCP),
        ):
            yield

    @contextmanager
    def flood(self) -> Iterator[None]:
        """Bytes of the model, the same way, as many as go."""
        address = _ADDRESSES[_PREFILL][4]
        with (
            self._process(_PREFILL, "answer", address, _MODEL_PORT),
            self._process(_DECODE, "flood", address, _MODEL_PORT),
        ):
            yield

    def ask(self, seconds: float, version: int = 4) -> list[float]:
        """Messages from the decode node to the prefill node and back; seconds of each."""
        address = _ADDRESSES[_PREFILL][version]
        with self._process(_PREFILL, "answer", address, _MODEL_PORT):
            asking = self._popen(
                _DECODE,
                ["-m", "bench.lane_traffic", "ask", address, str(_MODEL_PORT), str(seconds)],
            )
            said, _ = asking.communicate(timeout=seconds + _START_S)
        if asking.returncode != 0:
            raise BenchError("The messages of the model were not all answered")
        took: list[float] = json_module.loads(said)
        return took

    def shares(self, seconds: float) -> tuple[float, float]:
        """What KV and the model take of the decode node's link, in bytes on the wire."""
        begin, before = time.monotonic(), class_bytes(self._net, self._leaves)
        time.sleep(seconds)
        took, after = time.monotonic() - begin, class_bytes(self._net, self._leaves)
        kv, model = (8 * (after[c] - before[c]) / took / self._bit_s for c in (tc.KV, tc.MODEL))
        return kv, model

    @contextmanager
    def _process(self, host: str, role: str, address: str, port: int, *more: int) -> Iterator[None]:
        """One side of some traffic; it must still run at the end."""
        argv = ["-m", "bench.lane_traffic", role, address, str(port), *map(str, more)]
        process = self._popen(host, argv)
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "up\n":
                raise BenchError(f"{role} did not start")
            yield
            if process.poll() is not None:
                raise BenchError(f"{role} ended on its own")
        finally:
            process.kill()
            process.communicate()

    def _popen(self, host: str, argv: list[str]) -> subprocess.Popen[str]:
        paths = f"{_ROOT}{os.pathsep}{_ROOT / 'storage'}"
        return self._net.popen(
            host,
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )


def class_bytes(net: Network, port: Port) -> dict[str, int]:
    """Bytes that each class of a port has sent."""
    said = net.run(port, ["tc", "-s", "class", "show", "dev", port.device])
    found = re.findall(r"^class htb (\S+) .*\n Sent (\d+) bytes", said, re.MULTILINE)
    return {classid: int(count) for classid, count in found}


def bound_s(idle_s: float, bit_s: int) -> float:
    """What a message may take beside KV: each of its packets may wait for one of KV's."""
    packets = math.ceil(MESSAGE_BYTES / (MTU - _HEAD_BYTES))
    return 1.5 * idle_s + packets * 8 * (MTU + _ETHERNET_BYTES) / bit_s


def measure(bed: Bed, seconds: float, bit_s: int) -> list[Row]:
    """One row for each of :data:`WHATS`."""
    bed.lanes()
    idle = bed.ask(seconds)
    bound_ms = round(1e3 * bound_s(median(idle), bit_s), 3)
    rows = [_of_messages("idle", idle)]
    for what, version in (("beside KV", 4), ("beside KV, IPv6", 6)):
        with bed.kv(version):
            time.sleep(_SETTLE_S)
            rows.append(_of_messages(what, bed.ask(seconds, version), bound_ms))
    floods = []
    with bed.kv():
        floods.append(_of_floods("KV alone", bed, seconds))
    with bed.flood():
        floods.append(_of_floods("model alone", bed, seconds))
        with bed.kv():
            floods.append(_of_floods("both flood", bed, seconds))
    bed.no_lanes()
    with bed.kv():
        time.sleep(_SETTLE_S)
        rows.append(_of_messages("no lanes", bed.ask(seconds)))
    return [*rows, *floods]


def _of_floods(what: str, bed: Bed, seconds: float) -> Row:
    time.sleep(_SETTLE_S)
    kv, model = bed.shares(seconds)
    return Row(what, kv_share=round(kv, 3), model_share=round(model, 3))


def _of_messages(what: str, took: list[float], bound_ms: float | None = None) -> Row:
    if not took:
        raise BenchError(f"{what}: no message was answered")
    p50, p99 = (round(1e3 * percentile(took, share), 3) for share in (0.5, 0.99))
    return Row(what, p50, p99, bound_ms, requests=len(took))


def missed(rows: list[Row]) -> list[str]:
    """What is not as it should be; sentences."""
    by_what = {row.what: row for row in rows}
    late = [row for row in rows if row.bound_ms is not None and (row.p50_ms or 0) > row.bound_ms]
    sentences = [f"{row.what}: p50 is {row.p50_ms} ms, over {row.bound_ms} ms" for row in late]
    alone = by_what["KV alone"].kv_share or 0.0
    if alone < KV_ALONE:
        sentences.append(f"KV alone takes {alone} of the link, under {KV_ALONE}")
    return sentences


def print_rows(rows: list[Row], title: str) -> None:
    """As a table."""
    table = Table(title=title)
    for column in ("what", "p50 ms", "p99 ms", "bound ms", "KV's share", "model's", "messages"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        figures = (row.p50_ms, row.p99_ms, row.bound_ms, row.kv_share, row.model_share)
        cells = ["-" if figure is None else f"{figure:.3f}" for figure in figures]
        table.add_row(row.what, *cells, str(row.requests or "-"))
    width = None if Console().is_terminal else 140
    Console(width=width).print(table)


def main(
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, help="of each measurement")] = 8.0,
    rate: Annotated[str, typer.Option(help="of the links")] = "200mbit",
    share: Annotated[str, typer.Option(help="weights of model and KV")] = "99:1",
) -> None:
    """Measure what KV does to messages of the model, with lanes and without."""
    end_on_sigterm()
    try:
        bit_s = parse_rate(rate)
        with Network("dplanes") as net:
            rows = measure(Bed(net, bit_s, share), seconds, bit_s)
    except (ValueError, NetworkError, BenchError) as error:
        sys.exit(f"bench.lanes: {error}.")
    print_rows(rows, f"{rate}, model and KV {share}")
    for sentence in missed(rows):
        print(f"Not met: {sentence}.")
    if json is not None:
        write_rows(json, rows)


if __name__ == "__main__":
    typer.run(main)
