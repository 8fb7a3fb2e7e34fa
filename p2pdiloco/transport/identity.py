"""Identity of a peer: an Ed25519 key in libp2p's private-key format, shared with the DHT daemon.

Rules of this file:
1. The peer id alone suffices to verify a signature (wire/peer_ids.py).
2. The file has mode 0600, appears as a whole or not at all, and is never overwritten.
3. One identity serves one running peer: ``hold`` takes a lock that the kernel releases if the process dies.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.util.errors import UserError
from p2pdiloco.util.files import LockedError, lock, make_parent, read_regular, sync_folder, write_temporary
from p2pdiloco.wire.peer_ids import KEY_BYTES, key_of, peer_id_of

KEY_FILE = "identity.key"
"""Name of the key file in a peer's state folder, unless the user names another file."""
FILE_PREFIX = b"\x08\x01\x12\x40"
"""Protobuf: key type Ed25519, then 64 bytes of data (private key, public key)."""
FILE_BYTES = len(FILE_PREFIX) + 2 * KEY_BYTES
RSA_PREFIX = b"\x08\x00"
ANOTHER = "give another folder with --state, or repair that one (ls -ld shows its owner, df its free space)"


class IdentityError(UserError):
    """The identity file cannot be used; the message says why and what to do."""


class Identity:
    """A private key and the peer id that follows from it."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key = key
        self.path = path
        """File of the key; None for an ephemeral identity."""
        self.peer_id: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity stored at ``path``; create and store a new one if there is none.

        Raises:
            IdentityError: the file is not a libp2p Ed25519 key or not readable, or the folder is not writable.
        """
        found = cls.load(path)
        if found is not None:
            return found
        try:
            _create(path, Ed25519PrivateKey.generate())
            return cls(_parse(read_regular(path), path), path)
        except OSError as error:
            raise IdentityError(f"the identity file {path} cannot be created: {error.strerror}; {ANOTHER}") from error

    @classmethod
    def load(cls, path: Path) -> Identity | None:
        """Return the identity stored at ``path``; None if there is none.

        Raises:
            IdentityError: the file is not a libp2p Ed25519 key, or not readable.
        """
        try:
            return cls(_parse(read_regular(path), path), path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IdentityError(f"the identity file {path} cannot be read: {error.strerror}; {ANOTHER}") from error

    @classmethod
    def ephemeral(cls) -> Identity:
        """Return a new identity that is not stored."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_secret(cls, context: bytes, secret: bytes) -> Identity:
        """Derive an identity from ``secret``, at least 16 unpredictable bytes. Equal secrets give equal identities."""
        return cls(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(context + b"\x00" + secret).digest()))

    def sign(self, data: bytes) -> bytes:
        """Return the Ed25519 signature of ``data``, 64 bytes."""
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        """Return the 68 bytes of libp2p's private-key file. They are secret."""
        return FILE_PREFIX + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the identity (file ``<path>.lock``) against other processes. An ephemeral one needs no lock.

        Raises:
            IdentityError: another process uses the identity, or the lock file cannot be written.
        """
        if self.path is None:
            yield
            return
        file = self.path.with_name(self.path.name + ".lock")
        try:
            descriptor = lock(file)
        except LockedError as error:
            raise IdentityError(
                f"the identity {self.path} is in use by another peer on this machine (process {error}); "
                "stop it, or give this peer a state folder of its own (--state)"
            ) from error
        except OSError as error:
            raise IdentityError(f"the lock file {file} cannot be opened: {error.strerror}") from error
        try:
            yield
        finally:
            os.close(descriptor)


@lru_cache(maxsize=4096)
def public_key_of(peer: PeerId) -> Ed25519PublicKey:
    """Return the public key in ``peer``.

    Raises:
        ValueError: ``peer`` is not the id of an Ed25519 key.
    """
    return Ed25519PublicKey.from_public_bytes(key_of(peer))


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` is ``peer``'s over ``data``; False for a malformed id or signature."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        public_key_of(peer).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _parse(data: bytes, path: Path) -> Ed25519PrivateKey:
    if data.startswith(RSA_PREFIX) and len(data) > FILE_BYTES:
        raise IdentityError(
            f"the identity file {path} holds an RSA key (hivemind's own format); p2pdiloco needs Ed25519. "
            "Choose another path, and a new identity will be created there"
        )
    if len(data) != FILE_BYTES or not data.startswith(FILE_PREFIX):
        raise IdentityError(
            f"the identity file {path} is not a libp2p Ed25519 private key ({len(data)} bytes, expected {FILE_BYTES}); "
            "restore it from a backup, or move it away to get a new identity"
        )
    private, public = data[len(FILE_PREFIX) : -KEY_BYTES], data[-KEY_BYTES:]
    key = Ed25519PrivateKey.from_private_bytes(private)
    if key.public_key().public_bytes_raw() != public:
        raise IdentityError(f"the identity file {path} is damaged: its public key does not belong to its private key")
    return key


def _create(path: Path, key: Ed25519PrivateKey) -> None:
    """Store a new key. Link instead of rename: if two processes start at once, both read the winner's file."""
    make_parent(path)
    temporary = write_temporary(path, (Identity(key).to_file_bytes(),))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    sync_folder(path.parent)
