"""``p2pdiloco members``: Add members to a run of which this machine's peer is the founder or an admin, ban them, and
list them. No peer needs to be running. Without a further word, list.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from p2pdiloco.access.certificates import NEVER, Grant, Kind, Role
from p2pdiloco.access.invite_code import InviteError, decode_invite, is_invite
from p2pdiloco.access.members import Members
from p2pdiloco.access.membership_log import ban, closing
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, invite_key, members_of
from p2pdiloco.swarm.invitations import credentials_of, invite_text, kept_addresses, load_grant
from p2pdiloco.swarm.run_index import KeptRun, kept_run, kept_runs
from p2pdiloco.wire.peer_ids import key_of

SHOWN_PEERS = 16
"""How many peers that joined with one invite are named."""
ANOTHER = "a new invite for others: p2pdiloco members add"
NOBODY = "has no id yet: it gets one when it first takes part, or now by p2pdiloco members --id"


# -- Add ---------------------------------------------------------------------------------------------------------------


async def run_add(arguments: argparse.Namespace) -> int:
    """Print an invite to a run, for one person. It is one line of text: the first peer that joins with it takes its
    place for good. With --uses, it admits more peers; with --peer, only the named one."""
    kept = kept_run(arguments.state, arguments.run)
    manifest, folder = kept.manifest, kept.folder
    if arguments.peer is not None:
        key_of(PeerId(arguments.peer))
    mine = credentials_of(manifest, peer_options.open_identity(arguments, kept.state), folder)
    now_s = time.time()
    addresses = tuple(arguments.bootstrap) or kept_addresses(folder)
    if not addresses:
        raise CommandError(
            "it is not known where newcomers find the run: name a directory node, --bootstrap ADDR", REPAIR
        )
    print(
        invite_text(
            manifest,
            mine,
            load_grant(manifest, mine, folder, now_s),
            addresses,
            role=Role[arguments.role.upper()],
            max_weight=arguments.max_weight,
            not_after=NEVER if arguments.expires is None else int(now_s) + arguments.expires,
            uses=arguments.uses,
            peer=None if arguments.peer is None else PeerId(arguments.peer),
        )
    )
    return 0


# -- Ban ---------------------------------------------------------------------------------------------------------------


async def run_ban(arguments: argparse.Namespace) -> int:
    """Remove a peer, or revoke an invite and remove all peers that joined with it, for good. With --keep-members, an
    invite is closed to new peers only. The ban of a peer also closes the invite with which it joined: the other peers
    that joined with it stay, and nobody else is admitted. A running peer with this state folder spreads the ban within
    seconds; otherwise the next one does."""
    wanted, subject, is_named = arguments.run, PeerId(arguments.who), False
    if is_invite(arguments.who):
        invite = decode_invite(arguments.who)
        wanted, is_named = wanted or invite.run, invite.peer is not None
        subject = invite.peer or invite_key(invite.secret).peer_id
    key_of(subject)
    kept = kept_run(arguments.state, wanted)
    manifest, folder = kept.manifest, kept.folder
    mine = credentials_of(manifest, peer_options.open_identity(arguments, kept.state), folder)
    grant = load_grant(manifest, mine, folder, time.time())
    if grant.role is not Role.ADMIN:
        raise CommandError(
            f"this peer is a {grant.role.name.lower()} of run {manifest.config.name}, and only admins ban: ask "
            "an admin (p2pdiloco members lists them)",
            REPAIR,
        )
    if subject == manifest.founder:
        raise CommandError("this key is the founder's, and a founder cannot be banned", REPAIR)
    files, members = MemberFiles(folder), members_of(manifest)
    files.load(members)
    target = members.grant_of(subject)
    if target is not None and not members.may_ban(grant, target):
        raise CommandError(
            f"{subject} is an admin who is as near to the founder as this peer, or nearer, so its ban would not "
            "count: ask the founder, or an admin who is nearer",
            REPAIR,
        )
    if arguments.keep_members:
        if target is not None or is_named:
            raise CommandError(
                f"--keep-members is for invites, and {subject} is a peer: its ban keeps the other peers of its "
                "invite anyway",
                REPAIR,
            )
        steps = (step for one in members.known() for step in one.steps if step.subject == subject)
        invite_grant = next(steps, None)
        if invite_grant is not None and members.ban_of(invite_grant) is not None:
            raise CommandError(f"the invite {subject} was closed already", REPAIR)
        if invite_grant is not None and not members.may_ban(grant, invite_grant):
            raise CommandError(_not_closed(subject), REPAIR)
        print(f"closed to new peers in run {manifest.config.name}: {subject}")
        print(*_close(subject, members, files, mine, grant), sep="\n")
        return 0
    statement = ban(manifest.run, subject, grant, mine.identity.sign)
    files.queue_statement(statement)
    members.learn(statement)
    print(f"banned from run {manifest.config.name}: {subject}")
    out = [one.subject for one in members.known() if subject in {step.subject for step in one.steps}]
    if out:
        print(f"{_are(out)} out too, because their membership depends on it:")
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
    """Close the invite with which the banned peer joined, if that is known; yields what happened, in lines."""
    target = members.grant_of(subject)
    if not members.is_private:
        yield "this run is open to all, so whoever was banned can come back with another key"
        return
    if target is None:
        yield (
            "this peer does not know with which invite it joined, so no invite was closed, and it may come back with "
            "another key"
        )
        return
    invite = target.steps[-1]
    if invite.kind is not Kind.INVITE:
        yield "it was admitted by name, so there is no invite with which it could come back under another key"
        return
    if members.ban_of(invite) is not None:
        yield f"the invite with which it joined, {invite.subject}, was closed already"
        return
    if not members.may_ban(by, invite):
        yield _not_closed(invite.subject)
        return
    yield f"closed the invite with which it joined, {invite.subject}: nobody new is let in by it; {ANOTHER}"
    yield from _close(invite.subject, members, files, mine, by)


def _not_closed(invite: PeerId) -> str:
    return (
        f"the invite {invite} makes admins, so only an admin nearer to the founder can close it: until one bans "
        f"{invite}, whoever holds it may come with another key"
    )


def _close(invite: PeerId, members: Members, files: MemberFiles, mine: Credentials, by: Grant) -> Iterator[str]:
    """Close an invite to all but those that it has admitted, and those for which it has places left; yields what
    happened, in lines."""
    guests = [(one, members.grant_of(one)) for one in members.guests_of(invite)]
    stay = [one for one, grant in guests if grant is None or (members.ban_of(grant) is None and members.has_place(one))]
    files.queue_statement(closing(mine.run, invite, stay, by, mine.identity.sign))
    if _is_shown(files, invite):
        files.write_invite("")
        yield "it was the invite that this peer shows when it starts: its next start shows another one"
    if stay:
        yield f"{_are(stay)} still in the run with that invite; to remove them, too: p2pdiloco members ban {invite}"
        yield from _shown(stay)


def _is_shown(files: MemberFiles, key: PeerId) -> bool:
    """Return whether the invite that this peer's terminal shows has this key."""
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


# -- List --------------------------------------------------------------------------------------------------------------


async def run_list(arguments: argparse.Namespace) -> int:
    """List the members of the runs in --state as far as this machine's peer knows them: role, expiry, inviter, and
    whether banned; and the peer id of this machine."""
    if arguments.id:
        place = None if arguments.run is None else kept_run(arguments.state, arguments.run).state
        print(peer_options.open_identity(arguments, place).peer_id)
        return 0
    first, *others = _peers(arguments)
    if arguments.json:
        below = {"others": [{"state": str(one.state), **one.to_json()} for one in others]} if others else {}
        print(json.dumps({**first.to_json(), **below}))
        return 0
    for one in (first, *others):
        where = "" if one is first and one.state == arguments.state else f"  in {one.state}"
        print(f"{'this' if one is first else 'another'} peer  {one.peer or NOBODY}{where}")
        for kept in one.runs:
            config = kept.manifest.config
            print(f"{config.name}  {kept.manifest.run[:12]}  {config.access}")
            for row in _rows(kept):
                print(f"  {row['key']}  {row['role']:<9}{row['until']:<22}{row['standing']}")
                used = f", {row['used']} of {row['uses']} used" if row["uses"] else ""
                print(f"    by {row['by']}{used}" if row["by"] else "    the founder")
    return 0


class _Peer(NamedTuple):
    """The peer of one state folder, and its runs."""

    state: Path
    peer: PeerId | None
    runs: list[KeptRun]

    def to_json(self) -> dict[str, Any]:
        return {"peer": self.peer, "runs": {kept.manifest.run: _rows(kept) for kept in self.runs}}


def _peers(arguments: argparse.Namespace) -> list[_Peer]:
    """The peer of the one run that is wanted; else that of --state, and of those in it the ones with runs."""
    state, wanted = arguments.state, arguments.run
    found = kept_runs(state) if wanted is None else [kept_run(state, wanted)]
    places = dict.fromkeys([*([state] if wanted is None else []), *(kept.state for kept in found)])
    keys = {place: peer_options.kept_identity(arguments, place) for place in places}
    return [
        _Peer(place, None if key is None else key.peer_id, [kept for kept in found if kept.state == place])
        for place, key in keys.items()
    ]


def _rows(kept: KeptRun) -> list[dict[str, Any]]:
    members = members_of(kept.manifest)
    MemberFiles(kept.folder).load(members)
    rows = [_row(members, grant) for grant in sorted(members.known(), key=lambda grant: (grant.depth, grant.subject))]
    seen = {row["key"] for row in rows}
    for subject, bans in sorted(members.banned_keys().items()):
        if subject not in seen:
            by = ", ".join(sorted({ban.by.subject for ban in bans}))
            standing = "closed to new peers" if all(ban.is_closing for ban in bans) else "banned"
            nothing = {"role": "-", "until": "-", "by_keys": [], "used": 0, "uses": 0}
            rows.append({"key": subject, "by": by, "standing": standing, **nothing})
    return rows


def _row(members: Members, grant: Grant) -> dict[str, Any]:
    ban = members.ban_of(grant)
    is_over = grant.not_after != NEVER and time.time() > grant.not_after
    standing = "member"
    if ban is not None:
        standing = f"its invite is {'closed' if ban.is_closing else 'revoked'}"
        if ban.subject == grant.subject:
            standing = "banned"
    elif is_over:
        standing = "expired"
    until = "for good"
    if grant.not_after != NEVER:
        until = f"{datetime.datetime.fromtimestamp(grant.not_after, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    path = [step.subject for step in grant.steps]
    invite = grant.steps[-1] if path and grant.steps[-1].kind is Kind.INVITE else None
    return {
        "key": grant.subject,
        "role": grant.role.name.lower(),
        "until": until,
        "by": " <- ".join(reversed(path)),
        "by_keys": path,
        "standing": standing,
        "used": 0 if invite is None else members.used_of(invite.subject),
        "uses": 0 if invite is None else invite.uses,
    }
