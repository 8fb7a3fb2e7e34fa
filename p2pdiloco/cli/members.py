"""``p2pdiloco members``: List the members of the runs in --state: role, expiry, inviter, whether banned; and the
peer id of this machine. The list is what this machine's peer knows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from p2pdiloco.access.certificates import NEVER, Grant
from p2pdiloco.access.members import Members
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import as_command_errors
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.credentials import MemberFiles, members_of
from p2pdiloco.swarm.run_index import ConfigError, KeptRun, kept_run, kept_runs
from p2pdiloco.transport.identity import IdentityError

NOBODY = "has no id yet: it gets one when it first takes part, or now by p2pdiloco members --id"


async def run(arguments: argparse.Namespace) -> int:
    """Print and go."""
    with as_command_errors(repair=(ConfigError, IdentityError, ValueError), nobody=()):
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
                    print(f"    by {row['by']}" if row["by"] else "    the founder")
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
            rows.append({"key": subject, "role": "-", "until": "-", "by": by, "standing": standing, "by_keys": []})
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
    return {
        "key": grant.subject,
        "role": grant.role.name.lower(),
        "until": until,
        "by": " <- ".join(reversed(path)),
        "by_keys": path,
        "standing": standing,
    }
