"""What a user, or another peer, may get wrong: one line that says what and what to do, an exit status, no harm."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import uvloop
from swarm import LOOPBACK, PEER, write_config
from waiting import until

from p2pdiloco.cli.main import main
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.node.lookup import RunRecord
from p2pdiloco.protocol.identifiers import Digest, FragmentId, PeerId, RunId
from p2pdiloco.protocol.manifest import (
    DataConfig,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.runtime.directory import Directory
from p2pdiloco.runtime.handler import Observer
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.transport import Answer, Transport
from p2pdiloco.wire.records import PeerRecord

FAILED, REPAIR, NOBODY_THERE = 1, 2, 3
NOBODY = "12D3KooWFBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvC"
PROCESS_S = 300.0


class User:
    """Types commands."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def is_told(self, status: int, *words: str, by: list[str]) -> None:
        """The command ends with ``status``, and its last and only complaint has all ``words``."""
        self._capsys.readouterr()
        assert main([*by, "--state", str(self.folder / "state")]) == status
        complaint = self._capsys.readouterr().err.splitlines()
        assert "Traceback" not in "".join(complaint)
        others = " transport dropped a stranger "  # what the liars of this process say
        said = [line for line in complaint if " info " not in line and others not in line and line[:2] != "  "]
        assert len(said) == 1, complaint
        assert said[0].startswith("p2pdiloco: ")
        for word in words:
            assert word in said[0]


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], own_logging: None) -> User:
    return User(tmp_path, capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inner_pace": 3}, ["unknown field", "`pace`", "$.inner"]),
        ({"inner_batch": "many"}, ["Expected `int`", "$.inner.batch"]),
        ({"schedule_sync_every": 5}, ["schedule.sync_every = 5", "multiple of schedule.fragments = 2"]),
        ({"schedule_min_quorum": 0}, [">= 1", "$.schedule.min_quorum"]),
        ({"schedule_sync_every": 200, "schedule_fragments": 200}, ["schedule.fragments = 200", "at most", "tensors"]),
        ({"model_width": 30}, ["model.width = 30", "multiple of"]),
        ({"data_path": "/nowhere"}, ["/nowhere is no folder", "--data"]),
        ({"data_pattern": "*.rst"}, ["has no file that matches '*.rst'", "data.pattern"]),
        ({"model_context": 100_000}, ["the training split of", "a sample needs 100001", "add files"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration(user: User, changes: dict[str, object], words: list[str]) -> None:
    config = write_config(user.folder, **changes)
    user.is_told(REPAIR, *words, by=["start", str(config), *PEER])


def test_files_that_are_not_there_or_something_else(user: User) -> None:
    broken, empty = user.folder / "broken.toml", user.folder / "empty"
    broken.write_text("name = \n")
    empty.mkdir()
    user.is_told(REPAIR, "nowhere.toml", "no such file", by=["start", str(user.folder / "nowhere.toml")])
    user.is_told(REPAIR, "broken.toml", "line 1", by=["start", str(broken)])
    config = write_config(user.folder)
    user.is_told(REPAIR, "has no file that matches", by=["start", str(config), "--data", str(empty), *PEER])
    user.is_told(FAILED, "nowhere.bin: No such file", by=["replay", str(user.folder / "nowhere.bin")])
    user.is_told(REPAIR, "broken.toml is not a journal", by=["replay", str(broken)])


def test_addresses_that_are_none(user: User) -> None:
    config = str(write_config(user.folder))
    user.is_told(REPAIR, "write it as /ip4/127.0.0.1/tcp/4100", by=["join", "127.0.0.1:4100", *PEER])
    user.is_told(REPAIR, "lacks the peer id", by=["join", "/ip4/127.0.0.1/tcp/4100", *PEER])
    user.is_told(REPAIR, "write it as", by=["start", config, "--bootstrap", "example.org:4100", *PEER])
    user.is_told(REPAIR, "write it as", by=["start", config, *PEER, "--listen", "localhost:1"])
    user.is_told(REPAIR, "write it as", by=["bootstrap", "--listen", "0.0.0.0:31337"])


def test_nobody_at_the_bootstrap_address(user: User) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    config = str(write_config(user.folder))
    words = (f"{dead}: ", "connection refused", "check that one of them is running")
    user.is_told(NOBODY_THERE, *words, by=["join", dead, *PEER])
    user.is_told(NOBODY_THERE, *words, by=["start", config, "--bootstrap", dead, *PEER])
    user.is_told(NOBODY_THERE, *words, by=["status", dead])


def test_ports_in_use(user: User) -> None:
    config = str(write_config(user.folder))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        words = (f"cannot listen on {taken}", "in use", "choose another port")
        user.is_told(REPAIR, *words, by=["bootstrap", "--listen", taken])
        user.is_told(REPAIR, *words, by=["start", config, "--host_maddrs", taken, "--listen", LOOPBACK])
        user.is_told(REPAIR, *words, by=["start", config, "--host_maddrs", LOOPBACK, "--listen", taken])


# -- a swarm that is there, with peers that are not what they say ------------------------------------------------------


class Liar(Observer):
    """Says that it trains a run, and gives this as its manifest."""

    def __init__(self, manifest: bytes) -> None:
        self.manifest = manifest

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        return Answer(b"", self.manifest)


@asynccontextmanager
async def stand(
    directory: Directory,
    run: RunId,
    name: str,
    version: int = WIRE_VERSION,
    manifest: bytes = b"\x80 not the manifest",
) -> AsyncIterator[None]:
    """A peer that announces ``run`` in the directory."""
    identity = Identity.ephemeral()
    async with Transport(identity, listen=LOOPBACK, run=run, version=version, handler=Liar(manifest)) as transport:
        await directory.publish_run(run, msgspec.msgpack.encode(RunRecord(name, 1000)), 60.0)
        record = msgspec.msgpack.encode(PeerRecord(tuple(transport.listen_addresses())))
        await directory.publish_peer(run, record, 60.0)
        yield


Stand = Callable[[Directory], AbstractAsyncContextManager[None]]


@contextmanager
def directory_with(*stands: Stand) -> Iterator[str]:
    """A directory, and peers that announce themselves in it, on a thread of their own; its address."""
    up: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            directory = Directory(Identity.ephemeral(), listen=[LOOPBACK], announce=[], initial_peers=[])
            await stack.enter_async_context(directory)
            for one in stands:
                await stack.enter_async_context(one(directory))
            is_over = asyncio.Event()
            up.set_result((directory.bootstrap_lines()[0], asyncio.get_running_loop(), is_over))
            await is_over.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    address, loop, is_over = up.result(PROCESS_S)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(PROCESS_S)


@pytest.mark.timeout(400)
def test_a_run_that_is_not_there_or_not_ours(user: User) -> None:
    lies = partial(stand, run=RunId("a" * 40), name="lies")
    tomorrow = partial(stand, run=RunId("b" * 40), name="tomorrow", version=WIRE_VERSION + 1)
    with directory_with(lies, tomorrow) as address:
        for name, words in (
            ("lies", "no peer gave a manifest of run aaaaaaaaaaaa that can be trusted"),
            ("nobody-knows", "no run is called 'nobody-knows'; the directory knows: lies ("),
            ("tomorrow", "no peer of run bbbbbbbbbbbb"),
        ):
            user.is_told(NOBODY_THERE, words, by=["join", address, "--run", name, *PEER])
        user.is_told(NOBODY_THERE, "name one with --run", by=["join", address, *PEER])
        status = main(["status", address, "--run", "lies", "--state", str(user.folder / "state")])
        assert status == NOBODY_THERE, "who says that it trains the run does not say how it stands"


def test_a_manifest_cannot_name_anything_on_a_joiners_machine(user: User) -> None:
    """A stranger's run trains on the joiner's private folder, or has a model of 2^80 parameters, or one that no machine
    holds. The joiner is told what is asked of it, at once, and nothing of it is read."""
    (user.folder / "private").mkdir()
    (user.folder / "private" / "key.txt").write_text("secret " * 1000)
    tensor = TensorSpec(name="t", shape=(64,), merge="rda", fragment=FragmentId(0))
    sound = Manifest(
        founder=PeerId(NOBODY),
        config=RunConfig(name="spy", access="open", schedule=ScheduleConfig(fragments=1, sync_every=4)),
        tensors=(*(msgspec.structs.replace(tensor, name=f"t{i}") for i in range(4)), tensor),
        genesis=(Digest("0" * 40),),
    )
    data = DataConfig(kind="files", path=str(user.folder / "private"), pattern="*")
    spy = msgspec.structs.replace(sound, config=msgspec.structs.replace(sound.config, data=data))
    endless = msgspec.structs.replace(sound, tensors=(msgspec.structs.replace(tensor, shape=(2**40, 2**40)),))
    heavy = msgspec.structs.replace(
        sound,
        config=RunConfig(
            name="heavy",
            access="open",
            model=ModelConfig(depth=1),
            schedule=ScheduleConfig(fragments=1, max_shard=2**32, sync_every=4),
        ),
        tensors=(msgspec.structs.replace(tensor, shape=(2**36,)),),
        genesis=(Digest("0" * 40),) * 16,
    )
    for name, manifest, status, words in (
        ("spy", spy, REPAIR, "give --data FOLDER"),
        ("endless", endless, NOBODY_THERE, "parameters, at most"),
        ("heavy", heavy, REPAIR, "GB of memory for the model"),
    ):
        with directory_with(partial(stand, run=manifest.run, name=name, manifest=manifest.encode())) as address:
            user.is_told(status, words, by=["join", address, "--run", name, *PEER])
    assert not list(user.folder.glob("**/checkpoint"))


def test_a_command_that_is_stopped_while_it_looks_around(tmp_path: Path) -> None:
    """SIGTERM before there is a peer that could leave: the daemon goes, too, and nobody sees a traceback."""

    async def scenario() -> None:
        async with Directory(Identity.ephemeral(), listen=[LOOPBACK], announce=[], initial_peers=[]) as directory:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "p2pdiloco", "join", directory.bootstrap_lines()[0], *PEER),
                *("--state", str(tmp_path)),
                stdout=PIPE,
                stderr=PIPE,
            )
            await until(lambda: directory._book.peers() or (tmp_path / "identity.key").exists(), PROCESS_S)
            assert process.stderr is not None
            async with asyncio.timeout(PROCESS_S):
                assert b"directory is up" in await process.stderr.readline()
                process.terminate()
                _, errors = await process.communicate()
            assert process.returncode == 130
            assert b"Traceback" not in errors

    uvloop.run(scenario())
