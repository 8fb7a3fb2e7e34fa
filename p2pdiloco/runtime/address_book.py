"""The peers of the directory that we have ever met, and where: in memory and on disk.

Rules of this file:
1. At most ENTRY_LIMIT peers, the longest unseen forgotten first; at most ADDRESS_LIMIT addresses each.
2. The file is a hint: damaged or missing, it is as if empty. It is written atomically.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.runtime import addresses, logs
from p2pdiloco.runtime.files import write_atomically

log = logs.get("directory")

ENTRY_LIMIT = 256
ADDRESS_LIMIT = 4
FILE_LIMIT = 1 << 20
"""Bytes of the cache file that are read."""


class _Entry(Struct):
    peer: Annotated[str, Meta(max_length=64)]
    addresses: Annotated[list[Annotated[str, Meta(max_length=addresses.TEXT_LIMIT)]], Meta(max_length=16)]


class AddressBook:
    """Peer id -> multiaddrs (without the peer id), most recently met last."""

    def __init__(self) -> None:
        self._known: dict[PeerId, list[str]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def peers(self) -> list[PeerId]:
        """All of them, most recently met first."""
        return list(reversed(self._known))

    def addresses_of(self, peer: PeerId) -> list[str]:
        """Without the peer id, best first."""
        return list(self._known.get(peer, ()))

    def met(self, peer: PeerId, where: list[str]) -> None:
        """``peer`` was there just now; ``where``: multiaddrs with or without its id. What we cannot use is skipped."""
        known = self._known.pop(peer, [])
        for text in where:
            try:
                address = addresses.parse(text)
            except ValueError:
                continue
            if address.peer in (None, peer) and address.port:
                bare = str(msgspec.structs.replace(address, peer=None))
                known = [bare, *(other for other in known if other != bare)]
        self._known[peer] = known[:ADDRESS_LIMIT]
        while len(self._known) > ENTRY_LIMIT:
            del self._known[next(iter(self._known))]

    def load(self, path: Path) -> None:
        """Add what ``path`` remembers. Blocks on the disk."""
        try:
            with path.open("rb") as file:
                entries = msgspec.json.decode(file.read(FILE_LIMIT), type=list[_Entry])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the address cache cannot be read; going on without", path=path, error=error)
            return
        for entry in entries[:ENTRY_LIMIT]:
            self.met(PeerId(entry.peer), entry.addresses[::-1])

    def encode(self) -> bytes:
        """The file's content, oldest first."""
        entries = [_Entry(peer=peer, addresses=where) for peer, where in self._known.items() if where]
        return msgspec.json.format(msgspec.json.encode(entries), indent=1)


def save(path: Path, content: bytes) -> None:
    """Write the cache file; a full disk is logged, not raised. Blocks on the disk."""
    try:
        write_atomically(path, content)
    except OSError as error:
        log.warning("the address cache cannot be written", path=path, error=error)
