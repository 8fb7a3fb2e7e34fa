"""The directory over a real DHT: libp2p daemons on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import uvloop
from waiting import until, until_async

from p2pdiloco.discovery import dht, p2pd, sandbox
from p2pdiloco.discovery import directory as module
from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.directory_records import Envelope, peers_topic, seal, subkey_of
from tests.chaos.fault_proxy import Network, slow_down

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LOOPBACK6 = "/ip6/::1/tcp/0"
RUN = RunId("a" * 40)
Main = Coroutine[Any, Any, None]
GONE = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
"""Nobody listens there any more."""


@pytest.fixture(params=["uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Runs a test's coroutine with a deadline and insists that no daemon is left."""

    async def bounded(main: Main) -> None:
        async with asyncio.timeout(120):
            await main

    def runner(main: Main) -> None:
        uvloop.run(bounded(main))
        daemons = [child for child in psutil.Process().children(recursive=True) if "p2pd" in child.name()]
        assert not daemons

    return runner


def member(
    *initial_peers: str,
    identity: Identity | None = None,
    cache: Path | None = None,
    listen: str = LOOPBACK,
    patience_s: float = 0.0,
) -> Directory:
    return Directory(
        identity or Identity.ephemeral(),
        listen=[listen],
        announce=[],
        initial_peers=list(initial_peers),
        cache_path=cache,
        patience_s=patience_s,
    )


def where(directory: Directory) -> str:
    return directory.bootstrap_addresses()[0]


def daemon_of(directory: Directory) -> int:
    pid: int = directory._daemon._p2p._child.pid
    return pid


@pytest.fixture
def tmp_path_of_few_letters() -> Iterator[Path]:
    """A folder of this test alone: those of other tests have names that are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_other_users_cannot_command_the_daemon(
    run: Callable[[Main], None], tmp_path_of_few_letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control sockets lie in a folder of this user alone, which goes with it; so do those of killed peers."""
    base = tmp_path_of_few_letters
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    leftover = base / f"{p2pd.SOCKET_FOLDER}of-a-killed-peer"
    leftover.mkdir()
    os.utime(leftover, (0, 0))

    def folders() -> list[Path]:
        return [path for path in base.glob(f"{p2pd.SOCKET_FOLDER}*") if path != leftover]

    def check() -> None:
        assert len(folders()) == 2
        for folder in folders():
            assert folder.stat().st_mode & 0o777 == 0o700
            assert any(path.is_socket() for path in folder.iterdir())
        assert not leftover.exists()

    async def main() -> None:
        async with member() as boot, member(where(boot)):
            check()
            for folder in folders():
                os.utime(folder, (0, 0))
            async with member(where(boot)):
                assert len(folders()) == 3, "those of running peers stay, however old"

    run(main())
    assert folders() == []


def test_peers_find_each_others_records(run: Callable[[Main], None], tmp_path: Path) -> None:
    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "identity")
        async with member(identity=identity) as boot:
            assert where(boot).endswith(f"/p2p/{identity.peer_id}")
            async with member(where(boot)) as ann, member(where(boot)) as bob:
                await ann.publish_run(RUN, b"the run", 60.0)
                await ann.publish_peer(RUN, b"ann is here", 60.0)
                await bob.publish_peer(RUN, b"bob is here", 60.0)
                expected = {ann.peer_id: b"ann is here", bob.peer_id: b"bob is here"}
                for reader in (boot, ann, bob):
                    assert await reader.runs() == {RUN: b"the run"}
                    assert await reader.peers(RUN) == expected
                assert await boot.peers(RunId("another")) == {}
                await ann.publish_peer(RUN, b"ann has moved", 30.0)
                await bob.withdraw_peer(RUN)
                assert await boot.peers(RUN) == {ann.peer_id: b"ann has moved"}
                await ann.publish_peer(RUN, b"ann's group", 60.0, "3 of 8")
                assert await bob.peers(RUN, "3 of 8") == {ann.peer_id: b"ann's group"}
                assert await bob.peers(RUN, "4 of 8") == {}
                await ann.withdraw_peer(RUN, "3 of 8")
                assert await bob.peers(RUN, "3 of 8") == {}
                assert await bob.peers(RUN) == {ann.peer_id: b"ann has moved"}
                await bob.publish_peer(RUN, b"bob is back", 60.0)
                assert (await boot.peers(RUN))[bob.peer_id] == b"bob is back"
                with pytest.raises(ValueError, match="the limit is"):
                    await ann.publish_peer(RUN, bytes(20_000), 60.0)
                with pytest.raises(ValueError, match="ttl_s"):
                    await ann.publish_peer(RUN, b"", -1.0)

    run(main())


def test_invites_name_an_initial_peer_that_answers_or_ourselves(run: Callable[[Main], None]) -> None:
    """Before, an invite that was made when the bootstrap had long gone named it all the same."""

    async def main() -> None:
        async with member() as bootstrap, member(where(bootstrap)) as ann:
            assert ann.invite_addresses() == (where(bootstrap),)
            assert bootstrap.invite_addresses() == (where(bootstrap),)
            await bootstrap.__aexit__(None, None, None)
            await until(lambda: ann.invite_addresses() == (where(ann),), 30.0)
            async with member(*ann.invite_addresses()) as bob:
                assert bob.invite_addresses() == (where(ann),)

    run(main())


def test_an_invite_outlives_the_bootstrap_that_it_names_first(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with member() as bootstrap, member(where(bootstrap)) as ann:
            places = (*ann.invite_addresses(), *ann.further_invite_addresses())
            assert places == (where(bootstrap), where(ann))
            await bootstrap.__aexit__(None, None, None)
            async with member(*places) as bob:
                await bob.publish_run(RUN, b"the run", 60.0)
                assert await ann.runs() == {RUN: b"the run"}
            ann.stop_serving()
            assert ann.further_invite_addresses() == (), "others cannot reach it"

    run(main())


def test_an_invite_names_the_families_that_its_maker_has_not_typed(run: Callable[[Main], None]) -> None:
    """A bootstrap with IPv4 and IPv6, of which the founder has typed one; who comes may have the other alone."""

    async def main() -> None:
        async with Directory(
            Identity.ephemeral(), listen=[LOOPBACK, LOOPBACK6], announce=[], initial_peers=[]
        ) as bootstrap:
            four, six = sorted(bootstrap.visible_addresses())
            await bootstrap.publish_point(b"here", 60.0)
            async with member(four) as ann:
                assert ann.invite_addresses() == (four,)
                await ann.points()
                assert ann.further_invite_addresses()[0] == six

    run(main())


def test_who_is_late_at_the_start_is_not_taken_for_gone(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five round trips of 260 ms; who refuses is, at once."""

    async def main() -> None:
        meet = Directory._connect
        async with member() as far, member() as near, member() as gone:
            where_gone = where(gone)
            await gone.__aexit__(None, None, None)

            async def slowly(self: Directory, peer: PeerId) -> str | None:
                await asyncio.sleep(1.3 * (peer == far.peer_id))
                return await meet(self, peer)

            monkeypatch.setattr(Directory, "_connect", slowly)
            async with member(where(far), where(near), where_gone) as ann:
                assert ann.invite_addresses() == (where(far), where(near))

    run(main())


def test_a_directory_beyond_a_satellite_is_joined_and_used(run: Callable[[Main], None]) -> None:
    """Each way takes 0.4 s. A ping had 0.7 s, and its node was told to be no node of the directory."""

    async def main() -> None:
        async with member() as far:
            place = addresses.parse(where(far))
            async with Network({"far": place.port}, lambda _: None) as between:
                slow_down(between.between(["far"]), 0.4, None)
                relayed = str(msgspec.structs.replace(place, port=between.port("far")))
                async with member(relayed) as ann:
                    await ann.publish_peer(RUN, b"ann is here", 60.0)
                    assert await far.peers(RUN) == {ann.peer_id: b"ann is here"}
                    await far.publish_run(RUN, b"the run", 60.0)
                    assert await ann.runs() == {RUN: b"the run"}

    run(main())


@pytest.mark.parametrize(
    ("answers", "told"),
    [(False, "a firewall or a router drops packets to it"), (True, "another program has this port")],
)
def test_who_does_not_answer_and_who_is_a_stranger_are_told_apart(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch, answers: bool, told: str
) -> None:
    async def main() -> None:
        async with member() as there:
            if answers:
                await there._daemon._node.protocol.remove_p2p_handlers(there._daemon._p2p)
            else:
                monkeypatch.setattr(module, "CONNECT_S", 1.0)
            place = addresses.parse(where(there))
            async with Network({"there": place.port}, lambda _: None) as between:
                for link in between.between(["there"]) if not answers else ():
                    link.cut()
                with pytest.raises(DirectoryError, match=told):
                    async with member(str(msgspec.structs.replace(place, port=between.port("there")))):
                        pass

    run(main())


def test_who_announces_itself_is_not_sent_the_others_records(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann, member(where(boot)) as bob:
            await ann.publish_peer(RUN, b"ann is here", 60.0)
            protocol, found = bob._daemon._node.protocol, list[Any]()
            ask = protocol.call_find

            async def call_find(*given: Any) -> Any:
                answer = await ask(*given)
                found.extend(value for value, _ in answer.values())
                return answer

            protocol.call_find = call_find
            await bob.publish_peer(RUN, b"bob is here", 60.0)
            assert found == [None] * len(found), "it asked who is to have its record"
            assert found
            assert len(await bob.peers(RUN)) == 2
            assert any(found), "who looks is sent them"

    run(main())


def test_records_expire(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            await ann.publish_peer(RUN, b"soon gone", 1.5)
            assert await boot.peers(RUN) == {ann.peer_id: b"soon gone"}
            await until_async(lambda: _is_empty(boot))

    async def _is_empty(directory: Directory) -> bool:
        return await directory.peers(RUN) == {}

    run(main())


def test_forged_records_are_refused_and_not_stored(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with member() as boot, member(where(boot)) as victim, member(where(boot)) as forger:
            await victim.publish_peer(RUN, b"genuine", 60.0)
            forger._daemon._node.protocol.record_validator = None
            topic, later = peers_topic(RUN), dht.CLOCK.now() + 600.0
            thief = Identity.ephemeral()
            fake = Envelope(topic=topic, name="", peer=victim.peer_id, expires_s=later, addresses=(), body=b"forged")
            mine = Envelope(topic=topic, name="", peer=thief.peer_id, expires_s=later, addresses=(), body=b"thief")
            for subkey, value, expires in [
                (subkey_of(fake), seal(fake, thief.sign), later),
                (subkey_of(fake), seal(mine, thief.sign), later),
                (subkey_of(mine), seal(mine, thief.sign), later + 60.0),
                ("x", b"garbage", later),
                (None, b"in the place of all", later),
            ]:
                await forger._daemon._node.store(topic, value, expires, subkey=subkey, exclude_self=True)
            for reader in (boot, victim):
                assert await reader.peers(RUN) == {victim.peer_id: b"genuine"}
                stored = reader._daemon._node.protocol.storage.get(dht.DHTID.generate(source=topic))
                assert stored is not None
                assert list(stored.value.data) == [subkey_of(fake)]  # the victim's own, in its place

    run(main())


def test_dead_initial_peers_are_explained(run: Callable[[Main], None]) -> None:
    nobody = Identity.ephemeral().peer_id

    async def main() -> None:
        with pytest.raises(DirectoryError) as caught:
            async with member(f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}", "127.0.0.1:4100", "/ip4/127.0.0.1/tcp/2"):
                pass
        text = str(caught.value)
        assert f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}: " in text
        assert "connection refused" in text
        assert "write it as /ip4/127.0.0.1/tcp/4100" in text
        assert "must end with the peer id" in text
        assert "To found a network of your own, name no address" in text
        async with member() as boot, member(f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}", where(boot)) as ann:
            await ann.publish_peer(RUN, b"one of two is enough", 60.0)
            assert ann.peer_id in await boot.peers(RUN)

    run(main())


def test_who_waits_is_found_by_those_who_come_later(
    run: Callable[[Main], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bootstrap is gone for good; ann, whom bob has met, waits where she was. Afterwards she compares clocks."""
    monkeypatch.setattr(module, "KEEP_S", 0.1)

    async def main() -> None:
        ann, bob = Identity.ephemeral(), Identity.ephemeral()
        async with member(identity=ann) as first, member(where(first), identity=bob, cache=tmp_path / "bob"):
            place = where(first).partition("/p2p/")[0]
        waiting = member(GONE, identity=ann, listen=place, patience_s=60.0)
        asked = Mock(wraps=waiting._clocks_of)
        monkeypatch.setattr(waiting, "_clocks_of", asked)
        coming = asyncio.create_task(waiting.__aenter__())
        await until(lambda: waiting.visible_addresses(), what="ann, where she was")
        async with member(GONE, identity=bob, cache=tmp_path / "bob") as second:
            assert await asyncio.wait_for(coming, 30.0) is waiting
            await waiting.publish_peer(RUN, b"ann", 60.0)
            await until_async(lambda: _sees(second, ann.peer_id))
            await until(lambda: asked.call_count > 1, what="more than the one look at clocks when she joined")
        await waiting.__aexit__(None, None, None)

    async def _sees(directory: Directory, peer: PeerId) -> bool:
        return peer in await directory.peers(RUN)

    run(main())


def test_nobody_is_waited_for_for_ever(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        with pytest.raises(DirectoryError, match=r"no other peer has answered.*connection refused.*of the run will do"):
            async with member(GONE, patience_s=0.5):
                pass

    run(main())


def test_a_restart_works_from_the_cache_with_the_bootstrap_gone(run: Callable[[Main], None], tmp_path: Path) -> None:
    async def main() -> None:
        cache = tmp_path / "cache.json"
        async with member() as bob:
            async with member() as boot:
                old = where(boot)
                async with member(old, cache=cache) as ann:
                    await bob_joins(bob, boot)
                    await bob.publish_peer(RUN, b"bob", 60.0)
                    assert bob.peer_id in await ann.peers(RUN)
                await until_gone(boot)
            async with member(old, cache=cache) as ann:
                assert await ann.peers(RUN) == {bob.peer_id: b"bob"}
                await ann.publish_peer(RUN, b"ann", 60.0)
                assert ann.peer_id in await bob.peers(RUN)

    async def bob_joins(bob: Directory, boot: Directory) -> None:
        bob._book.add(boot.peer_id, [where(boot)])
        assert await bob._connect(boot.peer_id) is None

    async def until_gone(boot: Directory) -> None:
        await boot._tasks.__aexit__(None, None, None)
        os.kill(daemon_of(boot), signal.SIGKILL)
        await boot._daemon._p2p._child.wait()

    run(main())


def test_a_killed_daemon_is_started_again(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            await ann.publish_peer(RUN, b"ann", 60.0)
            before, pid = ann.visible_addresses(), daemon_of(ann)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: ann._daemon.is_up and daemon_of(ann) != pid, what="another daemon")
            assert ann.visible_addresses() == before
            await until_async(lambda: _finds(boot, ann))

    async def _finds(boot: Directory, ann: Directory) -> bool:
        """The first words after a restart may be lost, as on any day: nodes say everything again and again."""
        await ann.publish_peer(RUN, b"ann is back", 90.0)
        return (await boot.peers(RUN)).get(ann.peer_id) == b"ann is back"

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_daemon_has_few_rights_and_works(run: Callable[[Main], None]) -> None:
    """What discovery/sandbox.py promises, as the kernel tells it."""

    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            await ann.publish_run(RUN, b"the run", 60.0)
            assert await boot.runs() == {RUN: b"the run"}
            told = Path(f"/proc/{daemon_of(boot)}")
            assert "p2pd" in os.readlink(told / "exe")
            status = dict(line.split(":\t", 1) for line in (told / "status").read_text().splitlines() if ":\t" in line)
            assert status["NoNewPrivs"] == "1"
            limits = {line[:25].strip(): line[25:].split()[:2] for line in (told / "limits").read_text().splitlines()}
            for name, most in (
                ("Max address space", sandbox.ADDRESS_BYTES),
                ("Max open files", sandbox.FILES),
                ("Max file size", 0),
                ("Max core file size", 0),
                ("Max processes", 10**6),
            ):
                assert all(word.isdecimal() and int(word) <= most for word in limits[name]), (name, limits[name])

    run(main())


def test_a_frozen_daemon_gives_what_was_known_and_errors_in_time(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_S", 0.3)

    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            await ann.publish_peer(RUN, b"ann", 60.0)
            assert await boot.peers(RUN)
            monkeypatch.setattr(p2pd, "CALL_S", 0.5)  # not before: a busy machine may take longer to publish
            os.kill(daemon_of(boot), signal.SIGSTOP)
            pid = daemon_of(boot)
            assert await boot.peers(RUN) == {ann.peer_id: b"ann"}
            await until(lambda: boot._daemon.is_up and daemon_of(boot) != pid, 20.0, "another daemon")

    run(main())


def test_nodes_that_lost_each_other_find_together_again(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_S", 0.3)

    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            for here, there in ((boot, ann), (ann, boot)):
                target = dht.PeerID.from_base58(there.peer_id)
                node_id = here._daemon._node.protocol.routing_table.get(peer_id=target)
                del here._daemon._node.protocol.routing_table[node_id]
                await here._daemon._p2p._client.disconnect(target)
            await ann.publish_peer(RUN, b"ann", 60.0)
            await until_async(lambda: _sees(boot, ann.peer_id))

    async def _sees(directory: Directory, peer: PeerId) -> bool:
        return peer in await directory.peers(RUN)

    run(main())


SHIFTED = """
import asyncio, sys, time
wall, shift = time.time, float(sys.argv[1])
time.time = lambda: wall() + shift
import uvloop
from p2pdiloco.node.diagnostics import clock as _clock
from p2pdiloco.util import logs
from p2pdiloco.discovery.dht import CLOCK
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.transport.identity import Identity

logs.configure()

async def main():
    listen = ["/ip4/127.0.0.1/tcp/0"]
    async with Directory(Identity.ephemeral(), listen=listen, announce=[], initial_peers=[sys.argv[2]]) as directory:
        print(sorted(await directory.runs()), round(CLOCK.ahead_s, -1) + 0.0, _clock(CLOCK).verdict, flush=True)
        await directory.publish_run("b" * 40, b"from another time", 60.0)
        print("published", flush=True)
        await asyncio.to_thread(sys.stdin.read)

uvloop.run(main())
"""


def test_a_clock_that_jumps_in_mid_run_is_told_until_it_is_right_again(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_S", 0.1)
    shift = [0.0]
    monkeypatch.setattr(dht.CLOCK, "_wall", lambda: time.time() + shift[0])

    async def main() -> None:
        async with member() as boot, member(where(boot)) as ann:
            await until(lambda: not ann.troubles)
            shift[0] = -7200.0
            await until(lambda: "clock is 7,200 s behind" in ann.troubles.get("clock", ""))
            assert not ann._tasks.troubles.keys() - {"clock"}
            shift[0] = 0.0
            await until(lambda: not ann.troubles)

    run(main())


@pytest.mark.parametrize("shift_s", [3600.0, -3600.0, 0.0])
def test_a_machine_whose_clock_is_an_hour_wrong_finds_and_is_found(run: Callable[[Main], None], shift_s: float) -> None:
    """Records live for a minute: an hour ahead all of them are over, an hour behind its own are over for the others."""

    async def scenario() -> None:
        async with member() as right:
            await right.publish_run(RUN, b"here", 60.0)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", SHIFTED, str(shift_s), where(right)), stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
            assert process.stdout is not None
            try:
                verdict = "warning" if shift_s else "ok"
                assert (await process.stdout.readline()).decode() == f"{[RUN]} {shift_s} {verdict}\n"
                assert await process.stdout.readline() == b"published\n"
                await until_async(lambda: _has(right, RunId("b" * 40)))
            finally:
                _, errors = await process.communicate(b"")
            said = [line for line in errors.decode().splitlines() if "this machine's clock is 3,600 s" in line]
            assert len(said) == (1 if shift_s else 0), errors.decode()

    run(scenario())


async def _has(directory: Directory, wanted: RunId) -> bool:
    return wanted in await directory.runs()
