"""The scripts: shells can read them, they say what they should, and they do it more than once."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dualpath_sglang.qos import opensm, roce, tc
from dualpath_sglang.qos.rates import Share
from dualpath_sglang.qos.tc import Lanes

SCRIPTS = {
    "tc": tc.script(Lanes("eth0", 400 * 10**9)),
    "opensm": opensm.script(Share()),
    "roce": roce.script("eth0"),
}

TSA = "ets,ets,ets,ets,strict,strict,strict,strict"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_one_for_any_shell_and_says_how_to_undo_it(name: str) -> None:
    script = SCRIPTS[name]
    checked = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    lines = script.splitlines()
    assert lines[0] == "#!/bin/sh"
    assert "set -eu" in lines
    assert any(line.startswith("# Undo: ") for line in lines)
    assert max(map(len, lines)) <= 110


# -- tc ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit_s", [10**6, 200 * 10**6, 10**10, 4 * 10**11, 10**13])
@pytest.mark.parametrize("mtu", [576, 1500, 9000])
def test_kv_holds_the_link_for_a_packet_or_ten_microseconds(bit_s: int, mtu: int) -> None:
    lanes = Lanes("eth0", bit_s, mtu=mtu)
    assert lanes.model_bit_s + lanes.kv_bit_s == bit_s
    assert lanes.segments == 1 or lanes.turn_bytes * 8 / bit_s <= 10e-6
    assert lanes.kv_burst_bytes <= max(2 * lanes.turn_bytes, 20e-6 * bit_s / 8)
    assert 8 * lanes.turn_bytes <= lanes.model_burst_bytes or lanes.turn_bytes * 8 / bit_s <= 10e-6
    assert lanes.packet_bytes <= lanes.turn_bytes <= lanes.kv_burst_bytes < lanes.kv_queue_bytes


def test_the_classes_are_those_of_the_link() -> None:
    script = tc.script(Lanes("ens1f0.7", 200 * 10**6, 10, Share(9, 1)))
    plain = script.replace("\\\n", " ")
    assert re.search(r"classid 1:1 htb rate 200mbit ceil 200mbit", plain)
    assert re.search(r"classid 1:10 htb prio 0 rate 180mbit ceil 200mbit", plain)
    assert re.search(r"classid 1:20 htb prio 1 rate 20mbit ceil 200mbit", plain)
    assert "protocol ip prio 1 u32 match ip dsfield 0x28 0xfc flowid 1:20" in plain
    assert "protocol ipv6 prio 2 u32 match ip6 priority 0x28 0xfc flowid 1:20" in plain
    commands = [line for line in plain.splitlines() if line and not line.startswith("#")]
    assert all(" dev ens1f0.7 " in line for line in commands if line.startswith("tc "))


def test_a_fast_link_is_warned_of() -> None:
    assert "costs the kernel's shaper cores" in SCRIPTS["tc"]
    assert "costs the kernel's shaper cores" not in tc.script(Lanes("eth0", 10**9))


@pytest.mark.parametrize(
    "name", ["", "a" * 16, "eth0; reboot", "-a", "$(id)", "eth 0", "eth0\n", "../x"]
)
def test_a_name_that_is_no_device_reaches_no_script(name: str) -> None:
    with pytest.raises(ValueError, match="A network device has a short name"):
        Lanes(name, 10**9)
    with pytest.raises(ValueError, match="A network device has a short name"):
        roce.script(name)


def test_an_mtu_that_is_none() -> None:
    with pytest.raises(ValueError, match="An MTU lies in"):
        Lanes("eth0", 10**9, mtu=100)


# -- opensm -----------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_paper() -> None:
    assert opensm.settings(Share()) == {
        "qos": "TRUE",
        "qos_max_vls": "4",
        "qos_high_limit": "240",
        "qos_vlarb_high": "0:192,1:192,2:0,3:192",
        "qos_vlarb_low": "0:192,1:192,2:64,3:192",
        "qos_sl2vl": "0,1,2,3,0,0,0,0,0,0,0,0,0,0,0,0",
    }


def test_a_larger_share_gets_turns_more_often() -> None:
    limits = [
        opensm.high_limit(share) for share in (Share(255, 1), Share(), Share(9, 1), Share(1, 1))
    ]
    assert limits == [254, 240, 22, 2]


def test_the_settings_get_into_the_file_once_and_out_again(tmp_path: Path) -> None:
    conf = tmp_path / "opensm.conf"
    before = (
        "# mine\nguid 0x1\nqos FALSE\nqos_ca_vlarb_high 0:4\nqos_sl2vl 0,1\nqos_policy_file x\n"
    )
    conf.write_text(before)
    env = {**os.environ, "CONF": str(conf), "RESTART": f"touch {tmp_path / 'restarted'}"}
    for _ in range(2):
        subprocess.run(["sh"], input=SCRIPTS["opensm"], text=True, env=env, check=True)
    settings = [f"{name} {value}" for name, value in opensm.settings(Share()).items()]
    kept = ["# mine", "guid 0x1", "qos_policy_file x"]
    assert conf.read_text().splitlines() == [*kept, *settings]
    assert (tmp_path / "restarted").exists()
    assert Path(f"{conf}.before-dualpath").read_text() == before


# -- roce -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [Share(), Share(9, 1), Share(1, 1), Share(255, 1), Share(2, 1)])
def test_weights_are_a_hundred_together(share: Share) -> None:
    weights = roce.weights(share)
    kv = weights[roce.KV_CLASS]
    assert sum(weights) == 100
    assert abs(kv - 100 * share.kv / (share.model + share.kv)) <= 1
    assert max(weights) - min(w for i, w in enumerate(weights) if i != roce.KV_CLASS) <= max(1, kv)


def run_roce(tmp_path: Path, dscp: int, *tools: str) -> list[str]:
    """The calls that the script makes, with tools that note them."""
    log = tmp_path / "log"
    for tool in tools:
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "{tool} $*" >> {log}\n')
        (tmp_path / tool).chmod(0o755)
    script = roce.script("eth0", dscp)
    subprocess.run(["/bin/sh"], input=script, text=True, check=True, env={"PATH": str(tmp_path)})
    return log.read_text().splitlines()


def test_with_the_vendors_tool(tmp_path: Path) -> None:
    calls = run_roce(tmp_path, 8, "mlnx_qos", "dcb")
    assert calls[:3] == [
        "mlnx_qos -i eth0 --trust dscp",
        f"mlnx_qos -i eth0 --prio_tc 0,1,2,3,0,0,0,0 --tsa {TSA} --tcbw 33,33,1,33,0,0,0,0",
        "mlnx_qos -i eth0 --pfc 1,1,1,1,0,0,0,0",
    ]
    assert calls[3:-1] == [f"mlnx_qos -i eth0 --dscp2prio set,{d},0" for d in range(16, 24)]
    assert calls[-1] == "mlnx_qos -i eth0 --dscp2prio set,8,2"


def test_with_iproute2(tmp_path: Path) -> None:
    calls = run_roce(tmp_path, 18, "dcb")
    prio_tc = "0:0 1:1 2:2 3:3 4:0 5:0 6:0 7:0"
    tsa = " ".join(f"{number}:{kind}" for number, kind in enumerate(TSA.split(",")))
    weights = "0:33 1:33 2:1 3:33 4:0 5:0 6:0 7:0"
    assert calls[:2] == [
        f"dcb ets set dev eth0 willing off prio-tc {prio_tc} tc-tsa {tsa} tc-bw {weights}",
        "dcb pfc set dev eth0 prio-pfc 0:on 1:on 2:on 3:on 4:off 5:off 6:off 7:off",
    ]
    others = [d for d in range(16, 24) if d != 18]
    assert calls[2:-1] == [f"dcb app replace dev eth0 dscp-prio {d}:0" for d in others]
    assert calls[-1] == "dcb app replace dev eth0 dscp-prio 18:2"
