"""``p2pdiloco members``: Show who is a member of the runs in --state: role, until when, by whom, banned or not; and
this machine's own peer id. It is what this machine's peer knows; nobody is asked."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from typing import Any

from p2pdiloco.cli import peer
from p2pdiloco.cli.complaints import complaining
from p2pdiloco.node.credentials import MemberFiles, members_of
from p2pdiloco.node.kept_runs import ConfigError, folder_of, manifest_here, manifests_here
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.runtime.identity import IdentityError
from p2pdiloco.wire.certificates import NEVER, Grant
from p2pdiloco.wire.members import Members


async def run(arguments: argparse.Namespace) -> int:
    """Print and go."""
    with complaining(repair=(ConfigError, IdentityError, ValueError), nobody=()):
        me = peer.open_identity(arguments).peer_id
        wanted = arguments.run
        manifests = manifests_here(arguments.state) if wanted is None else [manifest_here(arguments.state, wanted)]
        found = {manifest.run: _rows(manifest, arguments) for manifest in manifests}
        if arguments.json:
            print(json.dumps({"peer": me, "runs": found}))
            return 0
        print(f"this peer  {me}")
        for manifest in manifests:
            config = manifest.config
            print(f"{config.name}  {manifest.run[:12]}  {config.access}")
            for row in found[manifest.run]:
                print(f"  {row['key']}  {row['role']:<9}{row['until']:<22}{row['standing']}")
                print(f"    by {row['by']}" if row["by"] else "    the founder")
    return 0


def _rows(manifest: Manifest, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    members = members_of(manifest)
    MemberFiles(folder_of(arguments.state, manifest.run)).load(members)
    rows = [_row(members, grant) for grant in sorted(members.known(), key=lambda grant: (grant.depth, grant.subject))]
    seen = {row["key"] for row in rows}
    for subject, bans in sorted(members.banned_keys().items()):
        if subject not in seen:
            by = ", ".join(sorted(ban.by.subject for ban in bans))
            rows.append({"key": subject, "role": "-", "until": "-", "by": by, "standing": "banned", "by_keys": []})
    return rows


def _row(members: Members, grant: Grant) -> dict[str, Any]:
    ban = members.ban_of(grant)
    is_over = grant.not_after != NEVER and time.time() > grant.not_after
    standing = "member"
    if ban is not None:
        standing = "banned" if ban.subject == grant.subject else "its invite is revoked"
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
