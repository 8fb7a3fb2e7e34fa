"""Invites as people ask for them: which peer may give which one, and how newcomers find the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from p2pdiloco.access.certificates import CAP_UNIT, NEVER, NO_CAP, Grant, Role, hint_of
from p2pdiloco.access.invite_code import SECRET_BYTES, Invite, InviteError, clean_invite, decode_invite, encode_invite
from p2pdiloco.access.members import NotAMemberError, UnknownInviterError
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.swarm.credentials import (
    Credentials,
    CredentialsError,
    MemberFiles,
    credentials_from_invite,
    make_invite,
    members_of,
)
from p2pdiloco.swarm.run_index import folder_of, is_meant, manifests_here
from p2pdiloco.transport.identity import KEY_FILE, Identity
from p2pdiloco.util import logs
from p2pdiloco.util.files import write_atomically
from p2pdiloco.util.status_pipe import Invited, Say

log = logs.get("invites")

ADDRESSES = "addresses"
"""File in STATE/RUN/members: addresses at which newcomers find the directory, one a line."""
MOVED = "newcomers find the run at another place now: the addresses that were told before do not answer"
AGAIN = "the directory answers again where newcomers were told to ask at first: the first invite is good"
NOBODY_COMES = (
    "nobody new finds the run now: what invites name does not answer, and this machine cannot be dialled. Start that "
    "bootstrap again, or another one (p2pdiloco bootstrap) and this peer with it (--bootstrap)"
)
LOOK_S = 10.0
"""Between two looks at whether these addresses are right."""
LOOKS = 6
"""Looks that have to agree before anything is changed or told: a bootstrap may hang for a while, or restart."""


def credentials_of(
    manifest: Manifest, identity: Identity, run_folder: Path, invite: Invite | None = None
) -> Credentials:
    """This peer's credentials by ``invite``, or those in its files. A peer that issued the invite keeps its own role.

    Raises:
        CredentialsError: the run takes members only, and this peer has no certificate.
    """
    if invite is not None and invite.run == manifest.run and invite.hint != hint_of(identity.peer_id):
        return credentials_from_invite(invite, identity)
    chain = b"" if manifest.founder == identity.peer_id else MemberFiles(run_folder).chain()
    if manifest.config.access != "open" and manifest.founder != identity.peer_id and not chain:
        raise CredentialsError(
            f"run {manifest.config.name} ({manifest.run[:12]}) takes members only, and {run_folder} has no certificate "
            f"for this peer ({identity.peer_id}): join once with an invite, p2pdiloco join INVITE"
        )
    return Credentials(manifest.run, chain, identity)


def credentials_for_joining(invite: Invite, identity: Identity, state: Path) -> Credentials:
    """This peer's credentials by ``invite``, before it has asked another peer for the manifest.

    Raises:
        CredentialsError: the invite is for another peer.
    """
    for manifest in manifests_here(state):
        if manifest.run == invite.run:
            return credentials_of(manifest, identity, folder_of(state, manifest.run), invite)
    return credentials_from_invite(invite, identity)


def require_membership(
    manifest: Manifest, identity: Identity, state: Path, invite: Invite | None, folders: Sequence[Path]
) -> None:
    """Check that the peer of ``state`` may resume a run from ``folders``.

    Raises:
        CredentialsError: it is no member of the run; the text says whose state it is.
    """
    try:
        credentials_of(manifest, identity, folder_of(state, manifest.run), invite)
    except CredentialsError as error:
        here = (place for folder in folders for place in (folder, folder.parent) if (place / KEY_FILE).is_file())
        if (place := next(here, None)) is None:
            raise
        raise CredentialsError(
            f"{error}; or go on as the peer that has it, p2pdiloco resume {place} --state {place}"
        ) from None


def find_credentials(state: Path, wanted: str | None, identity: Identity) -> Credentials | None:
    """Credentials for a private run that was joined here before. ``wanted``: its name, or the beginning of its id."""
    for manifest in manifests_here(state) if wanted else []:
        if is_meant(wanted, manifest.config.name, manifest.run) and manifest.config.access != "open":
            with contextlib.suppress(CredentialsError):
                return credentials_of(manifest, identity, folder_of(state, manifest.run))
    return None


def load_grant(manifest: Manifest, mine: Credentials, run_folder: Path, now_s: float) -> Grant:
    """What this peer may do, by the membership log in its files.

    Raises:
        CredentialsError: it is no longer a member.
        UnknownInviterError: the admin who invited it is not known here yet.
    """
    members = members_of(manifest)
    MemberFiles(run_folder).load(members)
    try:
        return members.admit(mine.identity.peer_id, mine.chain, now_s)
    except UnknownInviterError:
        raise
    except NotAMemberError as error:
        raise CredentialsError(str(error)) from None


def keep_addresses(run_folder: Path, addresses: Sequence[str]) -> None:
    """Keep the addresses at which newcomers find the directory, for invites that are made later."""
    folder = MemberFiles(run_folder).folder
    write_atomically(folder / ADDRESSES, "".join(f"{address}\n" for address in addresses).encode())


def kept_addresses(run_folder: Path) -> tuple[str, ...]:
    """Addresses that ``keep_addresses`` has kept."""
    try:
        return tuple((MemberFiles(run_folder).folder / ADDRESSES).read_text().split())
    except OSError:
        return ()


def invite_text(
    manifest: Manifest,
    mine: Credentials,
    grant: Grant,
    addresses: tuple[str, ...],
    *,
    role: Role = Role.LEARNER,
    max_weight: float | None = None,
    not_after: int = NEVER,
    peer: PeerId | None = None,
) -> str:
    """Make a new invite.

    Raises:
        CredentialsError: this peer may not invite, or the run has no use for an invite, or for this one.
    """
    config = manifest.config
    if config.access == "open":
        raise CredentialsError(
            f"run {config.name} is open: whoever knows an address joins it, with p2pdiloco join ADDR"
        )
    if grant.role is not Role.ADMIN:
        raise CredentialsError(
            f"this peer is a {grant.role.name.lower()} of run {config.name}, and only admins invite: ask one "
            "of them for it (p2pdiloco members tells who they are)"
        )
    if config.access == "list" and peer is None:
        raise CredentialsError(
            f"run {config.name} takes peers by name only: add --peer with the newcomer's id, which p2pdiloco members "
            "--id tells on its machine"
        )
    cap = NO_CAP if max_weight is None else round(max_weight / CAP_UNIT)
    if not 0 < cap <= NO_CAP:
        raise CredentialsError(f"--max-weight {max_weight}: from {CAP_UNIT} to {(NO_CAP - 1) * CAP_UNIT:,.0f}")
    secret = os.urandom(SECRET_BYTES)
    invite = make_invite(mine, secret, role=role, cap=cap, not_after=not_after, addresses=addresses, peer=peer)
    return encode_invite(invite)


def load_or_make_invite(
    manifest: Manifest, mine: Credentials, grant: Grant, run_folder: Path, addresses: tuple[str, ...]
) -> str:
    """The invite that an admin's terminal shows. A new one is made only if the addresses in the last one are wrong."""
    files = MemberFiles(run_folder)
    kept = files.invite()
    try:
        if kept and set(decode_invite(kept).initial_peers()) <= set(addresses):
            return clean_invite(kept)
    except InviteError:
        pass
    text = invite_text(manifest, mine, grant, addresses)
    files.write_invite(text)
    return text


def apply_grant(manifest: Manifest, mine: Credentials, options: PeerOptions, say: Callable[[str], None]) -> PeerOptions:
    """Limit ``options`` to what the peer's certificate allows, and keep its certificate chain.

    Raises:
        CredentialsError: it is no member, or no longer one.
    """
    MemberFiles(options.folder).write_chain(mine.chain)
    try:
        grant = load_grant(manifest, mine, options.folder, time.time())
    except UnknownInviterError:
        return options  # others will introduce that admin
    if grant.role < Role.LEARNER and not options.is_follower:
        say(f"the invite to run {manifest.config.name} is a follower's: this peer tracks the model and does not train")
        options = msgspec.structs.replace(options, is_follower=True)
    if 0.0 < grant.most_weight < options.link.weight:
        options = msgspec.structs.replace(options, link=msgspec.structs.replace(options.link, weight=grant.most_weight))
    return options


def how_to_join(manifest: Manifest, mine: Credentials, folder: Path, directory: Directory) -> list[Invited]:
    """How others join the run, for the user of a peer that may invite them. A run of training scripts is joined by a
    script, which ``p2pdiloco join`` has not."""
    name, is_scripts = manifest.config.name, manifest.config.model.kind == "external"
    usage = 'initial_peers=["{}"]' if is_scripts else "p2pdiloco join {}"
    if manifest.config.access == "open":
        where = dict.fromkeys((*directory.visible_addresses(), *directory.meeting_places()))
        run = "" if is_scripts else f" --run {name}"
        return [Invited(address, usage.format(address) + run) for address in where]
    grant = load_grant(manifest, mine, folder, time.time())
    if grant.role is not Role.ADMIN:
        return []
    if manifest.config.access == "list":
        made = f"{usage.format('INVITE')}, made for a peer by p2pdiloco members add --peer ID"
        where_made = f" --run {name} --state {shlex.quote(str(folder.parent))}" if is_scripts else ""
        return [Invited("", made + where_made)]
    invite = load_or_make_invite(manifest, mine, grant, folder, directory.meeting_places())
    return [Invited(invite, usage.format(invite))]


async def keep_meeting_places(
    manifest: Manifest,
    mine: Credentials,
    folder: Path,
    directory: Directory,
    is_dialable: Callable[[], bool | None],
    say: Say | None,
) -> None:
    """Until cancelled, keep the addresses for later invites right: a bootstrap may go away and come back.

    is_dialable: whether others have dialled this peer's directory node; None if nobody has tried.
    say: tells the user of a change that lasts, and how to join then; None: the user is not told.
    """
    first = kept = directory.meeting_places()
    told = seen = first, True
    looks = 0
    while True:
        await asyncio.sleep(LOOK_S)
        places = directory.meeting_places()
        is_own = _belong_to(places, directory.peer_id)
        found = places, not is_own or places == first or is_dialable() is not False
        looks, seen = looks + 1 if found == seen else 1, found
        if looks < LOOKS:
            continue
        is_of_use = found[1]
        if is_of_use and places != kept:
            try:
                await asyncio.to_thread(keep_addresses, folder, places)
            except OSError as error:
                log.warning("where newcomers find the run is not kept for invites", reason=str(error))
            else:
                kept = places
        if found == told:
            continue
        told = found
        is_again = places == first
        if not is_own and _belong_to(first, directory.peer_id):
            first = places  # initial peers, which did not answer at the start
        if say is None:
            continue
        if is_again or not is_of_use:
            say(AGAIN if is_again else NOBODY_COMES)
            continue
        say(MOVED)
        for invited in await asyncio.to_thread(how_to_join, manifest, mine, folder, directory):
            say(invited)


def _belong_to(places: Sequence[str], peer: PeerId) -> bool:
    return any(place.endswith(f"/p2p/{peer}") for place in places)
