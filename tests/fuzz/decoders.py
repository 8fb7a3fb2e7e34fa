"""Everything that reads bytes of others: how it is called, and what it is fed to begin with.

Whoever adds a decoder adds a line to ``DECODERS``; ``test_fuzz.py`` looks for those that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from p2pdiloco.access import certificates, invite_code, membership_log
from p2pdiloco.access.certificates import NEVER, NO_CAP, Certificate, Chain, Grant, Kind, certify, hint_of
from p2pdiloco.access.members import Members
from p2pdiloco.codec import compression
from p2pdiloco.nat import messages, port_mapping_codec
from p2pdiloco.nat.introducer import Introducer
from p2pdiloco.net import frames
from p2pdiloco.net.authorization import OpenAuthorizer
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.net.handshake import Dialled, Handshake, HandshakeFactory, Hello, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.protocol.messages import Message
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.wire import control_messages, directory_records
from p2pdiloco.wire.directory_records import PeerRecord, RunRecord
from tests.fuzz.wellformed import encoded

FOUNDER, MEMBER, INVITE = (Identity.from_secret(b"fuzz", bytes([number]) * 16) for number in range(3))
RUN = RunId("ab" * 20)
MOST_BYTES = 1 << 16
"""Of what is unpacked."""


class Decoder(NamedTuple):
    """``read`` may raise ValueError, and nothing else."""

    read: Callable[[bytes], object]
    sample: Callable[[Random], bytes]


def _certificate(signer: Identity, subject: Identity, kind: Kind, role: certificates.Role) -> Certificate:
    bare = Certificate(kind=kind, role=role, subject=subject.peer_id, uses=3 if kind is Kind.INVITE else 1)
    return certify(RUN, signer.peer_id, bare, signer.sign)


def _chain() -> bytes:
    invite = _certificate(FOUNDER, INVITE, Kind.INVITE, certificates.Role.LEARNER)
    peer = _certificate(INVITE, MEMBER, Kind.PEER, certificates.Role.LEARNER)
    return Chain(hint_of(FOUNDER.peer_id), (invite, peer)).encode()


CHAIN = _chain()
BAN = membership_log.ban(RUN, MEMBER.peer_id, Grant(subject=FOUNDER.peer_id), FOUNDER.sign)
CLOSING = membership_log.closing(RUN, INVITE.peer_id, [MEMBER.peer_id], Grant(subject=FOUNDER.peer_id), FOUNDER.sign)
INTRODUCTION = membership_log.INTRODUCTION + CHAIN


def _invite(rng: Random) -> bytes:
    invite = invite_code.Invite(
        run=RUN,
        secret=rng.randbytes(16),
        role=certificates.Role.LEARNER,
        cap=NO_CAP,
        not_after=NEVER,
        uses=rng.randint(1, 256),
        hint=bytes(4),
        signature=bytes(64),
        directory=FOUNDER.peer_id,
        addresses=("/ip4/10.0.0.1/tcp/4100", "/dns/example.org/tcp/1"),
    )
    return invite_code.encode_invite(invite).encode()


def _record(rng: Random) -> bytes:
    envelope = directory_records.Envelope(
        topic="t",
        name="",
        peer=FOUNDER.peer_id,
        expires_s=2e9,
        addresses=("/ip4/10.0.0.1/tcp/1",),
        body=rng.randbytes(9),
    )
    return directory_records.seal(envelope, FOUNDER.sign)


def _handshake_factory() -> HandshakeFactory:
    return HandshakeFactory(
        peer=FOUNDER.peer_id,
        run=RUN,
        version=1,
        life=bytes(16),
        sign=FOUNDER.sign,
        verify=verify,
        nonce=lambda: os.urandom(32),
        authorizer=OpenAuthorizer(),
    )


def _hello(rng: Random) -> bytes:
    handshake_factory = _handshake_factory()
    handshake_factory.peer = MEMBER.peer_id
    return (
        handshake_factory.handshake(Role.DIALLER, bytes(32), Dialled()).hello_body
        if rng.random() < 0.5
        else encoded(Hello, rng)
    )


def _greet(data: bytes) -> None:
    half: Handshake = _handshake_factory().handshake(Role.LISTENER, bytes(32), Dialled())
    half.proof_after(data)
    half.finish(data)


def _connection(data: bytes) -> None:
    """An endpoint whose other side says ``data`` instead of greeting."""
    endpoint = Endpoint(_handshake_factory(), TransportLimits(lanes=1))
    connection = endpoint.add_connection(Role.LISTENER, 0.0, host="10.0.0.1")
    endpoint.handle_tls_established(connection, bytes(32), 0.0)
    endpoint.receive_data(connection, data, 0.0)
    for _ in range(4):
        list(endpoint.events(0.0))
        list(endpoint.to_send(0.0))


def _connection_sample(rng: Random) -> bytes:
    kind, body = rng.choice(list(frames.FrameKind)), rng.randbytes(rng.randrange(80))
    said = [frames.encode_frame(frames.FrameKind.HELLO, 0, _hello(rng))]
    said += [frames.HEADER.pack(len(body), kind, rng.randrange(3)), body]
    return b"".join(said)


def _frames(data: bytes) -> None:
    for read in (frames.decode_start, frames.decode_request, frames.decode_credit, frames.decode_goodbye):
        try:
            read(data)
        except ValueError:
            continue
    frames.parse_header(data.ljust(frames.HEADER.size, b"\0"))


def _frames_sample(rng: Random) -> bytes:
    start = frames.Start(frames.Use.MESSAGE, 0, 99, frames.Part(1, 200, 100) if rng.random() < 0.5 else None)
    whole = frames.encode_start(7, start, rng.randbytes(20))
    return rng.choice(
        [whole, whole[frames.HEADER.size :], frames.encode_goodbye(frames.GoodbyeCode.LEAVING, "a reason")]
    )


def _members(data: bytes) -> None:
    known = Members(RUN, FOUNDER.peer_id, "invite", verify)
    for read in (lambda: known.learn(data), lambda: known.admit(MEMBER.peer_id, data, 1.0)):
        try:
            read()
        except ValueError:
            continue
    known.marks()
    known.beyond(data, 100)


def _line(data: bytes) -> None:
    """What a peer and a meeting point read on a line, and what a meeting point does with it."""
    for read in (messages.decode_opening, lambda data: messages.seen_size(data[:2].ljust(2, b"."))):
        try:
            read(data)
        except ValueError:
            continue
    point = Introducer(relays=1)
    tickets = (bytes(16), bytes([1]) * 16)
    point.ask(FOUNDER.peer_id, "10.0.0.1", MEMBER.peer_id, tickets, 0.0)
    for number, ticket in enumerate(tickets):
        point.handle_opened(number, ticket, "10.0.0.1", 1, 1, 0.0)
    point.handle_data(0, data, 0.0)
    list(point.events())
    control_messages.decode_as(data, messages.Seen)


def _router_answers(data: bytes) -> None:
    for read in (port_mapping_codec.decode_address, lambda data: port_mapping_codec.decode_nat_pmp(data, 7)):
        try:
            read(data)
        except ValueError:
            continue
    port_mapping_codec.decode_pcp(data, 7, bytes(12))


def _router_sample(rng: Random) -> bytes:
    pcp = bytearray(port_mapping_codec.encode_pcp_request("192.168.1.2", 7, 8, 1200, bytes(12)))
    pcp[1] |= port_mapping_codec.ANSWER
    pmp = bytes((0, port_mapping_codec.ANSWER | rng.choice((0, 2)), 0, 0))
    return rng.choice([bytes(pcp), pmp + rng.randbytes(rng.choice((8, 12)))])


def _as(kind: Any) -> Decoder:
    return Decoder(lambda data: control_messages.decode_as(data, kind), lambda rng: encoded(kind, rng))


DECODERS: dict[str, Decoder] = {
    "frames": Decoder(_frames, _frames_sample),
    "connection": Decoder(_connection, _connection_sample),
    "greeting": Decoder(_greet, _hello),
    "message": Decoder(control_messages.decode_message, lambda rng: encoded(Message, rng)),
    "request": Decoder(control_messages.decode_request, lambda rng: encoded(control_messages.Request, rng)),
    "attend": _as(messages.Attend),
    "meet": _as(messages.Meet),
    "called": _as(messages.Called),
    "reachable": _as(messages.Reachable),
    "line": Decoder(_line, lambda rng: encoded(messages.Seen, rng)),
    "router": Decoder(_router_answers, _router_sample),
    "attended": _as(messages.Attended),
    "introduced": _as(messages.Introduced),
    "status": _as(control_messages.PeerStatus),
    "state offer": _as(control_messages.StateOffer),
    "run record": _as(RunRecord),
    "peer record": _as(PeerRecord),
    "commit": Decoder(lambda data: control_messages.split_commit(memoryview(data), 40), lambda rng: rng.randbytes(200)),
    "zstd": Decoder(
        lambda data: compression.decompress(data, MOST_BYTES),
        lambda rng: compression.compress(rng.choice([bytes(9999), rng.randbytes(500)])),
    ),
    "payload": Decoder(
        lambda data: list(compression.split(data, 2, MOST_BYTES)),
        lambda rng: compression.join([rng.randbytes(300), bytes(2000)]),
    ),
    "stored payload": Decoder(
        lambda data: compression.unpack(data, 2, MOST_BYTES),
        lambda rng: bytes(compression.store(memoryview(bytearray(12) + rng.randbytes(900)), [300, 600])),
    ),
    "directory's record": Decoder(lambda data: directory_records.unseal(data, verify), _record),
    "manifest": Decoder(lambda data: decode_manifest(data, RunId(digest_of(data))), lambda rng: encoded(Manifest, rng)),
    "chain": Decoder(certificates.decode_chain, lambda rng: CHAIN),
    "statements": Decoder(
        membership_log.split_statements,
        lambda rng: membership_log.join_statements([BAN, CLOSING, INTRODUCTION, rng.randbytes(9)]),
    ),
    "members": Decoder(_members, lambda rng: rng.choice([BAN, CLOSING, INTRODUCTION, CHAIN])),
    "invite": Decoder(lambda data: invite_code.decode_invite(data.decode("latin-1")), _invite),
}
