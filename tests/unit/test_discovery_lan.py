"""What a peer announces on its local network: its own run recognizes it, strangers learn nothing and forge nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from p2pdiloco.discovery import lan
from p2pdiloco.discovery.lan import SALT_BYTES, Announcement, LanDiscovery, announcement, multicast_hosts, recognize
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.peer_ids import key_of

RUN, OTHER = RunId("a" * 40), RunId("b" * 40)
ANN, ME = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
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


class Network:
    """Stands for the library and the network: what is announced, and who answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Announcement] = {}
        self.silent: dict[str, asyncio.Event] = {}
        """Questions that nobody has answered yet, by name."""
        self.asked: list[str] = []
        self.announced: list[Any] = []
        self.is_announced = asyncio.Event()
        self.refusals = 0
        """Announcements that fail before one is made."""
        self.is_closed = False
        network = self

        class ServiceInfo(SimpleNamespace):
            def __init__(self, service: str, name: str, **said: Any) -> None:
                super().__init__(service=service, name=name, **said)

            async def async_request(self, zeroconf: Any, timeout_ms: float) -> bool:
                name = self.name.removesuffix(f".{lan.SERVICE}")
                network.asked.append(name)
                if name in network.silent:
                    await network.silent[name].wait()
                    return False
                told = network.answers[name]
                self.properties, self.port = {b"k": told.key, b"t": told.tag}, told.port
                self.parsed_addresses = lambda: [*told.hosts, "fe80::1"]
                return True

        class Zeroconf:
            def __init__(self, interfaces: list[str]) -> None:
                self.zeroconf = self

            async def async_register_service(self, info: Any) -> Any:
                if network.refusals:
                    network.refusals -= 1
                    raise OSError("no multicast here")
                network.announced.append(info)
                network.is_announced.set()
                return asyncio.sleep(0)

            async def async_close(self) -> None:
                network.is_closed = True

        class Browser:
            def __init__(self, zeroconf: Any, service: str, handlers: list[Any]) -> None:
                network.changed = handlers[0]

            async def async_cancel(self) -> None:
                pass

        library = SimpleNamespace(
            AsyncZeroconf=Zeroconf, AsyncServiceInfo=ServiceInfo, AsyncServiceBrowser=Browser, Error=RuntimeError
        )
        monkeypatch.setitem(sys.modules, "zeroconf", library)
        monkeypatch.setitem(sys.modules, "zeroconf.asyncio", library)
        monkeypatch.setattr(lan, "multicast_hosts", lambda: ["192.0.2.1"])
        self.changed: Any = None

    async def tell(self, told: Announcement, state: str = "Added") -> None:
        """Somebody announces this; what comes of it happens."""
        self.answers[told.name] = told
        self.changed(self, lan.SERVICE, f"{told.name}.{lan.SERVICE}", SimpleNamespace(name=state))
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def discover(network: Network, story: Callable[[LanDiscovery, list[tuple[PeerId, list[str]]]], Any]) -> None:
    async def act() -> None:
        heard: list[tuple[PeerId, list[str]]] = []
        discovery = LanDiscovery(
            RUN, ME, lambda: ["/ip4/192.0.2.1/tcp/4001"], lambda peer, where: heard.append((peer, where))
        )
        task = asyncio.create_task(discovery.keep())
        await network.is_announced.wait()
        await settle()
        await story(discovery, heard)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not discovery.is_on
        assert network.is_closed

    asyncio.run(act())


def told_by(number: int, peer: PeerId = ANN, port: int = 4242, run: RunId = RUN) -> Announcement:
    return announcement(run, peer, port, ["192.0.2.7"], number.to_bytes(SALT_BYTES, "big"))


def test_who_announces_itself_is_reported_once_and_again_when_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)

    async def story(discovery: LanDiscovery, heard: list[tuple[PeerId, list[str]]]) -> None:
        mine = network.announced[0]
        assert discovery.is_on
        assert (mine.port, mine.parsed_addresses) == (4001, ["192.0.2.1"])
        for told in (told_by(1), told_by(2), told_by(3, ME), told_by(4, run=OTHER)):
            await network.tell(told)
        await network.tell(told_by(5, port=9), "Removed")
        assert heard == [(ANN, ["/ip4/192.0.2.7/tcp/4242"])]
        await network.tell(told_by(6, port=4243))
        assert heard[1:] == [(ANN, ["/ip4/192.0.2.7/tcp/4243"])]

    discover(network, story)


def test_questions_that_nobody_answers_report_nobody_and_give_their_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)

    async def story(discovery: LanDiscovery, heard: list[tuple[PeerId, list[str]]]) -> None:
        for first in (0, lan.ASKING_MOST):
            for number in range(first, first + lan.ASKING_MOST):
                network.silent[told_by(number).name] = asyncio.Event()
                await network.tell(told_by(number))
            await network.tell(told_by(100))
            assert len(network.asked) == first + lan.ASKING_MOST, "no more at a time"
            for event in network.silent.values():
                event.set()
            await settle()
        assert heard == []
        await network.tell(told_by(101))
        assert heard == [(ANN, ["/ip4/192.0.2.7/tcp/4242"])]

    discover(network, story)


def test_the_first_that_are_found_are_reported_and_a_crowd_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)
    peers = [Identity.ephemeral().peer_id for _ in range(lan.FOUND_MOST + 3)]

    async def story(discovery: LanDiscovery, heard: list[tuple[PeerId, list[str]]]) -> None:
        for number, peer in enumerate(peers):
            await network.tell(told_by(number, peer))
        assert [peer for peer, _ in heard] == peers[: lan.FOUND_MOST]
        await network.tell(told_by(500, peers[0], port=4243))
        assert heard[-1] == (peers[0], ["/ip4/192.0.2.7/tcp/4243"]), "who is known may move"

    discover(network, story)


def test_a_network_without_multicast_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)
    network.refusals = 2
    monkeypatch.setattr(lan, "LOOK_S", 0.001)

    async def story(discovery: LanDiscovery, heard: list[tuple[PeerId, list[str]]]) -> None:
        assert discovery.is_on
        await network.tell(told_by(1))
        assert len(heard) == 1

    discover(network, story)
