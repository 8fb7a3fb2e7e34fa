"""Convictions: owners that may no longer own shards, kept on disk so that a restart does not forget them (rule E2a)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from p2pdiloco.peer.host import Host, replace
from p2pdiloco.peer.signatures import OPEN, check_proof
from p2pdiloco.protocol.events import Convictions
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import decode_as, encode

log = logs.get("node")

FILE = "convictions.msgpack"


class ConvictionFile:
    """The file with the convictions that a peer knows, in its ``folder``."""

    def __init__(self, folder: Path, host: Host) -> None:
        self._folder = folder
        self._host = host
        # What was written last.
        self._saved = Convictions()

    def load(self) -> Convictions:
        """Read the convictions of earlier lives, without proofs that do not hold. Blocks."""
        disk = self._host.disk
        try:
            found = self._saved = decode_as(disk.read(self._folder / FILE), Convictions)
        except FileNotFoundError:
            return self._saved
        except (OSError, ValueError) as error:
            log.warning("cannot read the file of convicted owners", reason=str(error))
            return self._saved
        proofs = []
        for proof in found.proofs:
            try:
                check_proof(proof, OPEN)
            except ValueError as error:
                log.warning("a saved proof against an owner is invalid", owner=proof.owner, reason=str(error))
                continue
            proofs.append(proof)
        return msgspec.structs.replace(found, proofs=tuple(proofs))

    def save(self, known: Convictions) -> None:
        """Write the convictions to disk, if they have changed. Does not wait."""
        if known == self._saved:
            return
        self._saved = known
        disk, path, data = self._host.disk, self._folder / FILE, encode(known)
        self._host.work("log", lambda: replace(disk, path, [data])).add_done_callback(_ignore_failure)


def _ignore_failure(future: asyncio.Future[None]) -> None:
    """Ignore a failed write: after a restart, this peer hears of convictions from others."""
    if not future.cancelled():
        future.exception()
