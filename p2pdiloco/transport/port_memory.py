"""Reuses the ports of the peer's previous process where any port would do, so that known addresses and invites stay
valid.

Rules of this file:
1. The file is a hint: without it, or if a port is in use, any free port is used.
2. A remembered port stays remembered while another process uses it. Of two processes that share a folder, the first
   gets its port back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.transport import addresses, sockets
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically

log = logs.get("directory")

FILE_LIMIT = 1024
"""Maximum bytes that are read."""
_Ports = dict[str, Annotated[int, Meta(ge=1, le=65535)]]


def again(wanted: str | Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the multiaddrs ``wanted``, with the free ports that ``path`` remembers instead of 0. Blocks."""
    known = _read(path)
    return tuple(_again(text, known) for text in ([wanted] if isinstance(wanted, str) else wanted))


def _again(text: str, known: _Ports) -> str:
    if not known or not text:
        return text
    address = addresses.parse(text)
    if address.port or address.family not in known:
        return text
    found = msgspec.structs.replace(address, port=known[address.family])
    try:
        sockets.listen(found).close()
    except (OSError, ValueError):
        return text
    return str(found)


def remember(listening: Iterable[str], path: Path) -> None:
    """Store the first port of each family in ``listening`` (multiaddrs), unless one is stored already. Blocks."""
    known = _read(path)
    found = dict(known)
    for text in listening:
        with suppress(ValueError):
            address = addresses.parse(text)
            found.setdefault(address.family, address.port)
    if found == known:
        return
    try:
        write_atomically(path, msgspec.json.encode(found))
    except OSError as error:
        log.warning("the port cannot be remembered; the next start takes another", path=path, error=error)


def _read(path: Path) -> _Ports:
    try:
        return msgspec.json.decode(read_regular(path, FILE_LIMIT), type=_Ports)
    except (OSError, msgspec.MsgspecError):
        return {}
