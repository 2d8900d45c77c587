"""``dualpath qos``: what it prints, and what it says of a real device.

Devices are in a namespace of their own, which takes root, or a machine that lets users have user
namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpath_sglang.qos import opensm, roce, tc
from dualpath_sglang.qos.rates import Share
from dualpath_sglang.qos.read import UnreadableError, parse_classes, parse_filters
from dualpath_sglang.qos.tc import Lanes

Done = subprocess.CompletedProcess[str]
QOS = [sys.executable, "-m", "dualpath_sglang.cli", "qos"]
LANES = Lanes("v0", 200 * 10**6)
KV_CLASS = "tc class change dev v0 parent 1:1 classid 1:20 htb"
MODEL_CLASS = "tc class change dev v0 parent 1:1 classid 1:10 htb"
FILTER = "tc filter add dev v0 parent 1: protocol"
MATCH = "match ip dsfield 0x20 0xfc"
NO_V4 = "tc filter del dev v0 parent 1: protocol ip prio 1\n"
NO_V6 = "tc filter del dev v0 parent 1: protocol ipv6 prio 2\n"
JUDGE = """
import json, sys
from dualpath_sglang.qos import check, rates, read
bit_s, dscp = rates.parse_rate(sys.argv[1]), int(sys.argv[2])
found = check.findings("v0", read.read_device("v0"), bit_s, dscp)
print(json.dumps([(finding.ok, finding.text) for finding in found]))
"""


def run(command: list[str], **options: Any) -> Done:
    done: Done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    return done


@pytest.fixture(scope="module")
def inside() -> Iterator[Callable[[list[str]], Done]]:
    """Runs a command in a namespace with the device v0."""
    unshare = ["unshare", "--map-root-user", "--net", "sh", "-c", "echo up; exec sleep 3600"]
    with subprocess.Popen(unshare, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == "up\n"
        enter = ["nsenter", "-t", str(keeper.pid), "-U", "-n", "--preserve-credentials", "--"]
        made = run([*enter, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"])
        assert made.returncode == 0, made.stderr
        yield lambda command: run([*enter, *command])
        keeper.kill()


@pytest.fixture
def check(inside: Callable[[list[str]], Done]) -> Callable[..., Done]:
    """`check(script, *options)`: the device after a script, on which nothing was before."""

    def after(script: str, *options: str) -> Done:
        prepare(inside, script)
        return inside([*QOS, "--check", "--device", "v0", *options])

    return after


@pytest.fixture
def wrong_after(inside: Callable[[list[str]], Done]) -> Callable[..., list[str]]:
    """`wrong_after(script, rate, dscp)`: what `--check` says is wrong, without the time that the
    command line takes to start."""

    def after(script: str, rate: str = "200mbit", dscp: int = 8) -> list[str]:
        prepare(inside, script)
        done = inside([sys.executable, "-c", JUDGE, rate, str(dscp)])
        assert done.returncode == 0, done.stderr
        return [text for ok, text in json.loads(done.stdout) if not ok]

    return after


def wrong(done: Done) -> list[str]:
    """The sentences of what is not as it should be."""
    assert all(line.startswith(("ok     ", "WRONG  ")) for line in done.stdout.splitlines())
    return [line[7:] for line in done.stdout.splitlines() if line.startswith("WRONG")]


def prepare(inside: Callable[[list[str]], Done], script: str) -> None:
    inside(["tc", "qdisc", "del", "dev", "v0", "root"])
    inside(["ip", "link", "set", "dev", "v0", "gso_max_segs", "65535"])
    done = inside(["sh", "-euc", script])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("lanes", "options"),
    [
        (LANES, ("--rate", "200mbit")),
        (LANES, ()),
        (Lanes("v0", 400 * 10**9), ("--rate", "400gbit")),
        (Lanes("v0", 123_456_789, 46, Share(7, 2)), ("--dscp", "46", "--share", "7:2")),
    ],
)
def test_what_is_printed_is_as_it_should_be(
    check: Callable[..., Done], lanes: Lanes, options: tuple[str, ...]
) -> None:
    # Twice: the second time there is something to be replaced.
    done = check(tc.script(lanes) + tc.script(lanes), *options)
    assert wrong(done) == []
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 13


@pytest.mark.parametrize(
    ("change", "arguments", "sentences"),
    [
        ("tc qdisc del dev v0 root", (), ["The root of v0 is nothing, not htb"]),
        (
            "tc qdisc del dev v0 root; tc qdisc add dev v0 root bfifo limit 10000",
            (),
            ["The root of v0 is bfifo, not htb"],
        ),
        (
            NO_V4,
            (),
            ["IPv4 packets with DSCP 8 are matched by no filter"],
        ),
        (
            NO_V6,
            (),
            ["IPv6 packets with DSCP 8 are matched by no filter"],
        ),
        (
            "",
            ("200mbit", 9),
            [
                "IPv4 packets with DSCP 9 are matched by no filter",
                "IPv6 packets with DSCP 9 are matched by no filter",
                "Other filters (2) may take packets elsewhere",
            ],
        ),
        (
            f"{NO_V4}{FILTER} ip prio 1 u32 {MATCH} match ip protocol 6 0xff flowid 1:20",
            (),
            [
                "IPv4 packets with DSCP 8 are matched by no filter",
                "Other filters (1) may take packets elsewhere",
            ],
        ),
        (
            f"{NO_V6}{FILTER} ipv6 prio 2 u32 match ip6 priority 0x20 0xfc flowid 1:10",
            (),
            ["IPv4 and IPv6 go to different classes, 1:20 and 1:10"],
        ),
        (
            f"{FILTER} all prio 9 u32 match u32 0 0 flowid 1:20",
            (),
            ["Other filters (1) may take packets elsewhere"],
        ),
        (
            f"{KV_CLASS} prio 1 rate 2mbit ceil 100mbit burst 3036 cburst 3036 quantum 1518",
            (),
            ["KV alone may take 100mbit: not 200mbit"],
        ),
        (
            f"{MODEL_CLASS} prio 0 rate 198mbit ceil 198mbit burst 3036 cburst 3036 quantum 20000",
            (),
            ["The model alone may take 198mbit: not 200mbit"],
        ),
        (
            f"{MODEL_CLASS} prio 0 rate 198mbit ceil 150mbit burst 3036 cburst 3036 quantum 20000",
            (),
            ["The model alone may take 150mbit: not 200mbit"],
        ),
        (
            "",
            ("100mbit",),
            [
                "The link is shaped to 200mbit: not 100mbit",
                "The model alone may take 200mbit: not 100mbit",
                "KV alone may take 200mbit: not 100mbit",
            ],
        ),
        (
            f"{KV_CLASS} prio 1 rate 20mbit ceil 200mbit burst 3036 cburst 3036 quantum 1518",
            (),
            ["Model and KV are sure of 198mbit and 20mbit, which is not 99:1"],
        ),
        (
            f"{KV_CLASS} prio 0 rate 2mbit ceil 200mbit burst 3036 cburst 3036 quantum 1518",
            (),
            ["The model is not served before KV"],
        ),
        (
            f"{KV_CLASS} prio 1 rate 2mbit ceil 200mbit burst 3036 cburst 3036 quantum 60000",
            (),
            ["KV sends 60000 bytes in a turn: more than 1518"],
        ),
        (
            f"{KV_CLASS} prio 1 rate 2mbit ceil 200mbit burst 3036 cburst 64000 quantum 1518",
            (),
            ["KV sends 64000 bytes at once: more than 3036"],
        ),
        (
            "ip link set dev v0 gso_max_segs 44",
            (),
            ["The kernel makes one packet of 44: more than 1"],
        ),
        (
            "tc qdisc del dev v0 parent 1:20",
            (),
            ["Of KV any number of bytes may wait on the device: there is no limit such as 97152"],
        ),
        (
            "tc qdisc replace dev v0 parent 1:20 handle 21: pfifo limit 1000",
            (),
            ["Of KV 1500000 bytes may wait on the device: more than 97152"],
        ),
    ],
)
def test_each_thing_that_is_not_as_it_should_be_is_told(
    wrong_after: Callable[..., list[str]],
    change: str,
    arguments: tuple[str | int, ...],
    sentences: list[str],
) -> None:
    assert wrong_after(f"{tc.script(LANES)}{change}", *arguments) == sentences


@pytest.mark.parametrize(
    ("edit", "sentences"),
    [
        (
            {"default 10": "default 20", "flowid 1:20": "flowid 1:10"},
            [
                "Model and KV are sure of 2mbit and 198mbit, which is not 99:1",
                "The model is not served before KV",
                "KV sends 20000 bytes in a turn: more than 1518",
                "KV sends 25000 bytes at once: more than 3036",
                "Of KV 1518000 bytes may wait on the device: more than 97152",
            ],
        ),
        (
            {"default 10": "default 20"},
            ["KV and the model share the class 1:20"],
        ),
        (
            {"htb default 10": "htb"},
            ["Packets without a mark go to no class, so they are not shaped at all"],
        ),
        (
            {"flowid 1:20": "flowid 1:30"},
            ["There is no class 1:30"],
        ),
        (
            {"parent 1:1 classid": "parent 1: classid"},
            ["The two classes have no parent in common, so neither can borrow"],
        ),
    ],
)
def test_lanes_that_were_put_together_wrongly(
    wrong_after: Callable[..., list[str]], edit: dict[str, str], sentences: list[str]
) -> None:
    script = tc.script(LANES)
    for old, new in edit.items():
        assert old in script
        script = script.replace(old, new)
    assert wrong_after(script) == sentences


def test_undoing_leaves_the_device_as_it_was(inside: Callable[[list[str]], Done]) -> None:
    def state() -> list[str]:
        return [
            inside(["tc", "qdisc", "show", "dev", "v0"]).stdout,
            inside(["ip", "-d", "link", "show", "dev", "v0"]).stdout,
        ]

    prepare(inside, "true")
    before = state()
    script = tc.script(LANES)
    prepare(inside, script)
    assert state() != before
    _, _, rest = script.partition("# Undo:")
    undo = "\n".join(line.lstrip("# ") for line in rest.partition("set -eu")[0].splitlines())
    done = inside(["sh", "-euc", undo])
    assert done.returncode == 0, done.stderr
    assert state() == before


def test_the_command_says_what_is_wrong(check: Callable[..., Done]) -> None:
    done = check(f"{tc.script(LANES)}{NO_V6}")
    assert wrong(done) == ["IPv6 packets with DSCP 8 are matched by no filter."]
    assert done.returncode == 1
    assert done.stderr == "v0 has not the lanes that dualpath qos --print tc makes.\n"


def test_the_answer_as_json(check: Callable[..., Done]) -> None:
    done = check(tc.script(LANES), "--dscp", "9", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["device"], told["ok"]) == (1, "v0", False)
    assert {"ok": True, "text": "The root of v0 is htb"} in told["findings"]


def test_what_is_printed_is_the_script() -> None:
    for arguments, script in (
        (("tc", "--device", "v0", "--rate", "200mbit"), tc.script(LANES)),
        (
            (
                "tc",
                "--device",
                "a",
                "--rate",
                "1gbit",
                "--dscp",
                "9",
                "--share",
                "3:1",
                "--mtu",
                "9000",
            ),
            tc.script(Lanes("a", 10**9, 9, Share(3, 1), 9000)),
        ),
        (("opensm",), opensm.script(Share())),
        (("roce", "--device", "v0", "--dscp", "10"), roce.script("v0", 10)),
    ):
        done = run([*QOS, "--print", *arguments])
        assert (done.returncode, done.stdout) == (0, script), done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Say either --print tc, opensm or roce, or --check."),
        (("--print", "tc", "--check"), "Say either --print tc, opensm or roce, or --check."),
        (("--check",), "Say which device to check: --device eth0."),
        (("--check", "--device", "gone0"), "There is no network device gone0 here."),
        (("--check", "--device", "a b"), "A network device has a short name"),
        (("--check", "--device", "lo", "--dscp", "0"), "Code point 0 is on every packet"),
        (("--print", "tc"), "Say which device it is for: --device eth0."),
        (("--print", "tc", "--device", "v0"), "Say how fast the link is: --rate 400gbit."),
        (("--print", "tc", "--device", "v0", "--rate", "fast"), "A rate is a number and a unit"),
        (("--print", "opensm", "--share", "1"), "A share is MODEL:KV"),
        (("--print", "roce", "--device", "v0", "--dscp", "64"), "A code point lies in 1..63"),
        (("--print", "roce"), "Say which device it is for: --device eth0."),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = run([*QOS, *arguments])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"dualpath: {sentence}")
    assert len(done.stderr.splitlines()) == 1


def test_without_tc_it_says_so(tmp_path: Path) -> None:
    done = run([*QOS, "--check", "--device", "lo"], env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "dualpath: tc is not installed here (package iproute2).\n"


def test_a_tc_that_cannot_be_understood_is_told(tmp_path: Path) -> None:
    for tool, text in (("ip", '[{"mtu": 1500}]'), ("tc", "qdisc htb 1: root")):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / tool).chmod(0o755)
    done = run([*QOS, "--check", "--device", "lo"], env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "dualpath: tc prints no JSON here: it is too old.\n"
    with pytest.raises(UnreadableError, match="cannot be read: class htb 1:1 root rate much"):
        parse_classes("class htb 1:1 root rate much ceil 1Mbit burst 1b cburst 1b\n")
    assert parse_filters("") == []
