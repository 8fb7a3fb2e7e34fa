"""Which addresses of a record are dialled, and that all ways are tried at once, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.net.abuse_limits import VAIN_BURST
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.connect import ADDRESSES, ConnectFallback, dialable
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, PeerRefused, Transport
from p2pdiloco.wire.directory_records import PeerRecord
from tests.peer_sim.loop import VirtualLoop

BOB = Identity.ephemeral().peer_id
HOME, WORLD, SIX, LOOP = (
    "/ip4/192.168.1.2/tcp/1",
    "/ip4/1.1.1.1/tcp/1",
    "/ip6/2606:4700::1/tcp/1",
    "/ip4/127.0.0.1/tcp/1",
)


@pytest.mark.parametrize(
    ("record", "seen", "dialled"),
    [
        (
            PeerRecord((HOME, LOOP), seen=("9.9.9.9",)),
            {"8.8.8.8"},
            [LOOP],
        ),  # another home: only its own loopback is left
        (PeerRecord((HOME, LOOP), seen=("9.9.9.9",)), {"9.9.9.9"}, [HOME]),  # behind the same router
        (PeerRecord((HOME, LOOP), seen=("192.168.1.2",)), {"192.168.7.7"}, [HOME]),  # seen as that: a routed network
        (PeerRecord((HOME, LOOP)), {"8.8.8.8"}, [HOME]),  # nobody has told it yet
        (PeerRecord((HOME, LOOP), seen=("9.9.9.9",)), set(), [HOME]),  # nobody has told us yet
        (PeerRecord((LOOP,)), set(), [LOOP]),
        (PeerRecord((LOOP, WORLD, SIX, HOME), seen=("9.9.9.9",)), {"9.9.9.9"}, [HOME, SIX, WORLD]),
        (PeerRecord(("/ip4/169.254.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1", "nonsense", "/ip4/224.0.0.1/tcp/1")), set(), []),
    ],
)
def test_a_private_address_is_dialled_by_who_may_share_its_network_and_loopback_last(
    record: PeerRecord, seen: set[str], dialled: list[str]
) -> None:
    assert dialable(record, frozenset(seen)) == dialled


def test_of_many_addresses_few_are_dialled() -> None:
    record = PeerRecord(tuple(f"/ip4/1.1.1.{number}/tcp/1" for number in range(16)))
    assert len(dialable(record, frozenset())) == ADDRESSES


class Ways:
    """A transport and a rendezvous: what becomes of each dial, after how long."""

    def __init__(self, ends: dict[str, tuple[float, Exception | None]]) -> None:
        self.ends = ends
        self.tried: dict[str, float] = {}
        self.left: list[str] = []
        self.attended: list[str] = []
        self.observed_hosts = ()

    async def dial(self, address: str, timeout_s: float) -> PeerId:
        return await self._try(address.partition("/p2p/")[0])

    def peers(self) -> list[PeerId]:
        return []

    async def connect(self, peer: PeerId, points: Sequence[str], *, may_relay: bool) -> PeerId:
        return await self._try("meeting")

    async def _try(self, name: str) -> PeerId:
        self.tried[name] = asyncio.get_running_loop().time()
        after_s, error = self.ends[name]
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.left.append(name)
            raise
        if error is not None:
            raise error
        return BOB


def climbed(ways: Ways, record: PeerRecord) -> float:
    """How long it took."""
    ladder = ConnectFallback(cast(Transport, ways), Dialler(), cast(RendezvousClient, ways))
    loop = VirtualLoop()
    try:
        assert loop.run_until_complete(ladder.connect(BOB, record)) == BOB
        return loop.time()
    finally:
        loop.close()


def test_addresses_that_say_nothing_do_not_hold_up_the_others() -> None:
    ways = Ways({HOME: (8.0, DialError("nothing")), WORLD: (0.05, None), "meeting": (0.1, None)})
    assert climbed(ways, PeerRecord((HOME, WORLD), points=("/ip4/2.2.2.2/tcp/1/p2p/hub",))) < 0.5
    assert ways.left == [HOME]
    assert "meeting" not in ways.tried


def test_where_no_address_answers_a_meeting_begins_soon_and_where_there_is_none_at_once() -> None:
    ways = Ways({WORLD: (8.0, DialError("nothing")), "meeting": (0.1, None)})
    assert climbed(ways, PeerRecord((WORLD,), points=("p",))) < 1.0
    ways = Ways({HOME: (8.0, DialError("nothing")), "meeting": (0.1, None)})
    assert climbed(ways, PeerRecord((HOME,), points=("p",))) < 0.5, "a private address answers soon or never"
    ways = Ways({"meeting": (0.1, None)})
    assert climbed(ways, PeerRecord((), points=("p",))) < 0.2


def test_whose_meeting_points_are_not_known_is_asked_for_where_we_attend() -> None:
    """Two that come at once read records of each other that were written before anything was attended."""
    ways = Ways({HOME: (8.0, DialError("nothing")), "meeting": (0.1, None)})
    ways.attended = ["hub"]
    assert climbed(ways, PeerRecord((HOME,))) < 3.0
    assert 1.0 < climbed(ways, PeerRecord(())) < 3.0, "whoever can be dialled is, by the other"


def test_who_can_be_dialled_slowly_is_not_met_instead() -> None:
    ways = Ways({WORLD: (1.5, None), "meeting": (0.1, None)})
    ways.attended = ["hub"]
    climbed(ways, PeerRecord((WORLD,)))
    assert set(ways.tried) == {WORLD}


def test_all_reasons_are_told_newest_first() -> None:
    ways = Ways(
        {HOME: (0.1, DialError("first")), WORLD: (0.5, DialError("second")), "meeting": (0.1, DialError("third"))}
    )
    with pytest.raises(DialError, match="third; second; first"):
        climbed(ways, PeerRecord((HOME, WORLD), points=("p",)))


def test_a_no_ends_it() -> None:
    ways = Ways({WORLD: (0.1, PeerRefused("a private run")), "meeting": (9.0, None)})
    with pytest.raises(PeerRefused, match="private"):
        climbed(ways, PeerRecord((WORLD,), points=("p",)))


def test_who_publishes_nothing_that_is_of_use_is_not_dialled_in_vain() -> None:
    with pytest.raises(DialError, match="publishes no address"):
        climbed(Ways({}), PeerRecord(()))
    with pytest.raises(DialError, match="another network"):
        climbed(Ways({}), PeerRecord(("/ip4/169.254.0.1/tcp/1",)))


class Victim:
    """A machine that is dialled, and knows nothing of it: what is dialled comes to nothing after a while."""

    def __init__(self) -> None:
        self.dials = 0
        self.attended: list[str] = []
        self.observed_hosts = ()

    async def dial(self, address: str, timeout_s: float) -> PeerId:
        self.dials += 1
        await asyncio.sleep(0.5)
        raise DialError("refused")

    def peers(self) -> list[PeerId]:
        return []


def test_two_hundred_forged_records_have_a_machine_dialled_few_times() -> None:
    victim, loop = Victim(), VirtualLoop()
    ladder = ConnectFallback(cast(Transport, victim), Dialler(), cast(RendezvousClient, victim))

    async def climb(number: int) -> None:
        ports = range(number * 16 + 1, number * 16 + 17)
        record = PeerRecord(tuple(f"/ip4/1.1.1.1/tcp/{port}" for port in ports))
        for _ in range(4):
            with pytest.raises(DialError):
                await ladder.connect(Identity.ephemeral().peer_id, record)

    async def all_climb() -> None:
        await asyncio.gather(*(climb(number) for number in range(200)))

    try:
        loop.run_until_complete(all_climb())
        assert loop.time() < 60.0
        assert VAIN_BURST <= victim.dials <= 32
    finally:
        loop.close()


class Numbers:
    """A transport that notes whom it is to dial, none of whom is there."""

    def __init__(self) -> None:
        self.dialled: list[str] = []

    async def dial(self, address: str, timeout_s: float = 10.0) -> PeerId:
        self.dialled.append(address)
        raise DialError("refused")

    def peers(self) -> list[PeerId]:
        return []


def test_however_many_names_a_machine_has_it_is_one() -> None:
    numbers, dialler = Numbers(), Dialler()
    names = ["localhost", "Localhost", "LOCALHOST", "127.1", "127.0.1", "127.0.0.1", "0x7f000001", "2130706433"]

    async def work() -> None:
        for port in range(1, 65):
            for name in names:
                with pytest.raises(DialError):
                    await dialler.dial(cast(Transport, numbers), f"/dns4/{name}/tcp/{port}/p2p/{BOB}", 5.0)

    asyncio.run(work())
    assert VAIN_BURST <= len(numbers.dialled) <= 32
    assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in numbers.dialled), "not the name: it may change"
