"""What a peer announces on its local network: its own run recognizes it, strangers learn nothing and forge nothing."""

from __future__ import annotations

import psutil
import pytest

from p2pdiloco.discovery.lan import SALT_BYTES, announcement, multicast_hosts, recognize
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.peer_ids import key_of

RUN, OTHER = RunId("a" * 40), RunId("b" * 40)
ANN = Identity.ephemeral().peer_id
SALT = bytes(range(SALT_BYTES))
TOLD = announcement(RUN, ANN, 4242, ["192.0.2.7", "10.0.0.3"], SALT)


def test_a_peer_of_the_run_recognizes_it() -> None:
    assert recognize(RUN, TOLD) == (ANN, ["/ip4/192.0.2.7/tcp/4242", "/ip4/10.0.0.3/tcp/4242"])
    assert recognize(RUN, TOLD._replace(hosts=TOLD.hosts[::-1])) is not None, "mDNS keeps no order"


def test_a_stranger_learns_neither_run_nor_peer() -> None:
    assert recognize(OTHER, TOLD) is None
    told = b"".join((TOLD.name.encode(), TOLD.key, TOLD.tag))
    assert key_of(ANN) not in told
    assert RUN.encode() not in told
    again = announcement(RUN, ANN, 4242, TOLD.hosts, bytes(SALT_BYTES))
    assert {again.name, again.key, again.tag}.isdisjoint({TOLD.name, TOLD.key, TOLD.tag}), "nor that it is the same"


@pytest.mark.parametrize(
    "change",
    [
        {"port": 4243},
        {"hosts": ("192.0.2.7", "10.0.0.4")},
        {"hosts": ("192.0.2.7",)},
        {"hosts": ("not an address",)},
        {"key": bytes(32)},
        {"key": b""},
        {"tag": bytes(16)},
        {"tag": b""},
        {"name": "00" * SALT_BYTES},
        {"name": "no salt"},
        {"port": 1 << 20},
        {"port": -1},
    ],
)
def test_what_was_altered_is_not_recognized(change: dict[str, object]) -> None:
    assert recognize(RUN, TOLD._replace(**change)) is None  # type: ignore[arg-type]


def test_loopback_is_no_network() -> None:
    loopback = {one.address for one in psutil.net_if_addrs().get("lo", ())}
    assert loopback.isdisjoint(multicast_hosts())
