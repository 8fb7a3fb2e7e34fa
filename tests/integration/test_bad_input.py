"""What a user, or another peer, may get wrong: one line that says what and what to do, an exit status, no harm."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from functools import partial
from pathlib import Path

import msgspec
import pytest
import uvloop
from stands import PROCESS_S, directory_with, stand
from swarm import LOOPBACK, PEER, write_config
from waiting import until

from p2pdiloco.cli.main import main
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId
from p2pdiloco.protocol.manifest import (
    DataConfig,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.transport.identity import Identity

FAILED, REPAIR, NOBODY_THERE = 1, 2, 3
NOBODY = "12D3KooWFBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvC"


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
        ({"inner_pace": 3}, ["there is no key inner.pace", "there are optimizer, steps"]),
        ({"inner_batch": "many"}, ["inner.batch = 'many'", "write a whole number"]),
        ({"schedule_sync_every": 5}, ["schedule.sync_every = 5", "multiple of schedule.fragments = 2"]),
        ({"schedule_min_quorum": 0}, ["schedule.min_quorum = 0", "of at least 1"]),
        (
            {"inner_steps": 400, "schedule_sync_every": 200, "schedule_fragments": 200},
            ["schedule.fragments = 200", "at most", "tensors"],
        ),
        ({"model_width": 30}, ["model.width = 30", "multiple of"]),
        ({"data_path": "/nowhere"}, ["/nowhere is not a folder", "--data"]),
        ({"data_pattern": "*.rst"}, ["has no file that matches '*.rst'", "data.pattern"]),
        ({"model_context": 100_000}, ["the training split of", "a sample needs 100001", "add files"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration(user: User, changes: dict[str, object], words: list[str]) -> None:
    config = write_config(user.folder, **changes)
    user.is_told(REPAIR, *words, by=["start", str(config), *PEER])


def test_ports_in_use(user: User) -> None:
    config = str(write_config(user.folder))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        words = (f"cannot listen on {taken}", "in use", "choose another port")
        user.is_told(REPAIR, *words, by=["bootstrap", "--listen", taken])
        user.is_told(REPAIR, *words, by=["start", config, "--directory-listen", taken, "--listen", LOOPBACK])
        user.is_told(REPAIR, *words, by=["start", config, "--directory-listen", LOOPBACK, "--listen", taken])


# -- a swarm that is there, with peers that are not what they say ------------------------------------------------------


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
                *(sys.executable, "-m", "p2pdiloco", "join", directory.bootstrap_addresses()[0], *PEER),
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
