"""Directory records: only the publisher can make one, for one place and one time."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.access import certificates
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.wire import directory_records
from p2pdiloco.wire.directory_records import Envelope, peers_topic, seal, subkey_of, unseal

ANN = Identity.ephemeral()


def envelope(peer: PeerId = ANN.peer_id, body: bytes = b"hello") -> Envelope:
    return Envelope(topic=peers_topic(RunId("run")), name="", peer=peer, expires_s=2e9, addresses=(), body=body)


def test_a_sealed_envelope_comes_back() -> None:
    assert unseal(seal(envelope(), ANN.sign), verify) == envelope()
    assert subkey_of(envelope()) == f"/{ANN.peer_id}"


def test_nobody_else_can_make_or_change_it() -> None:
    assert unseal(seal(envelope(), Identity.ephemeral().sign), verify) is None
    value = seal(envelope(), ANN.sign)
    for position in range(0, len(value), 7):
        changed = bytearray(value)
        changed[position] ^= 1
        assert unseal(bytes(changed), verify) is None


@pytest.mark.parametrize("bad", [b"", b"x" * 64, b"x" * 65, b"\xc1" * 200, b"x" * 20000, bytes(64) + b"\x80"])
def test_garbage_is_nothing(bad: bytes) -> None:
    assert unseal(bad, verify) is None


def test_a_peer_cannot_publish_without_bounds() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        seal(envelope(body=bytes(20000)), ANN.sign)
    data = msgspec.msgpack.encode(envelope(body=bytes(13000)))
    assert unseal(ANN.sign(b"p2pdiloco record 1\x00" + data) + data, verify) is None


def test_a_record_that_is_nested_too_deep_is_malformed() -> None:
    assert unseal(bytes(64) + b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0", verify) is None


def test_the_topic_does_not_tell_the_run() -> None:
    run = RunId("ab" * 20)
    assert run not in peers_topic(run)
    assert peers_topic(run) != peers_topic(RunId("cd" * 20))
    assert len(peers_topic(run)) == len(peers_topic(RunId("cd" * 20))) < 128


def test_a_record_has_room_for_any_chain_of_certificates() -> None:
    assert directory_records.CHAIN_LIMIT == certificates.CHAIN_LIMIT
