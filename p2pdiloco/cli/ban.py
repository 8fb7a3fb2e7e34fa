"""``p2pdiloco ban``: End the membership of a peer, or revoke an invite with all who came with it, for good. The ban is
signed here; a peer that runs on this state folder spreads it within seconds, else the next one that does."""

from __future__ import annotations

import argparse
import time

from p2pdiloco.cli import peer
from p2pdiloco.cli.complaints import REPAIR, Complaint, complaining
from p2pdiloco.node.credentials import MemberFiles, invite_key
from p2pdiloco.node.invites import credentials_of, grant_here
from p2pdiloco.node.kept_runs import ConfigError, kept_run
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.runtime.identity import IdentityError
from p2pdiloco.wire.certificates import Role
from p2pdiloco.wire.invites import clean_invite, decode_invite, is_invite
from p2pdiloco.wire.peer_ids import key_of
from p2pdiloco.wire.statements import ban


async def run(arguments: argparse.Namespace) -> int:
    """Sign it and leave it for the node."""
    with complaining(repair=(ConfigError, IdentityError, ValueError), nobody=()):
        wanted, subject = arguments.run, PeerId(arguments.who)
        if is_invite(arguments.who):
            invite = decode_invite(arguments.who)
            wanted = wanted or invite.run
            subject = invite.peer or invite_key(invite.secret).peer_id
        key_of(subject)
        kept = kept_run(arguments.state, wanted)
        manifest, folder = kept.manifest, kept.folder
        mine = credentials_of(manifest, peer.open_identity(arguments, kept.state), folder)
        grant = grant_here(manifest, mine, folder, time.time())
        if grant.role is not Role.ADMIN:
            raise Complaint(
                f"this peer is a {grant.role.name.lower()} of run {manifest.config.name}, and only admins ban: ask "
                "one of them for it (p2pdiloco members tells who they are)",
                REPAIR,
            )
        if subject == manifest.founder:
            raise Complaint("that is the founder's key, which nobody bans", REPAIR)
        MemberFiles(folder).leave(ban(manifest.run, subject, grant, mine.identity.sign))
        files = MemberFiles(folder)
        if is_invite(arguments.who) and files.invite() == clean_invite(arguments.who):
            files.keep_invite("")  # the next start shows another one
        print(f"banned from run {manifest.config.name}: {subject}")
    return 0
