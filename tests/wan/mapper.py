"""A router that gives ports, by NAT-PMP or PCP as their RFCs say, and whose kernel then really forwards them.

    python -m tests.wan.mapper ROUTER PROTOCOL [TRIED]      # in the namespace ROUTER; PROTOCOL: pcp, nat-pmp

It says what it does, a line each. TRIED datagrams are ignored first: some always get lost.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

from benchmarks.netbed.nat_routers import INSIDE, forward, stop_forwarding

PORT = 5351
HELD: dict[int, tuple[str, int]] = {}
TAKEN = 4000
"""A port that somebody else has."""


def outside(router: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.99.1.1", 9))
        return str(probe.getsockname()[0])


def give(router: str, host: str, inner: int, wanted: int, life_s: int) -> int:
    """The port; 0: it is given back."""
    held = next((port for port, place in HELD.items() if place == (host, inner)), 0)
    if not life_s:
        if held:
            stop_forwarding(router, held)
            del HELD[held]
            print(f"took back {held}", flush=True)
        return 0
    if not held:
        held = wanted if wanted not in (0, TAKEN) else TAKEN + 1
        forward(router, held, host, inner)
        HELD[held] = host, inner
        print(f"{held} leads to {host} {inner}", flush=True)
    else:
        print(f"renewed {held}", flush=True)
    return held


def answer(router: str, is_pcp: bool, data: bytes, host: str) -> bytes:
    own = outside(router)
    if data[0] == 2 and not is_pcp:
        return struct.pack(">BBHL", 0, 0x81, 1, 7)
    if data[0] == 2:
        (life_s,), (inner, wanted) = struct.unpack_from(">L", data, 4), struct.unpack_from(">HH", data, 40)
        port = give(router, host, inner, wanted, life_s)
        head = struct.pack(">BBBBLL12x", 2, 0x81, 0, 0, life_s, 7)
        return head + data[24:42] + struct.pack(">H", port) + bytes(10) + b"\xff\xff" + socket.inet_aton(own)
    if is_pcp:
        return struct.pack(">BBHL", 2, 0x80 | data[1], 1, 7)
    if data[1] == 0:
        return struct.pack(">BBHL", 0, 0x80, 0, 7) + ipaddress.IPv4Address(own).packed
    inner, wanted, life_s = struct.unpack(">HHL", data[4:])
    port = give(router, host, inner, wanted, life_s)
    return struct.pack(">BBHLHHL", 0, 0x82, 0, 7, inner, port, life_s)


def main(router: str, protocol: str, ignored: int = 0) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
        raw.bind((f"{INSIDE}.1", PORT))
        print("up", flush=True)
        while True:
            data, where = raw.recvfrom(1100)
            if ignored:
                ignored -= 1
                continue
            raw.sendto(answer(router, protocol == "pcp", data, where[0]), where)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int((*sys.argv, "0")[3]))
