"""What is asked of a router, and what it may answer, byte by byte as RFC 6886 and RFC 6887 have it."""

from __future__ import annotations

import pytest

from p2pdiloco.nat import port_mapping_codec
from p2pdiloco.nat.port_mapping_codec import Denied, Granted

NONCE = bytes(range(12))


def pcp_answer(question: bytes, *, result: int = 0, port: int = 4242, host: bytes = bytes((203, 0, 113, 7))) -> bytes:
    head = bytes((2, 0x81, 0, result)) + (600).to_bytes(4, "big") + bytes(16)
    body = question[24:42] + port.to_bytes(2, "big") + bytes(10) + b"\xff\xff" + host
    return head + body


def test_nat_pmp_as_its_rfc_draws_it() -> None:
    assert port_mapping_codec.encode_address_request() == bytes.fromhex("0000")
    assert port_mapping_codec.encode_nat_pmp_request(0x1234, 0x5678, 7200) == bytes.fromhex(
        "00020000 12345678 00001c20"
    )
    assert port_mapping_codec.decode_address(bytes.fromhex("00800000 00000001 cb007107")) == "203.0.113.7"
    answer = bytes.fromhex("00820000 00000001 12345678 00000e10")
    assert port_mapping_codec.decode_nat_pmp(answer, 0x1234) == Granted("", 0x5678, 3600)
    assert port_mapping_codec.decode_nat_pmp(bytes.fromhex("00820002 00000001 12340000 00000000"), 0x1234) == Denied(
        "is configured to map no ports"
    )


def test_pcp_as_its_rfc_draws_it() -> None:
    question = port_mapping_codec.encode_pcp_request("192.168.1.2", 7000, 4242, 1200, NONCE)
    assert question[:8] == bytes.fromhex("02010000 000004b0")
    assert question[8:24] == bytes.fromhex("00000000 00000000 0000ffff c0a80102")
    assert question[24:] == NONCE + bytes.fromhex("06000000 1b581092") + bytes(10) + b"\xff\xff" + bytes(4)
    assert len(question) == 60
    assert port_mapping_codec.decode_pcp(pcp_answer(question), 7000, NONCE) == Granted("203.0.113.7", 4242, 600)
    assert port_mapping_codec.decode_pcp(pcp_answer(question, result=8), 7000, NONCE) == Denied("has no port left")


def test_a_router_of_nat_pmp_alone_is_known_by_its_answer_to_pcp() -> None:
    told = port_mapping_codec.decode_pcp(bytes.fromhex("00810001 00000001"), 7000, NONCE)
    assert told == Denied("supports only NAT-PMP")


@pytest.mark.parametrize("spoilt", ["nonce", "port", "protocol", "short", "question"])
def test_an_answer_to_somebody_else_is_none(spoilt: str) -> None:
    question = port_mapping_codec.encode_pcp_request("192.168.1.2", 7000, 4242, 1200, NONCE)
    data = bytearray(pcp_answer(question))
    at = {"nonce": 24, "protocol": 36, "port": 41}.get(spoilt)
    if at is not None:
        data[at] ^= 1
    elif spoilt == "short":
        del data[-1]
    else:
        data[1] = 1
    with pytest.raises(ValueError):
        port_mapping_codec.decode_pcp(bytes(data), 7000, NONCE)
    with pytest.raises(ValueError):
        port_mapping_codec.decode_nat_pmp(bytes.fromhex("00820000 00000001 12345678 00000e10"), 0x1235)
