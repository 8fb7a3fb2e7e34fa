"""Invites as text: what fits, what comes back, and that a typo is told as one."""

from __future__ import annotations

import contextlib
import random

import base58
import msgspec
import pytest

from p2pdiloco.access.certificates import NEVER, NO_CAP, Kind, Role, hint_of
from p2pdiloco.access.invite_code import (
    PREFIX,
    TEXT_LIMIT,
    Invite,
    InviteError,
    clean_invite,
    decode_invite,
    encode_invite,
    is_invite,
)
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.peer_ids import key_of

FOUNDER, NODE, PEER = (Identity.ephemeral().peer_id for _ in range(3))
ADDRESSES = ("/ip4/203.0.113.5/tcp/31337", "/ip4/192.168.100.200/tcp/65535", "/ip4/10.0.0.1/tcp/1")

IP6 = "/ip6/2001:db8:1:2:3:4:5:6/tcp/4100"


def invite(peer: PeerId | None = None, addresses: tuple[str, ...] = ADDRESSES, others: tuple[str, ...] = ()) -> Invite:
    return Invite(
        run=RunId("0123456789abcdef" * 2 + "01234567"),
        secret=bytes(range(200, 216)) if peer is None else b"",
        peer=peer,
        role=Role.LEARNER,
        cap=NO_CAP,
        not_after=NEVER,
        uses=1 if peer else 256,
        hint=hint_of(FOUNDER),
        signature=b"\xff" * 64,
        directory=NODE,
        addresses=addresses,
        others=others,
    )


@pytest.mark.parametrize(
    "one",
    [
        invite(),
        invite(addresses=("/ip6/2001:db8:1:2:3:4:5:6/tcp/4100",)),
        invite(addresses=("/dns/swarm.example.org/tcp/4100",)),
        invite(addresses=("/dns4/a-b.c/tcp/4100", "/ip4/1.2.3.4/tcp/5")),
        invite(PEER, ADDRESSES[:1]),
        invite(others=(f"{ADDRESSES[1]}/p2p/{PEER}", f"{IP6}/p2p/{PEER}", f"{ADDRESSES[0]}/p2p/{FOUNDER}")),
    ],
)
def test_an_invite_of_at_most_400_characters_comes_back(one: Invite) -> None:
    text = encode_invite(one)
    assert len(text) <= TEXT_LIMIT
    assert text.isalnum()
    assert is_invite(text)
    assert decode_invite(text) == one
    assert decode_invite(f"  {text[:100]}\n   {text[100:]} \n") == one, "as a terminal has wrapped it"
    assert one.kind is (Kind.INVITE if one.peer is None else Kind.PEER)


@pytest.mark.parametrize(
    "other", ["; touch x", "junk", "$(touch x)", "\0", "\x1b[2J", "\u202e", "1", encode_invite(invite()), "x" * 10**6]
)
def test_what_stands_beside_an_invite_is_an_error_however_far_away(other: str) -> None:
    text = encode_invite(invite())
    for space in ("", " ", "\n", "\r\n", " " * 500, "\u2028", "\t" * 10_000):
        for bad in (text + space + other, other + space + text, text[:50] + space + other + text[50:]):
            with pytest.raises(InviteError, match="copy"):
                decode_invite(bad)
        assert clean_invite(space + text[:50] + space + text[50:] + space) == text


def test_a_runs_name_is_no_invite() -> None:
    assert not is_invite("p2pdiloco")
    assert not is_invite("p2pdiloco-" + "x" * 54)
    assert is_invite(encode_invite(invite())[:100]), "it is told that a piece is missing"


def test_the_first_addresses_are_kept_if_not_all_fit() -> None:
    many = tuple(f"/ip4/10.0.0.{n}/tcp/{4000 + n}" for n in range(20))
    kept = decode_invite(encode_invite(invite(addresses=many))).addresses
    assert kept == many[: len(kept)]
    assert len(kept) == 19
    others = tuple(f"{ADDRESSES[0]}/p2p/{Identity.ephemeral().peer_id}" for _ in range(9))
    assert decode_invite(encode_invite(invite(others=others))).others == others[:2]
    with pytest.raises(ValueError, match="has room"):
        encode_invite(invite(addresses=("/dns/" + "a" * 200 + "/tcp/1",)))


def test_the_directorys_addresses_bear_its_id() -> None:
    assert invite().initial_peers()[0] == f"{ADDRESSES[0]}/p2p/{NODE}"


def test_a_node_without_an_address_and_one_that_is_there_twice_are_refused() -> None:
    good = base58.b58decode(encode_invite(invite())[len(PREFIX) :])[:-4]
    for node, address in ((PEER, b""), (NODE, bytes([4, 1, 2, 3, 4, 0, 5]))):
        with pytest.raises(InviteError, match="a node has no address"):
            decode_invite(sealed(good + bytes([1]) + key_of(node) + address))


def test_every_typo_is_told_as_one() -> None:
    rng, text = random.Random(5), encode_invite(invite())
    letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    for at in range(len(PREFIX), len(text)):
        other = rng.choice([letter for letter in letters if letter != text[at]])
        for bad in (text[:at] + other + text[at + 1 :], text[:at] + text[at + 1 :], text[:at]):
            with pytest.raises(InviteError, match=r"typo|characters"):
                decode_invite(bad)
        if at + 1 < len(text) and text[at] != text[at + 1]:
            with pytest.raises(InviteError, match="typo"):
                decode_invite(text[:at] + text[at + 1] + text[at] + text[at + 2 :])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "begins with p2pdiloco"),
        ("hello", "begins with p2pdiloco"),
        (PREFIX, "typo"),
        (PREFIX + "0OIl", "character that invites never have"),
        (PREFIX + "z" * 400, "at most 400 characters"),
        (PREFIX + "é", "character that invites never have"),
    ],
)
def test_what_is_no_invite_is_told(text: str, sentence: str) -> None:
    with pytest.raises(InviteError, match=sentence):
        decode_invite(text)


def sealed(data: bytes) -> str:
    from p2pdiloco.access.invite_code import _checksum

    return PREFIX + base58.b58encode(data + _checksum(data)).decode()


def test_whoever_makes_the_checksum_right_gets_no_further() -> None:
    """Random changes under a right checksum: refused with a sentence, or an invite that is written in one way."""
    rng, good = random.Random(9), base58.b58decode(encode_invite(invite())[len(PREFIX) :])[:-4]
    for _ in range(2000):
        data = bytearray(good)
        match rng.randrange(3):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case _:
                data += rng.randbytes(rng.randrange(1, 12))
        text = sealed(bytes(data))
        with contextlib.suppress(InviteError):
            assert encode_invite(decode_invite(text)) == text


@pytest.mark.parametrize(
    ("peer", "uses"),
    [(None, 0), (None, 257), (PEER, 0), (PEER, 2)],
    ids=["none", "too many", "named, none", "named, two"],
)
def test_an_invite_admits_1_to_256_peers_and_a_named_one_1(peer: PeerId | None, uses: int) -> None:
    bad = encode_invite(msgspec.structs.replace(invite(peer, ADDRESSES[:1]), uses=uses))
    with pytest.raises(InviteError, match=f"has {uses} uses"):
        decode_invite(bad)


def test_an_address_has_one_form() -> None:
    for address in ("/ip4/1.2.3.4/udp/5", "/dns/a b/tcp/5", "/ip4/1.2.3/tcp/5", "/dns//tcp/5"):
        with pytest.raises(ValueError):
            encode_invite(msgspec.structs.replace(invite(), addresses=(address,)))
