"""Credentials that let a peer in to a private run: its key, and the certificates that lead to it; and their files.

Rules of this file:
1. A certificate is made offline: by the founder, by the holder of an invite, or by a peer for its own observers.
2. The files of a run are in STATE/RUN/members: ``chain`` (this peer's certificates), ``statements`` (the membership
   log), ``invite`` (the one that the founder's terminal shows; secret), ``new/`` (statements that commands leave for a
   node).
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
"""Statements that a node takes from ``new/`` at once; the rest waits for its next look."""


class CredentialsError(ValueError):
    """A peer lacks the credentials for what it was asked to do; the text says what to do."""


class Credentials(NamedTuple):
    """Let the peer with the key ``identity`` in to ``run``."""

    run: RunId
    chain: bytes
    """Ends at the key of ``identity``; empty for the founder."""
    identity: Identity

    def certify(
        self, subject: PeerId, kind: Kind, role: Role, *, cap: int = NO_CAP, not_after: int = NEVER
    ) -> Certificate:
        """Certify the key ``subject``."""
        bare = Certificate(kind=kind, role=role, subject=subject, cap=cap, not_after=not_after)
        return certify(self.run, self.identity.peer_id, bare, self.identity.sign)

    def chain_for(self, subject: PeerId, role: Role) -> bytes:
        """The certificate chain of a peer that this one certifies."""
        certificate = self.certify(subject, Kind.PEER, role)
        if not self.chain:
            return Chain(hint_of(self.identity.peer_id), (certificate,)).encode()
        chain = decode_chain(self.chain)
        return Chain(chain.hint, (*chain.certificates, certificate)).encode()


def invite_key(secret: bytes) -> Identity:
    """The key that an invite carries."""
    return Identity.from_secret(b"p2pdiloco invite key 1", secret)


def credentials_from_invite(invite: Invite, identity: Identity) -> Credentials:
    """Credentials that an invite gives this peer.

    Raises:
        CredentialsError: the invite is for another peer.
    """
    if invite.peer is not None and invite.peer != identity.peer_id:
        raise CredentialsError(
            f"the invite is for the peer {invite.peer}, and this one is {identity.peer_id}: join with that one's "
            "--state (or --identity), or ask for an invite for this one"
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
    """Make an invite for anybody who has it, or for ``peer`` alone.

    addresses: those of a directory node, with its peer id.
    """
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
    """Members of the run; only its founder is known yet."""
    return Members(manifest.run, manifest.founder, manifest.config.access, verify)


class MemberFiles:
    """STATE/RUN/members. Everything here blocks on the disk."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER

    def chain(self) -> bytes:
        """This peer's certificate chain, empty if there is none."""
        with contextlib.suppress(OSError):
            return (self.folder / "chain").read_bytes()
        return b""

    def write_chain(self, chain: bytes) -> None:
        """Keep this peer's certificate chain."""
        if chain != self.chain():
            write_atomically(self.folder / "chain", chain)

    def invite(self) -> str:
        """The invite that the founder's terminal shows, empty if there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.folder / "invite").read_text("ascii")
        return ""

    def write_invite(self, text: str) -> None:
        """Keep the invite that the founder's terminal shows."""
        write_atomically(self.folder / "invite", text.encode("ascii"), mode=0o600)

    def load(self, members: Members) -> None:
        """Learn all statements in the files; damaged ones are skipped with a line in the log."""
        with contextlib.suppress(FileNotFoundError):
            _learn(members, (self.folder / "statements").read_bytes(), self.folder)
        for _ in self.take_queued(members, removes=False):
            pass

    def save(self, members: Members) -> None:
        """Write all statements that are known."""
        write_atomically(self.folder / "statements", join_statements(members.statements()))

    def queue_statement(self, statement: bytes) -> None:
        """Leave a statement for the node that runs here, or the next one."""
        write_atomically(self.folder / "new" / mark_of(statement).hex(), statement)

    def take_queued(self, members: Members, *, removes: bool = True) -> Iterator[bytes]:
        """Learn the statements that commands have left; those that are news."""
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
