"""``dualpath qos``: settings that keep KV out of the way of the model's traffic."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from dualpath_sglang.cli.shared import (
    EXIT_DAMAGE,
    Json,
    fail,
    plain,
    print_json,
    print_line,
    say,
)
from dualpath_sglang.qos import check, opensm, roce, tc
from dualpath_sglang.qos.rates import (
    DEFAULT_DSCP,
    Share,
    check_dscp,
    parse_rate,
    parse_share,
)
from dualpath_sglang.qos.read import UnreadableError, read_device


class Fabric(str, Enum):
    """What the settings are for."""

    TC = "tc"
    OPENSM = "opensm"
    ROCE = "roce"


@plain
def qos(
    fabric: Annotated[
        Fabric | None,
        typer.Option(
            "--print",
            help="Print a script: tc for a Linux device, opensm for InfiniBand, roce for a NIC.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--check", help="Look whether a device has the lanes that tc makes.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Network device, such as eth0.", show_default=False)
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of the link, such as 400gbit.", show_default=False)
    ] = None,
    dscp: Annotated[int, typer.Option(help="Code point of KV, 1 to 63.")] = DEFAULT_DSCP,
    share: Annotated[str, typer.Option(help="Weights of model and KV.")] = str(Share()),
    mtu: Annotated[int, typer.Option(help="Largest packet of the device, for tc.")] = 1500,
    as_json: Json = False,
) -> None:
    """Print or check the settings that give KV traffic a lane of its own.

    Nothing is changed: the script is for you to read and run. KV takes the whole link while it is
    idle and the share's part of it while the model wants it all. The status of --check is 0 when
    all is as it should be, and 1 when something is not.
    """
    if (fabric is None) != verify:
        fail("Say either --print tc, opensm or roce, or --check")
    try:
        weights, bit_s = parse_share(share), None if rate is None else parse_rate(rate)
        check_dscp(dscp)
        if fabric is not None:
            print_line(_script(fabric, device, bit_s, dscp, weights, mtu).rstrip("\n"))
        elif device is None:
            fail("Say which device to check: --device eth0")
        else:
            _check(tc.check_device(device), bit_s, dscp, weights, as_json=as_json)
    except (ValueError, UnreadableError) as error:
        fail(str(error))


def _script(
    fabric: Fabric, device: str | None, bit_s: int | None, dscp: int, share: Share, mtu: int
) -> str:
    if fabric is Fabric.OPENSM:
        return opensm.script(share)
    if device is None:
        fail("Say which device it is for: --device eth0")
    if fabric is Fabric.ROCE:
        return roce.script(device, dscp, share)
    if bit_s is None:
        fail("Say how fast the link is: --rate 400gbit")
    return tc.script(tc.Lanes(device, bit_s, dscp, share, mtu))


def _check(device: str, bit_s: int | None, dscp: int, share: Share, *, as_json: bool) -> None:
    found = check.findings(device, read_device(device), bit_s, dscp, share)
    wrong = sum(not finding.ok for finding in found)
    if as_json:
        rows = [asdict(finding) for finding in found]
        print_json({"device": device, "ok": not wrong, "findings": rows})
    else:
        for finding in found:
            print_line(f"{'ok   ' if finding.ok else 'WRONG'}  {finding.text}.")
        if wrong:
            say(f"{device} has not the lanes that dualpath qos --print tc makes.")
    if wrong:
        raise typer.Exit(EXIT_DAMAGE)
