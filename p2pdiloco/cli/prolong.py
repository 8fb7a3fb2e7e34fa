"""``p2pdiloco prolong``: Let a run end later, whether it trains or has finished. This machine's peer must be the run's
founder or an admin. If it is running, it tells the others within seconds, and all go on. If not, resume it: the others
learn of the new end when they come back. The learning rate follows the new end, so it rises again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from p2pdiloco.access.certificates import Role
from p2pdiloco.access.membership_log import prolonging
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError
from p2pdiloco.protocol.config import describe_end
from p2pdiloco.protocol.manifest import MANIFEST
from p2pdiloco.protocol.manifest_defaults import budget, end_of
from p2pdiloco.swarm.credentials import MemberFiles, members_of
from p2pdiloco.swarm.invitations import credentials_of, load_grant
from p2pdiloco.swarm.run_index import KeptRun, kept_run


async def run(arguments: argparse.Namespace) -> int:
    """Write the statement into the run's folder, for the node of this folder."""
    kept = _kept_run(arguments.folder, arguments.run)
    manifest, folder, config = kept.manifest, kept.folder, kept.manifest.config
    option, unit = ("--tokens", "tokens") if budget(config.inner) else ("--steps", "steps")
    last = arguments.tokens if budget(config.inner) else arguments.steps
    if last is None:
        raise CommandError(f"run {config.name} is measured in {unit}: say where it ends with {option} N", REPAIR)
    mine = credentials_of(manifest, peer_options.open_identity(arguments, kept.state), folder)
    grant = load_grant(manifest, mine, folder, time.time())
    if grant.role is not Role.ADMIN:
        raise CommandError(
            f"this peer is a {grant.role.name.lower()} of run {config.name}, and only its founder and admins "
            f"prolong it: ask one of them (p2pdiloco members --state {kept.state} lists them)",
            REPAIR,
        )
    files, members = MemberFiles(folder), members_of(manifest)
    files.load(members)
    before = end_of(config, members.prolonged_to)
    if last < (before.tokens or before.steps):
        raise CommandError(
            f"run {config.name} ends at {describe_end(before)}, and its end cannot come nearer: give a larger {option}",
            REPAIR,
        )
    if last == (before.tokens or before.steps):
        peer_options.say(f"run {config.name} ends at {describe_end(before)} already")
        return 0
    files.queue_statement(prolonging(manifest.run, last, grant, mine.identity.sign))
    after = end_of(config, last)
    peer_options.say(f"run {config.name} now ends at {describe_end(after)}, no longer at {describe_end(before)}")
    again = f"p2pdiloco resume {kept.state} --state {kept.state} --run {manifest.run[:12]}"
    again = "start the training script again" if config.model.kind == "external" else again
    peer_options.say(f"a peer that runs here takes it over within seconds; else: {again}")
    return 0


def _kept_run(place: Path, wanted: str | None) -> KeptRun:
    """Return the run in a state folder, or the one whose own folder ``place`` is."""
    if wanted is None and (place / MANIFEST).is_file():
        return kept_run(place.resolve().parent, place.resolve().name)
    return kept_run(place, wanted)
