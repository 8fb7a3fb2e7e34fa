"""Invites to a run: checks which peer may issue which invite, and keeps the addresses in invites up to date."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from p2pdiloco.access.certificates import CAP_UNIT, NEVER, NO_CAP, USES_LIMIT, Grant, Role, hint_of
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
from p2pdiloco.util.files import read_regular, write_atomically
from p2pdiloco.util.status_pipe import Invited, Say

log = logs.get("invites")

# File in STATE/RUN/members: addresses at which newcomers find the directory, one a line.
ADDRESSES = "addresses"
MOVED = "the addresses in earlier invites no longer answer; newcomers must use new ones"
AGAIN = "the addresses in the first invite answer again: that invite works"
NOBODY_COMES = (
    "newcomers cannot find the run: the addresses in invites do not answer, and others cannot dial this machine. Start "
    "the bootstrap again, or another one (p2pdiloco bootstrap) and this peer with it (--bootstrap)"
)
# Number of peers that the invite of the founder's terminal admits: it is for the founder's own machines.
OWN_MACHINES = USES_LIMIT
# Interval between two checks of these addresses.
LOOK_S = 10.0
# Number of checks that must agree before an address is changed or the user is told: a bootstrap may hang, or restart.
LOOKS = 6


def credentials_of(
    manifest: Manifest, identity: Identity, run_folder: Path, invite: Invite | None = None
) -> Credentials:
    """Return this peer's credentials, from ``invite`` or from its files.

    A peer that issued the invite itself keeps its own role.

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
    """Return this peer's credentials from ``invite``, before it has asked another peer for the manifest.

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
        CredentialsError: the peer is not a member of the run. The message names the peer whose state it is.
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
    """Return the credentials for a private run that was joined here before, or None.

    wanted: name of the run, or the beginning of its id.
    """
    for manifest in manifests_here(state) if wanted else []:
        if is_meant(wanted, manifest.config.name, manifest.run) and manifest.config.access != "open":
            with contextlib.suppress(CredentialsError):
                return credentials_of(manifest, identity, folder_of(state, manifest.run))
    return None


def load_grant(manifest: Manifest, mine: Credentials, run_folder: Path, now_s: float) -> Grant:
    """Return this peer's role and limits according to the membership log in its files.

    Raises:
        CredentialsError: this peer is no longer a member.
        UnknownInviterError: the admin who invited this peer is not known here yet.
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
    """Save the addresses at which newcomers find the directory, for later invites."""
    folder = MemberFiles(run_folder).folder
    write_atomically(folder / ADDRESSES, "".join(f"{address}\n" for address in addresses).encode())


def kept_addresses(run_folder: Path) -> tuple[str, ...]:
    """Return the addresses that ``keep_addresses`` has saved."""
    try:
        return tuple(read_regular(MemberFiles(run_folder).folder / ADDRESSES).decode().split())
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
    uses: int = 1,
    peer: PeerId | None = None,
) -> str:
    """Return the text of a new invite.

    not_after: end of its validity, in seconds since 1970.
    uses: number of peers that it admits.
    peer: the only peer that may use it; None: anybody who holds it.

    Raises:
        CredentialsError: this peer may not issue invites, or the run's access mode does not allow this invite.
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
    terms = {"cap": cap, "not_after": not_after, "uses": uses}
    return encode_invite(make_invite(mine, secret, role=role, addresses=addresses, peer=peer, **terms))


def load_or_make_invite(
    manifest: Manifest, mine: Credentials, grant: Grant, run_folder: Path, addresses: tuple[str, ...]
) -> str:
    """Return the invite that an admin's terminal shows, for the admin's own machines. The last one is reused while the
    addresses in it are right."""
    files = MemberFiles(run_folder)
    kept = files.invite()
    try:
        if kept:
            invite = decode_invite(kept)
            # Only of its first directory node: further ones may come and go.
            first = {place for place in invite.initial_peers() if place.endswith(f"/p2p/{invite.directory}")}
            if first <= set(addresses):
                return clean_invite(kept)
    except InviteError:
        pass
    text = invite_text(manifest, mine, grant, addresses, uses=OWN_MACHINES)
    files.write_invite(text)
    return text


def apply_grant(manifest: Manifest, mine: Credentials, options: PeerOptions, say: Callable[[str], None]) -> PeerOptions:
    """Limit ``options`` to what the peer's certificate allows, and save its certificate chain.

    Raises:
        CredentialsError: the peer is not a member, or no longer one.
    """
    MemberFiles(options.folder).write_chain(mine.chain)
    try:
        grant = load_grant(manifest, mine, options.folder, time.time())
    except UnknownInviterError:
        return options  # other peers will send that admin's certificate
    if grant.role < Role.LEARNER and not options.is_follower:
        say(f"the invite to run {manifest.config.name} is for a follower: this peer tracks the model without training")
        options = msgspec.structs.replace(options, is_follower=True)
    if 0.0 < grant.most_weight < options.link.weight:
        options = msgspec.structs.replace(options, link=msgspec.structs.replace(options.link, weight=grant.most_weight))
    return options


def how_to_join(manifest: Manifest, mine: Credentials, folder: Path, directory: Directory) -> list[Invited]:
    """Return the ways to join the run, to show to the user of this peer; empty if this peer may not invite.

    A run of training scripts is joined by a script, so its usage is Python and not a command."""
    name, is_scripts = manifest.config.name, manifest.config.model.kind == "external"
    usage = 'initial_peers=["{}"]' if is_scripts else "p2pdiloco join {}"
    if manifest.config.access == "open":
        where = dict.fromkeys((*directory.visible_addresses(), *directory.invite_addresses()))
        run = "" if is_scripts else f" --run {name}"
        return [Invited(address, usage.format(address) + run) for address in where]
    grant = load_grant(manifest, mine, folder, time.time())
    if grant.role is not Role.ADMIN:
        return []
    where_made = f" --run {name} --state {shlex.quote(str(folder.parent))}" if is_scripts else ""
    if manifest.config.access == "list":
        made = f"{usage.format('INVITE')}, made for a peer by p2pdiloco members add --peer ID"
        return [Invited("", made + where_made)]
    places = (*directory.invite_addresses(), *directory.further_invite_addresses())
    invite = load_or_make_invite(manifest, mine, grant, folder, places)
    notes = (
        f"this invite is for your own machines: whoever has it counts as up to {OWN_MACHINES} peers",
        f"for another person: p2pdiloco members add{where_made} (one peer per invite)",
    )
    return [Invited(invite, usage.format(invite), notes, str(MemberFiles(folder).folder / "invite"))]


async def keep_invite_addresses(
    manifest: Manifest,
    mine: Credentials,
    folder: Path,
    directory: Directory,
    is_dialable: Callable[[], bool | None],
    say: Say | None,
) -> None:
    """Keep the addresses for later invites up to date until cancelled: a bootstrap may go away and come back.

    is_dialable: returns whether others could dial this peer's directory node; None if nobody has tried.
    say: tells the user about a lasting change, and how to join then; None: the user is not told.
    """
    first = directory.invite_addresses()
    kept = await asyncio.to_thread(kept_addresses, folder)
    told = seen = first, True
    looks = 0
    while True:
        await asyncio.sleep(LOOK_S)
        places = directory.invite_addresses()
        is_own = _belong_to(places, directory.peer_id)
        found = places, not is_own or places == first or is_dialable() is not False
        looks, seen = looks + 1 if found == seen else 1, found
        if looks < LOOKS:
            continue
        is_of_use, wanted = found[1], (*places, *directory.further_invite_addresses())
        if is_of_use and wanted != kept:
            try:
                await asyncio.to_thread(keep_addresses, folder, wanted)
            except OSError as error:
                log.warning("the addresses for later invites cannot be saved", reason=str(error))
            else:
                kept = wanted
        if found == told:
            continue
        told = found
        is_again = places == first
        if not is_own and _belong_to(first, directory.peer_id):
            first = places  # the initial peers, which did not answer at the start
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
