"""KV carries its code point in every packet, whatever the peer's kind of address.

Packets are captured on the loopback of a network namespace of their own, which takes root, or a
machine that lets users have user namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE = 24 << 10  # little, so that the capture holds it all

CAPTURE = """
import json, socket, subprocess, sys, threading
from dualpath_sglang.transport.socket_io import tune

host, dscp, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
ALL, OUTGOING = 3, 4
tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL))
tap.bind(("lo", ALL))
tap.settimeout(1.0)

def segment(packet):  # (traffic class, source port, bytes of payload)
    version = packet[0] >> 4
    if version == 4:
        mark, head, end = packet[1], 4 * (packet[0] & 15), int.from_bytes(packet[2:4], "big")
    else:
        mark, head = int.from_bytes(packet[:2], "big") >> 4 & 255, 40
        end = 40 + int.from_bytes(packet[4:6], "big")
    port = int.from_bytes(packet[head : head + 2], "big")
    return version, mark, port, end - head - 4 * (packet[head + 12] >> 4)

listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
client = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
client.connect((host, listener.getsockname()[1]))
server, _ = listener.accept()  # of AF_INET6, and mapped when the client has IPv4
for sock in (client, server):
    sock.settimeout(20)
    tune(sock, dscp)
def send(sock):
    sock.sendall(bytes(size))
for sender, receiver in ((client, server), (server, client)):
    thread = threading.Thread(target=send, args=(sender,))
    thread.start()
    left = size
    while left:
        left -= len(receiver.recv(1 << 16))
    thread.join()
ports = {client.getsockname()[1]: "client", server.getsockname()[1]: "server"}
seen = {"client": {}, "server": {}}
versions = set()
while any(sum(marks.values()) < size for marks in seen.values()):
    packet, where = tap.recvfrom(1 << 17)
    version, mark, port, payload = segment(packet)
    if where[2] == OUTGOING and payload:
        marks = seen[ports[port]]
        marks[mark] = marks.get(mark, 0) + payload
        versions.add(version)
priorities = [s.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for s in (client, server)]
print(json.dumps({"seen": seen, "versions": sorted(versions), "priorities": priorities}))
"""


def capture(host: str, dscp: int) -> dict[str, object]:
    command = ["unshare", "--map-root-user", "--net", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", CAPTURE, host, str(dscp), str(SIZE)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'storage'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(("dscp", "priority"), [(8, 1), (46, 5), (63, 6)])
@pytest.mark.parametrize(
    ("host", "version"), [("127.0.0.1", 4), ("::1", 6), ("::ffff:127.0.0.1", 4)]
)
def test_every_packet_of_both_sides_is_marked(
    host: str, version: int, dscp: int, priority: int
) -> None:
    told = capture(host, dscp)
    marked = {str(dscp << 2): SIZE}
    assert told["seen"] == {"client": marked, "server": marked}
    assert told["versions"] == [version]
    assert told["priorities"] == [priority] * 2


def test_without_a_code_point_no_packet_is_marked() -> None:
    told = capture("::1", 0)
    assert told["seen"] == {"client": {"0": SIZE}, "server": {"0": SIZE}}
    assert told["priorities"] == [0, 0]
