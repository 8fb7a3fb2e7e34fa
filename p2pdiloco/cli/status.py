"""``p2pdiloco status``: Show the runs that a directory knows, with their peers. known: announced in the directory;
live: connected and heard; participating: with a learner that can contribute; averaged: learners in the last merge."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import msgspec

from p2pdiloco.cli import peer
from p2pdiloco.cli.complaints import NOBODY_THERE, complaining
from p2pdiloco.cli.peer import with_invite
from p2pdiloco.node.credentials import accepted
from p2pdiloco.node.lookup import (
    DirectoryOptions,
    LookupFailedError,
    RunRecord,
    ask_status,
    dial_any,
    fetch_manifest,
    list_runs,
    observer_transport,
    open_directory,
    pick_runs,
)
from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.runtime.directory import Directory, DirectoryError
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.logs import short
from p2pdiloco.wire.bodies import PeerStatus
from p2pdiloco.wire.invites import Invite

PATIENCE_S = 5.0


async def run(arguments: argparse.Namespace) -> int:
    """Print and go."""
    with complaining(repair=(ValueError,), nobody=(DirectoryError, LookupFailedError)):
        return await _show(arguments)


async def _show(arguments: argparse.Namespace) -> int:
    invite, addresses = with_invite(arguments.address)
    options = DirectoryOptions(initial_peers=addresses)
    async with open_directory(Identity.ephemeral(), options, None) as directory:
        if invite is not None:
            return await _show_private(directory, invite, arguments)
        runs = pick_runs(await list_runs(directory, patience_s=PATIENCE_S), arguments.run)
        found = {run_id: await _ask_all(directory, run_id) for run_id in sorted(runs)}
    return _tell(runs, found, arguments)


async def _show_private(directory: Directory, invite: Invite, arguments: argparse.Namespace) -> int:
    """Of the run that the invite opens, what its members say."""
    run = invite.run
    mine = accepted(invite, Identity.ephemeral() if invite.peer is None else peer.open_identity(arguments))
    async with observer_transport(Identity.ephemeral(), mine) as transport:
        peers = await dial_any(directory, transport, run, patience_s=PATIENCE_S)
        manifest = await fetch_manifest(transport, peers, run)
        answers = await asyncio.gather(*(ask_status(transport, one) for one in peers))
    record = RunRecord(manifest.config.name, Layout.of(manifest).elements)
    return _tell({run: record}, {run: [answer for answer in answers if answer is not None]}, arguments)


def _tell(runs: dict[RunId, RunRecord], found: dict[RunId, list[PeerStatus]], arguments: argparse.Namespace) -> int:
    nobody = 0 if any(found.values()) else NOBODY_THERE
    if arguments.json:
        print(json.dumps({run_id: [msgspec.structs.asdict(s) for s in peers] for run_id, peers in found.items()}))
    else:
        for run_id, peers in found.items():
            _print_run(run_id, runs[run_id], peers)
    return nobody


async def _ask_all(directory: Directory, run_id: RunId) -> list[PeerStatus]:
    async with observer_transport(Identity.ephemeral()) as transport:
        try:
            peers = await dial_any(directory, transport, run_id, patience_s=PATIENCE_S)
        except LookupFailedError as error:
            print(f"p2pdiloco: {error}", file=sys.stderr)
            return []
        answers = await asyncio.gather(*(ask_status(transport, peer) for peer in peers))
    return [answer for answer in answers if answer is not None]


def _print_run(run_id: RunId, record: RunRecord, peers: list[PeerStatus]) -> None:
    print(f"{record.name}  {run_id[:12]}  {record.parameters:,} parameters")
    if not peers:
        print("  no peer answers")
        return
    best = max(peers, key=lambda s: (s.tokens_merged, s.peer))
    loss = "-" if best.held_out_loss is None else f"{best.held_out_loss:.4f} at step {best.held_out_step}"
    rate = sum(s.tokens_per_second for s in peers)
    print(f"  step {best.step} of {best.total_steps}, held-out loss {loss}, {best.tokens_merged:,} tokens merged")
    print(
        f"  peers: {best.known} known, {best.live} live, {best.participating} participating, "
        f"{best.weight_averaged} weight averaged; {rate:,.0f} tokens/s in all"
    )
    if best.epochs:
        print(f"  data: {best.epochs:.3f} epochs, {best.blocks_repeated:.1%} of the blocks were repeated")
    header = ("versions", 12), ("loss", 8), ("tokens", 12), ("tokens/s", 10), ("up MB", 9), ("blocked s", 11)
    print(f"  {'peer':<8}{'phase':<11}" + "".join(f"{name:>{width}}" for name, width in header))
    for s in sorted(peers, key=lambda s: s.peer):
        versions = f"{s.version_min}-{s.version_max}"
        train_loss = "-" if s.train_loss is None else f"{s.train_loss:.3f}"
        print(
            f"  {short(s.peer):<8}{s.phase:<11}{versions:>12}{train_loss:>8}{s.tokens_trained:>12,}"
            f"{s.tokens_per_second:>10,.0f}{s.bytes_up / 1e6:>9.1f}{s.blocked_s:>11.3f}"
        )
    for s in peers:
        if s.trouble:
            print(f"  {short(s.peer)} is in trouble: {s.trouble}")
