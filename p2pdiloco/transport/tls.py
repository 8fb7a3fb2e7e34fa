"""TLS 1.3 for privacy and integrity. The handshake above it (net/handshake.py) proves identities.

Rules of this file:
1. Each process has a fresh self-signed certificate, which is not verified. Instead, both ends sign its fingerprint with
   their identities, which binds the identities to this channel. So there is no authority and no renewal.
2. TLS 1.3 only; no session tickets.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class TlsContexts:
    """TLS contexts of a process, and the fingerprint of its certificate (SHA-256 of the DER)."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _self_signed(key)
        self.fingerprint: bytes = fingerprint_of(certificate.public_bytes(serialization.Encoding.DER))
        self.server: ssl.SSLContext = _server_context(key, certificate)
        self.client: ssl.SSLContext = _client_context()


def fingerprint_of(certificate_der: bytes) -> bytes:
    """Return the SHA-256 of a certificate."""
    return hashlib.sha256(certificate_der).digest()


def remote_fingerprint(channel: ssl.SSLObject) -> bytes:
    """Return the fingerprint of the certificate that the listener showed; for the dialler's side.

    Raises:
        ssl.SSLError: the listener showed no certificate.
    """
    certificate = channel.getpeercert(binary_form=True)
    if certificate is None:
        raise ssl.SSLError("the other side showed no certificate")
    return fingerprint_of(certificate)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p2pdiloco")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )


def _server_context(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    # Python reads certificates from files only, so write one with mode 0600 that lives for this call.
    descriptor, name = tempfile.mkstemp(prefix="p2pdiloco-tls-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
            file.write(certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(name)
    finally:
        Path(name).unlink()
    return context


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
