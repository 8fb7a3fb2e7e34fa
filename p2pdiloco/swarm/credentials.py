"""With what a peer is let in to a private run: its key, and the certificates that lead to it.

Rules of this file:
1. A certificate is made offline: by the founder, by who holds an invite, by a peer for its own questions.
2. What is kept for a run lies in STATE/RUN/members: ``chain`` (this peer's certificates), ``statements`` (what is known
   of members), ``invite`` (what the founder's terminal shows, secret), ``new/`` (what commands leave for a node).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.access.certificates import (
    NEVER,
    NO_CAP,
    Certificate,
    CertificateError,
    Chain,
    Kind,
    Role,
    certify,
    decode_chain,
    hint_of,
)
from p2pdiloco.access.invite_code import SECRET_BYTES, Invite
from p2pdiloco.access.members import Members
from p2pdiloco.access.membership_log import join_statements, mark_of, split_statements
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.util import logs
from p2pdiloco.util.files import write_atomically

log = logs.get("members")

FOLDER = "members"
NEW_LIMIT = 1024
"""Statements that wait for a node; of more the rest waits for its next look."""


class CredentialsError(ValueError):
    """A peer has not what lets it in, or cannot give what it was asked for; the text says what to do."""


class Credentials(NamedTuple):
    """What opens doors of ``run``."""

    run: RunId
    chain: bytes
    """Ends at the key of ``identity``; empty for the founder."""
    identity: Identity

    def certify(
        self, subject: PeerId, kind: Kind, role: Role, *, cap: int = NO_CAP, not_after: int = NEVER
    ) -> Certificate:
        """A certificate of ours for the key ``subject``."""
        bare = Certificate(kind=kind, role=role, subject=subject, cap=cap, not_after=not_after)
        return certify(self.run, self.identity.peer_id, bare, self.identity.sign)

    def chain_for(self, subject: PeerId, role: Role) -> bytes:
        """The chain of a peer whom we certify."""
        certificate = self.certify(subject, Kind.PEER, role)
        if not self.chain:
            return Chain(hint_of(self.identity.peer_id), (certificate,)).encode()
        chain = decode_chain(self.chain)
        return Chain(chain.hint, (*chain.certificates, certificate)).encode()


def invite_key(secret: bytes) -> Identity:
    """The key that an invite carries."""
    return Identity.from_secret(b"p2pdiloco invite key 1", secret)


def credentials_from_invite(invite: Invite, identity: Identity) -> Credentials:
    """This peer's credentials by an invite.

    Raises:
        CredentialsError: the invite is for another peer.
    """
    if invite.peer is not None and invite.peer != identity.peer_id:
        raise CredentialsError(
            f"the invite is for the peer {invite.peer}, and this one is {identity.peer_id}: join with that one's "
            "--state (or --identity_path), or ask for an invite for this one"
        )
    key = identity if invite.peer is not None else invite_key(invite.secret)
    first = Certificate(
        kind=invite.kind,
        role=invite.role,
        subject=key.peer_id,
        cap=invite.cap,
        not_after=invite.not_after,
        signature=invite.signature,
    )
    own = Credentials(invite.run, Chain(invite.hint, (first,)).encode(), key)
    if invite.peer is not None:
        return own
    return Credentials(invite.run, own.chain_for(identity.peer_id, invite.role), identity)


def make_invite(
    mine: Credentials,
    secret: bytes,
    *,
    role: Role,
    cap: int,
    not_after: int,
    addresses: tuple[str, ...],
    peer: PeerId | None = None,
) -> Invite:
    """An invite signed by us, for whoever has it, or for ``peer``; ``addresses``: a directory node's, with its id."""
    assert len(secret) == SECRET_BYTES
    subject = invite_key(secret).peer_id if peer is None else peer
    certificate = mine.certify(subject, Kind.INVITE if peer is None else Kind.PEER, role, cap=cap, not_after=not_after)
    split = [address.rpartition("/p2p/") for address in addresses]
    if not split:
        raise CredentialsError("there is no address under which a newcomer finds anybody: name one with --address")
    directory = PeerId(split[0][2])
    return Invite(
        run=mine.run,
        secret=secret if peer is None else b"",
        peer=peer,
        role=role,
        cap=cap,
        not_after=not_after,
        hint=hint_of(mine.identity.peer_id),
        signature=certificate.signature,
        directory=directory,
        addresses=tuple(bare for bare, _, node in split if node == directory),
    )


def members_of(manifest: Manifest) -> Members:
    """The run's members; nothing but its founder is known yet."""
    return Members(manifest.run, manifest.founder, manifest.config.access, verify)


class MemberFiles:
    """STATE/RUN/members. Everything here blocks on the disk."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER

    def chain(self) -> bytes:
        """This peer's, empty if there is none."""
        with contextlib.suppress(OSError):
            return (self.folder / "chain").read_bytes()
        return b""

    def write_chain(self, chain: bytes) -> None:
        """This peer's."""
        if chain != self.chain():
            write_atomically(self.folder / "chain", chain)

    def invite(self) -> str:
        """The founder's own, empty if there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.folder / "invite").read_text("ascii")
        return ""

    def write_invite(self, text: str) -> None:
        """The founder's own."""
        write_atomically(self.folder / "invite", text.encode("ascii"), mode=0o600)

    def load(self, members: Members) -> None:
        """Learn what is kept; what is damaged is passed over with a line in the log."""
        with contextlib.suppress(FileNotFoundError):
            _learn(members, (self.folder / "statements").read_bytes(), self.folder)
        for _ in self.take_queued(members, removes=False):
            pass

    def save(self, members: Members) -> None:
        """Keep what is known."""
        write_atomically(self.folder / "statements", join_statements(members.statements()))

    def leave(self, statement: bytes) -> None:
        """For the node that runs, or will."""
        write_atomically(self.folder / "new" / mark_of(statement).hex(), statement)

    def take_queued(self, members: Members, *, removes: bool = True) -> Iterator[bytes]:
        """What commands have left, as far as it is news."""
        try:
            paths = sorted(path for path in (self.folder / "new").iterdir() if not path.name.startswith("."))
        except OSError:
            return
        for path in paths[:NEW_LIMIT]:
            try:
                statement = path.read_bytes()
                if removes:
                    path.unlink()
                if members.learn(statement):
                    yield statement
            except (OSError, CertificateError) as error:
                log.warning("a statement of members not taken", file=path, reason=str(error))


def _learn(members: Members, data: bytes, where: Path) -> None:
    try:
        statements = split_statements(data)
    except CertificateError as error:
        log.warning(
            "what was known of members is damaged; it will come from other peers", folder=where, reason=str(error)
        )
        return
    for statement in statements:
        try:
            members.learn(statement)
        except CertificateError as error:
            log.warning("a statement of members not taken", folder=where, reason=str(error))
