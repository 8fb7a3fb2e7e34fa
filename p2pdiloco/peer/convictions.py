"""Owners that may not own anything, kept on disk so that a restart does not forget them (rule E2b)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from p2pdiloco.peer.host import Host, replace
from p2pdiloco.peer.signatures import OPEN, check_equivocation
from p2pdiloco.protocol.events import Convictions
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import decode_as, encode

log = logs.get("node")

FILE = "convictions.msgpack"
OLD_FILE = "own/barred.msgpack"
"""Where earlier releases kept it."""


class ConvictionFile:
    """The convictions that a peer keeps in its ``folder``."""

    def __init__(self, folder: Path, host: Host) -> None:
        self._folder = folder
        self._host = host
        self._saved = Convictions()
        """What was written last."""

    def load(self) -> Convictions:
        """Read what earlier lives knew, without what proves nothing. Blocks."""
        disk = self._host.disk
        name = FILE if FILE in disk.names(self._folder) else OLD_FILE
        try:
            found = self._saved = decode_as(disk.read(self._folder / name), Convictions)
        except FileNotFoundError:
            return self._saved
        except (OSError, ValueError) as error:
            log.warning("which owners may own nothing cannot be read", reason=str(error))
            return self._saved
        proofs = []
        for proof in found.proofs:
            try:
                check_equivocation(proof, OPEN)
            except ValueError as error:
                log.warning("a proof of an earlier life is none", owner=proof.owner, reason=str(error))
                continue
            proofs.append(proof)
        return msgspec.structs.replace(found, proofs=tuple(proofs))

    def save(self, known: Convictions) -> None:
        """Write what is known, if it is new."""
        if known == self._saved:
            return
        self._saved = known
        disk, path, data = self._host.disk, self._folder / FILE, encode(known)
        self._host.work("log", lambda: replace(disk, path, [data])).add_done_callback(_ignore_failure)


def _ignore_failure(future: asyncio.Future[None]) -> None:
    """On a disk that takes nothing, the next life learns of convictions from others."""
    if not future.cancelled():
        future.exception()
