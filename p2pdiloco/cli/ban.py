"""``p2pdiloco ban``: Remove a peer, or revoke an invite and remove all peers that came by it, for good. A ban of a
peer also closes the invite by which it came: peers that are already in stay, and nobody else is admitted. A running
peer with this state folder spreads the ban within seconds; otherwise the next one does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from p2pdiloco.access.certificates import Grant, Kind, Role
from p2pdiloco.access.invite_code import InviteError, decode_invite, is_invite
from p2pdiloco.access.members import Members
from p2pdiloco.access.membership_log import ban, closing
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError, as_command_errors
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, invite_key, members_of
from p2pdiloco.swarm.invitations import credentials_of, load_grant
from p2pdiloco.swarm.run_index import ConfigError, kept_run
from p2pdiloco.transport.identity import IdentityError
from p2pdiloco.wire.peer_ids import key_of

SHOWN_PEERS = 16
"""How many peers that came by one invite are named."""
ANOTHER = "a new invite for others: p2pdiloco invite"


async def run(arguments: argparse.Namespace) -> int:
    """Sign it and leave it for the node."""
    with as_command_errors(repair=(ConfigError, IdentityError, ValueError), nobody=()):
        wanted, subject = arguments.run, PeerId(arguments.who)
        if is_invite(arguments.who):
            invite = decode_invite(arguments.who)
            wanted = wanted or invite.run
            subject = invite.peer or invite_key(invite.secret).peer_id
        key_of(subject)
        kept = kept_run(arguments.state, wanted)
        manifest, folder = kept.manifest, kept.folder
        mine = credentials_of(manifest, peer_options.open_identity(arguments, kept.state), folder)
        grant = load_grant(manifest, mine, folder, time.time())
        if grant.role is not Role.ADMIN:
            raise CommandError(
                f"this peer is a {grant.role.name.lower()} of run {manifest.config.name}, and only admins ban: ask "
                "one of them for it (p2pdiloco members tells who they are)",
                REPAIR,
            )
        if subject == manifest.founder:
            raise CommandError("that is the founder's key, which nobody bans", REPAIR)
        files, members = MemberFiles(folder), members_of(manifest)
        files.load(members)
        target = members.grant_of(subject)
        if target is not None and not members.may_ban(grant, target):
            raise CommandError(
                f"{subject} is an admin who is as near to the founder as this peer, or nearer, so its ban would not "
                "count: ask the founder, or an admin who is nearer",
                REPAIR,
            )
        statement = ban(manifest.run, subject, grant, mine.identity.sign)
        files.queue_statement(statement)
        members.learn(statement)
        print(f"banned from run {manifest.config.name}: {subject}")
        out = [one.subject for one in members.known() if subject in {step.subject for step in one.steps}]
        if out:
            print(f"with it {_are(out)} out, whose membership came from it:")
            print(*_shown(out), sep="\n")
        if _is_shown(files, subject):
            files.write_invite("")  # the next start shows another one
            print(f"it was the invite that this peer shows when it starts; {ANOTHER}")
        elif target is not None or not (out or is_invite(arguments.who)):  # a peer, or a key that nobody here knows
            print(*_close_invite_of(subject, members, files, mine, grant), sep="\n")
    return 0


def _close_invite_of(
    subject: PeerId, members: Members, files: MemberFiles, mine: Credentials, by: Grant
) -> Iterator[str]:
    """Let nobody new in by the invite by which the banned peer came, if that is known; what came of it, in lines."""
    target = members.grant_of(subject)
    if not members.is_private:
        yield "this run is open to all, so whoever was banned can come back with another key"
        return
    if target is None:
        yield (
            "by which invite it came is not known here, so none was closed: if it was a peer, it may come back with "
            "another key"
        )
        return
    invite = target.steps[-1]
    if invite.kind is not Kind.INVITE:
        yield "it was let in by name, so there is no invite by which it could come back with another key"
        return
    if members.ban_of(invite) is not None:
        yield f"the invite by which it came, {invite.subject}, lets in nobody new already"
        return
    if not members.may_ban(by, invite):
        yield (
            f"the invite by which it came, {invite.subject}, makes admins, so only an admin nearer to the founder can "
            f"close it: until one bans {invite.subject}, whoever holds it may come with another key"
        )
        return
    grants = [(one, members.grant_of(one)) for one in members.guests_of(invite.subject)]
    stay = [one for one, grant in grants if grant is None or members.ban_of(grant) is None]
    files.queue_statement(closing(mine.run, invite.subject, stay, by, mine.identity.sign))
    yield f"closed the invite by which it came, {invite.subject}: nobody new is let in by it; {ANOTHER}"
    if _is_shown(files, invite.subject):
        files.write_invite("")
        yield "it was the invite that this peer shows when it starts: its next start shows another one"
    if stay:
        yield f"{_are(stay)} still in that came by it; to end that, too: p2pdiloco ban {invite.subject}"
        yield from _shown(stay)


def _is_shown(files: MemberFiles, key: PeerId) -> bool:
    """Whether the invite that this peer's terminal shows has this key."""
    try:
        return invite_key(decode_invite(files.invite()).secret).peer_id == key
    except InviteError:
        return False


def _are(peers: list[PeerId]) -> str:
    return "1 peer is" if len(peers) == 1 else f"{len(peers)} peers are"


def _shown(peers: list[PeerId]) -> Iterator[str]:
    yield from (f"  {one}" for one in peers[:SHOWN_PEERS])
    if len(peers) > SHOWN_PEERS:
        yield f"  and {len(peers) - SHOWN_PEERS} more: p2pdiloco members"
