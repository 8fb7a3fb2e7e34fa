"""Peer that only moves as many bytes as an exchange does: blocking sockets, threads, no TLS.

Each pair of peers has one connection in each direction, and all are full at once. This is the limit of the link, or of
the kernel where there is none. Only the standard library.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from benchmarks.wire import line

PIECE = 256 << 10


def main() -> None:
    config = line.begin()
    index, peers = config["index"], config["peers"]
    each = int(2 * config["parameters"] / peers * config["bytes_per_parameter"])
    listener = socket.create_server((config["host"], 0), backlog=64)
    line.answer(address=f"{config['host']}:{listener.getsockname()[1]}")
    outgoing: list[socket.socket] = []
    incoming: list[socket.socket] = []
    for command in line.commands():
        match command["do"]:
            case "connect":
                for i, address in enumerate(command["addresses"]):
                    if i != index:
                        host, _, port = address.rpartition(":")
                        outgoing.append(socket.create_connection((host, int(port))))
                incoming = [listener.accept()[0] for _ in range(peers - 1)]
                line.answer(ok=True)
            case "prepare":
                line.forget_peak()
                line.answer(**line.counters(config["interface"]))
            case "go":
                began = time.monotonic()
                threads = [threading.Thread(target=_send, args=(s, each)) for s in outgoing]
                threads += [threading.Thread(target=_receive, args=(s, each)) for s in incoming]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                line.answer(ok=True, reason="", began=began, ended=time.monotonic())
            case "check":
                peak, payload = line.memory("VmHWM"), each * (peers - 1)
                line.answer(**line.counters(config["interface"]), peak=peak, error=0.0, digest="", payload=payload)
    os._exit(0)


def _send(connection: socket.socket, count: int) -> None:
    piece = memoryview(bytes(PIECE))
    while count:
        sent = connection.send(piece[: min(count, PIECE)])
        count -= sent


def _receive(connection: socket.socket, count: int) -> None:
    piece = memoryview(bytearray(PIECE))
    while count:
        received = connection.recv_into(piece[: min(count, PIECE)])
        if not received:
            raise ConnectionError("a peer left")
        count -= received


if __name__ == "__main__":
    main()
