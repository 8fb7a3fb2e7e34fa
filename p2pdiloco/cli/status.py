"""``p2pdiloco status``: Show the runs that a directory knows, and their peers. Of the peers of a run, known ones are
announced in the directory, live ones are connected and respond, and participating ones have a learner that can
contribute; "in the last merge" counts the learners whose contributions it averaged.
"""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import NOBODY_THERE
from p2pdiloco.cli.peer_options import with_invite
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.credentials import Credentials
from p2pdiloco.swarm.invitations import credentials_of, kept_addresses
from p2pdiloco.swarm.limits import approached
from p2pdiloco.swarm.run_index import ConfigError, kept_run
from p2pdiloco.swarm.run_lookup import DirectoryOptions, RunAnswer, RunLookup, open_directory
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.logs import printable, short
from p2pdiloco.wire.control_messages import PeerStatus
from p2pdiloco.wire.directory_records import RunRecord


async def run(arguments: argparse.Namespace) -> int:
    """Print and go."""
    invite, addresses = with_invite(arguments.address)
    wanted, mine = arguments.run, None
    names = [word for word in addresses if "/" not in word and ":" not in word]
    if invite is None and names:
        wanted, addresses, mine = _of_this_machine(arguments, names)
    options = DirectoryOptions(initial_peers=addresses)
    async with open_directory(Identity.ephemeral(), options, None) as directory:
        lookup = RunLookup(directory)
        found = await lookup.ask_runs(invite, wanted, lambda: peer_options.open_identity(arguments), mine=mine)
    show(found, as_json=arguments.json)
    return 0 if any(one.peers for one in found) else NOBODY_THERE


def show(found: list[RunAnswer], *, as_json: bool) -> None:
    """Print the answers for people or programs."""
    for answers in found:
        if answers.trouble:
            print("p2pdiloco:", printable(answers.trouble), file=sys.stderr)
    if as_json:
        print(json.dumps({one.run: [msgspec.structs.asdict(status) for status in one.peers] for one in found}))
    else:
        for one in found:
            _print_run(one.run, one.record, list(one.peers))


def _of_this_machine(
    arguments: argparse.Namespace, names: list[str]
) -> tuple[str, tuple[str, ...], Credentials | None]:
    """Return the id of a run that a peer of this machine takes part in, where newcomers find it, and what opens its
    doors."""
    kept = kept_run(arguments.state, names[0])
    is_open = kept.manifest.config.access == "open"
    identity = peer_options.kept_identity(arguments, kept.state)
    mine = None if is_open or identity is None else credentials_of(kept.manifest, identity, kept.folder)
    if len(arguments.address) > 1 or arguments.run or not (addresses := kept_addresses(kept.folder)):
        raise ConfigError(f"{names[0]}: give an invite or an address instead (p2pdiloco status INVITE)")
    return kept.manifest.run, addresses, mine


def _print_run(run_id: RunId, record: RunRecord, peers: list[PeerStatus]) -> None:
    print(f"{record.name}  {run_id[:12]}  {record.parameters:,} parameters")
    if not peers:
        print("  no peer answers")
        return
    best = max(peers, key=lambda s: (s.tokens_merged, s.peer))
    loss = "-" if best.held_out_loss is None else f"{best.held_out_loss:.4f} at step {best.held_out_step}"
    rate = sum(s.tokens_per_second for s in peers)
    live = max(best.live, len(peers))  # at a run's end each takes leave of the others, and stays
    shares = _shares(peers, rate, best.tokens_merged)
    print(f"  step {best.step} of {best.total_steps}, held-out loss {loss}, {best.tokens_merged:,} tokens merged")
    print(
        f"  peers: {best.known} known, {live} live, {best.participating} participating, "
        f"{best.weight_averaged} in the last merge; {rate:,.0f} tokens/s in all"
    )
    if best.epochs:
        print(f"  data: {best.epochs:.3f} epochs, {best.blocks_repeated:.1%} of the blocks were repeated")
    header = (
        ("versions", 12),
        ("loss", 8),
        ("tokens", 12),
        ("tokens/s", 10),
        ("share", 8),
        ("up MB", 9),
        ("overhead", 10),
        ("node CPU", 10),
    )
    print(f"  {'peer':<8}{'phase':<11}" + "".join(f"{name:>{width}}" for name, width in header))
    for s, share in sorted(zip(peers, shares, strict=True), key=lambda one: one[0].peer):
        versions = f"{s.version_min}-{s.version_max}"
        spent = max(1e-9, s.compute_s + s.overhead_s)
        train_loss = "-" if s.train_loss is None else f"{s.train_loss:.3f}"
        print(
            f"  {short(s.peer):<8}{s.phase:<11}{versions:>12}{train_loss:>8}{s.tokens_trained:>12,}"
            f"{s.tokens_per_second:>10,.0f}{share:>8.1%}{s.bytes_up / 1e6:>9.1f}"
            f"{s.overhead_s / spent:>10.1%}{s.node_cpu_s / spent:>10.1%}"
        )
    for s in peers:
        if s.reward is not None:
            print(f"  {short(s.peer)} reward {s.reward:.3f}")
    for sentence in approached(peers):
        print(f"  {sentence}")
    for s in peers:
        if s.trouble:
            print(f"  {short(s.peer)} is in trouble: {s.trouble}")


def _shares(peers: list[PeerStatus], rate: float, merged: int) -> list[float]:
    """Return each peer's share of the tokens per second, or of the merged tokens if nobody trains any more."""
    if rate:
        return [s.tokens_per_second / rate for s in peers]
    return [min(1.0, s.tokens_trained / max(1, merged)) for s in peers]
