"""A peer's ports in its next life, on real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.run_lookup import DirectoryOptions, open_directory
from p2pdiloco.transport import port_memory
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import Listeners
from tests.integration.waiting import until_async

ANY = ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")


def lived(path: Path, wanted: str | tuple[str, ...] = ANY) -> Listeners:
    """A life that listens."""
    listeners = Listeners(port_memory.again(wanted, path))
    listeners.open()
    port_memory.remember(map(str, listeners.addresses()), path)
    return listeners


def test_any_port_is_that_of_the_last_life(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    first = lived(path)
    before = first.addresses()
    first.close()
    again = lived(path)
    assert again.addresses() == before
    again.close()
    given = port_memory.again(("/ip4/127.0.0.1/tcp/4242", "", "/ip4/127.0.0.1/tcp/0"), path)
    assert given == ("/ip4/127.0.0.1/tcp/4242", "", f"/ip4/127.0.0.1/tcp/{before[0].port}"), "who names one has it"


def test_a_port_that_is_taken_is_not_waited_for_and_stays_the_firsts(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    first = lived(path, ANY[0])
    second = lived(path, ANY[0])
    taken, other = first.addresses(), second.addresses()
    assert other != taken
    first.close()
    again = lived(path, ANY[0])
    assert again.addresses() == taken
    for one in (again, second):
        one.close()


@pytest.mark.parametrize("said", [b"", b"[", b'{"ip4": 0}', b'{"ip4": 70000}', b'{"ip4": "x"}', b'{"dns4": 80}'])
def test_a_spoilt_file_is_as_none(tmp_path: Path, said: bytes) -> None:
    path = tmp_path / "ports.json"
    path.write_bytes(said)
    assert port_memory.again(ANY, path) == ANY
    lived(path).close()
    port_memory.remember(["/ip4/127.0.0.1/tcp/4242", "no address"], tmp_path / "ports.json" / "no folder")


@pytest.mark.heavy
def test_two_whose_nodes_restart_at_once_find_each_other_without_a_bootstrap(tmp_path: Path) -> None:
    """Each knows where the other was, and is there itself."""
    ann, bob = (Identity.load_or_create(tmp_path / name / "identity.key") for name in ("ann", "bob"))

    async def live(*, is_first: bool) -> list[str]:
        """Both, until each finds what the other says."""
        options = DirectoryOptions(listen=ANY[:1])
        async with open_directory(ann, options, tmp_path / "ann") as one:
            met = tuple(one.visible_addresses()) if is_first else ()
            others = DirectoryOptions(listen=ANY[:1], initial_peers=met)
            async with open_directory(bob, others, tmp_path / "bob") as other:
                for directory, name in ((one, "a"), (other, "b")):
                    await directory.publish_run(RunId(name * 40), b"here", 60.0)
                for directory in (one, other):
                    await until_async(lambda where=directory: knows_both(where), 15.0)
                return [*one.visible_addresses(), *other.visible_addresses()]

    async def knows_both(directory: Directory) -> bool:
        return len(await directory.runs()) == 2

    before = asyncio.run(live(is_first=True))
    assert asyncio.run(live(is_first=False)) == before
