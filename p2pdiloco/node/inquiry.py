"""What the peers of a run answer to somebody who is outside: for ``status`` and ``doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from p2pdiloco.access.invite_code import Invite
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.node.credentials import Credentials, accepted
from p2pdiloco.node.lookup import (
    LookupFailedError,
    ask_status,
    dial_any,
    fetch_manifest,
    list_runs,
    observer_transport,
    pick_runs,
)
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Transport
from p2pdiloco.wire.control_messages import PeerStatus
from p2pdiloco.wire.directory_records import RunRecord

PATIENCE_S = 5.0


class RunAnswer(NamedTuple):
    """Of one run."""

    run: RunId
    record: RunRecord
    peers: tuple[PeerStatus, ...] = ()
    """What those tell of themselves that can be reached and answer."""
    addresses: tuple[str, ...] = ()
    """Where they were reached."""
    manifest: Manifest | None = None
    """Where it was asked for."""
    trouble: str = ""
    """Why nobody was reached; empty: somebody was."""


async def inquire(
    directory: Directory,
    invite: Invite | None,
    wanted: str | None,
    identity: Callable[[], Identity],
    *,
    mine: Credentials | None = None,
    needs_manifest: bool = False,
) -> list[RunAnswer]:
    """Of the run that ``invite`` opens, or ``mine`` do; without, of the open runs called ``wanted``, or all.
    ``identity``: of the peer for which an invite may be.

    Raises:
        LookupFailedError: there is no such run, or nobody of the invite's can be reached.
        DirectoryError: the directory does not answer.
        CredentialsError: the invite is for another peer.
    """
    if mine is not None:
        return [await _of_private(directory, mine.run, mine)]
    if invite is None:
        runs = pick_runs(await list_runs(directory, patience_s=PATIENCE_S), wanted)
        return [await _of_open(directory, run, runs[run], needs_manifest) for run in sorted(runs)]
    shown = accepted(invite, Identity.ephemeral() if invite.peer is None else identity())
    return [await _of_private(directory, invite.run, shown)]


async def _of_private(directory: Directory, run: RunId, mine: Credentials) -> RunAnswer:
    async with observer_transport(Identity.ephemeral(), mine) as transport:
        peers = await dial_any(directory, transport, run, patience_s=PATIENCE_S)
        manifest = await fetch_manifest(transport, peers, run)
        record = RunRecord(manifest.config.name, Layout.of(manifest).elements)
        return await _asked(RunAnswer(run, record, manifest=manifest), transport, peers)


async def _of_open(directory: Directory, run: RunId, record: RunRecord, needs_manifest: bool) -> RunAnswer:
    async with observer_transport(Identity.ephemeral()) as transport:
        try:
            peers = await dial_any(directory, transport, run, patience_s=PATIENCE_S)
            manifest = await fetch_manifest(transport, peers, run) if needs_manifest else None
        except LookupFailedError as error:
            return RunAnswer(run, record, trouble=str(error))
        return await _asked(RunAnswer(run, record, manifest=manifest), transport, peers)


async def _asked(found: RunAnswer, transport: Transport, peers: list[PeerId]) -> RunAnswer:
    told = await asyncio.gather(*(ask_status(transport, peer) for peer in peers))
    channels = [channel for peer in peers if (channel := transport.channel_of(peer)) is not None]
    return found._replace(
        peers=tuple(one for one in told if one is not None),
        addresses=tuple(str(channel.address) for channel in channels),
    )
