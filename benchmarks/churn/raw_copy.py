"""Raw copy that ``benchmarks.churn.join`` is compared with: blocking TCP connections, one from each donor's place.

It uses only the standard library, so that it starts at once.
"""

from __future__ import annotations

import socket
import threading
import time

from benchmarks.wire import line

BUFFER_BYTES = 1 << 20


def serve(config: line.Message) -> None:
    """Send as many bytes as were asked for, over one connection."""
    data = memoryview(bytes(BUFFER_BYTES))
    with socket.create_server((config["host"], 0)) as server:
        line.answer(address=list(server.getsockname()[:2]))
        connection, _ = server.accept()
        with connection:
            left = int(config["bytes"])
            while left:
                left -= connection.send(data[: min(left, BUFFER_BYTES)])


def fetch(config: line.Message) -> None:
    """Read all that the servers send."""

    def read(address: list[object]) -> None:
        buffer = bytearray(BUFFER_BYTES)
        with socket.create_connection((str(address[0]), int(str(address[1])))) as connection:
            while connection.recv_into(buffer):
                pass

    threads = [threading.Thread(target=read, args=(address,)) for address in config["addresses"]]
    before, began = time.process_time(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.answer(wall_s=time.monotonic() - began, cpu_s=time.process_time() - before)


if __name__ == "__main__":
    settings = line.begin()
    (serve if settings["role"] == "raw-server" else fetch)(settings)
