"""Credentials for a private run: a peer's key and its certificate chain, and the files that hold them.

Rules of this file:
1. Certificates are made offline: by the founder, by the holder of an invite, or by a peer for its own observers.
2. The files of a run are in STATE/RUN/members: ``chain`` (this peer's certificates), ``statements`` (the membership
   log), ``seen`` (the marks of the peers in it that were seen here), ``invite`` (the invite that the founder's terminal
   shows; secret), ``new/`` (statements that commands leave for the node).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
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
from p2pdiloco.access.members import NOBODY, Members
from p2pdiloco.access.membership_log import (
    INTRODUCTION,
    MARK_BYTES,
    join_statements,
    last_in,
    mark_of,
    split_statements,
)
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically

log = logs.get("members")

FOLDER = "members"
# Maximum number of statements to take from ``new/`` at a time; the rest waits for the next time.
NEW_LIMIT = 1024


class CredentialsError(ValueError):
    """A peer lacks the credentials for an operation. The message says what to do."""


class Credentials(NamedTuple):
    """Key and certificate chain that admit a peer to ``run``."""

    run: RunId
    chain: bytes
    """Certificate chain that ends at the key of ``identity``; empty for the founder."""
    identity: Identity

    def certify(
        self, subject: PeerId, kind: Kind, role: Role, *, cap: int = NO_CAP, not_after: int = NEVER, uses: int = 1
    ) -> Certificate:
        """Certify the key ``subject``."""
        bare = Certificate(kind=kind, role=role, subject=subject, cap=cap, not_after=not_after, uses=uses)
        return certify(self.run, self.identity.peer_id, bare, self.identity.sign)

    def chain_for(self, subject: PeerId, role: Role) -> bytes:
        """Return the certificate chain of ``subject``, certified by this peer."""
        certificate = self.certify(subject, Kind.PEER, role)
        if not self.chain:
            return Chain(hint_of(self.identity.peer_id), (certificate,)).encode()
        chain = decode_chain(self.chain)
        return Chain(chain.hint, (*chain.certificates, certificate)).encode()


def invite_key(secret: bytes) -> Identity:
    """Return the key pair derived from the secret of an invite."""
    return Identity.from_secret(b"p2pdiloco invite key 1", secret)


def credentials_from_invite(invite: Invite, identity: Identity) -> Credentials:
    """Return the credentials that an invite gives this peer.

    Raises:
        CredentialsError: the invite is for another peer.
    """
    if invite.peer is not None and invite.peer != identity.peer_id:
        raise CredentialsError(
            f"the invite is for the peer {invite.peer}, and this one is {identity.peer_id}: join with that one's "
            "--state (or --identity), or ask for an invite for this one"
        )
    if invite.peer is not None:
        return _first_credentials(invite, identity)
    chain = observing_credentials(invite).chain_for(identity.peer_id, invite.role)
    return Credentials(invite.run, chain, identity)


def observing_credentials(invite: Invite) -> Credentials:
    """Return the credentials of an invite's own key. They certify observers, which take no place of the invite."""
    assert invite.peer is None
    return _first_credentials(invite, invite_key(invite.secret))


def _first_credentials(invite: Invite, key: Identity) -> Credentials:
    """Return the credentials of ``key``, which the certificate in ``invite`` names."""
    first = Certificate(
        kind=invite.kind,
        role=invite.role,
        subject=key.peer_id,
        cap=invite.cap,
        not_after=invite.not_after,
        uses=invite.uses,
        signature=invite.signature,
    )
    return Credentials(invite.run, Chain(invite.hint, (first,)).encode(), key)


def make_invite(
    mine: Credentials,
    secret: bytes,
    *,
    role: Role,
    cap: int,
    not_after: int,
    uses: int = 1,
    addresses: tuple[str, ...],
    peer: PeerId | None = None,
) -> Invite:
    """Return an invite, for ``peer`` alone or else for anybody who holds it.

    uses: number of peers that it admits.
    addresses: multiaddrs of directory nodes, with their peer ids. All of the first one's come first.

    Raises:
        CredentialsError: there are no addresses.
    """
    assert len(secret) == SECRET_BYTES
    subject = invite_key(secret).peer_id if peer is None else peer
    kind = Kind.INVITE if peer is None else Kind.PEER
    certificate = mine.certify(subject, kind, role, cap=cap, not_after=not_after, uses=uses)
    split = [address.rpartition("/p2p/") for address in addresses]
    if not split:
        raise CredentialsError("an invite needs an address at which newcomers find the run: name one with --address")
    order = list(dict.fromkeys(node for _, _, node in split))
    split.sort(key=lambda one: order.index(one[2]))
    directory = PeerId(split[0][2])
    return Invite(
        run=mine.run,
        secret=secret if peer is None else b"",
        peer=peer,
        role=role,
        cap=cap,
        not_after=not_after,
        uses=uses,
        hint=hint_of(mine.identity.peer_id),
        signature=certificate.signature,
        directory=directory,
        addresses=tuple(bare for bare, _, node in split if node == directory),
        others=tuple(f"{bare}/p2p/{node}" for bare, _, node in split if node != directory),
    )


def members_of(manifest: Manifest) -> Members:
    """Return the members of a run before any statement is known: only its founder."""
    return Members(manifest.run, manifest.founder, manifest.config.access, verify)


class MemberFiles:
    """The folder STATE/RUN/members. All methods block on the disk."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        # Files in ``new/`` whose statements were taken and are not among the saved ones yet.
        self._taken: list[Path] = []

    def chain(self) -> bytes:
        """Return this peer's certificate chain, empty if there is none."""
        with contextlib.suppress(OSError):
            return read_regular(self.folder / "chain")
        return b""

    def write_chain(self, chain: bytes) -> None:
        """Write this peer's certificate chain."""
        if chain != self.chain():
            write_atomically(self.folder / "chain", chain)

    def invite(self) -> str:
        """Return the invite that the founder's terminal shows, empty if there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read_regular(self.folder / "invite").decode("ascii")
        return ""

    def write_invite(self, text: str) -> None:
        """Write the invite that the founder's terminal shows, readable only by this user."""
        write_atomically(self.folder / "invite", text.encode("ascii"))

    def load(self, members: Members) -> None:
        """Add all statements in the files to ``members``. Damaged ones are logged and skipped."""
        seen = b""
        with contextlib.suppress(FileNotFoundError):
            seen = read_regular(self.folder / "seen")
        with contextlib.suppress(FileNotFoundError):
            _learn(members, read_regular(self.folder / "statements"), seen, self.folder)
        for path in self._queued():
            self._take(path, members)

    def save(self, members: Members) -> None:
        """Write all known statements, then remove the queued ones that were taken before."""
        taken = list(self._taken)
        statements, seen = join_statements(members.statements()), members.seen_marks()
        write_atomically(self.folder / "statements", statements)
        write_atomically(self.folder / "seen", seen)
        for path in taken:
            path.unlink(missing_ok=True)
            self._taken.remove(path)

    def queue_statement(self, statement: bytes) -> None:
        """Leave a statement for the node of this folder, which takes it while it runs or when it starts."""
        write_atomically(self.folder / "new" / mark_of(statement).hex(), statement)

    def prolonged_to(self, manifest: Manifest) -> int:
        """Return the steps or tokens to which the run is prolonged, as far as the files say; 0: it is not.

        Only the statements that matter for this are verified. Damaged files count as empty.
        """
        statements = self._raw()
        if not any(map(last_in, statements)):
            return 0
        members = members_of(manifest)
        for statement in statements:
            if not statement.startswith(INTRODUCTION):
                with contextlib.suppress(CertificateError):
                    members.learn(statement)
        return members.prolonged_to

    def take_over_end(self, manifest: Manifest, others: Iterable[Path]) -> None:
        """Queue the statements that prolong the run from ``others``, which may be copies of the run's folder."""
        members = members_of(manifest)
        own = self._raw()
        for statement in itertools.chain.from_iterable(MemberFiles(folder)._raw() for folder in others):
            with contextlib.suppress(CertificateError):
                if last_in(statement) and statement not in own and members.learn(statement):
                    self.queue_statement(statement)

    def _raw(self) -> list[bytes]:
        """Return the statements in the files, without verifying them. Damaged files count as empty."""
        statements: list[bytes] = []
        with contextlib.suppress(OSError, CertificateError):
            statements += split_statements(read_regular(self.folder / "statements"))
        with contextlib.suppress(OSError):
            statements += [read_regular(path) for path in self._queued()]
        return statements

    @property
    def taken(self) -> int:
        """Number of statements that were taken from the queue, which ``save`` removes there."""
        return len(self._taken)

    def take_queued(self, members: Members) -> Iterator[bytes]:
        """Add the statements that commands have left to ``members``; yield those that are new.

        They stay in the queue until ``save``, so that a crash loses none.
        """
        for path in self._queued():
            if path not in self._taken:
                self._taken.append(path)
                if (statement := self._take(path, members)) is not None:
                    yield statement

    def _queued(self) -> list[Path]:
        try:
            return sorted(path for path in (self.folder / "new").iterdir() if not path.name.startswith("."))[:NEW_LIMIT]
        except OSError:
            return []

    def _take(self, path: Path, members: Members) -> bytes | None:
        """Add a queued statement to ``members``; return it if it is new."""
        try:
            statement = read_regular(path)
            return statement if members.learn(statement) else None
        except (OSError, CertificateError) as error:
            log.warning("a membership statement is ignored", file=path, reason=str(error))
            return None


def _learn(members: Members, data: bytes, seen: bytes, where: Path) -> None:
    was_seen = {seen[at : at + MARK_BYTES] for at in range(0, len(seen), MARK_BYTES)}
    try:
        statements = split_statements(data)
    except CertificateError as error:
        log.warning("the membership log is damaged; other peers will send it again", folder=where, reason=str(error))
        return
    for statement in statements:
        try:
            members.learn(statement, None if mark_of(statement) in was_seen else NOBODY)
        except CertificateError as error:
            log.warning("a membership statement is ignored", folder=where, reason=str(error))
