"""Publications: whole versions in a folder, whatever is killed, full or hung."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors import safe_open
from test_cli_results import leave

from p2pdiloco.cli.main import main
from p2pdiloco.node import publication, publisher
from p2pdiloco.node.publication import LATEST, Order, PublicationError, Published, hold, latest, publish, sweep
from p2pdiloco.node.publisher import COMMAND_FAILED, FAILED, Publisher
from p2pdiloco.node.results import Result, find_result
from p2pdiloco.node.run_creation import make_manifest
from p2pdiloco.protocol.ids import Digest, PeerId, RunId
from p2pdiloco.protocol.manifest import ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training.export import ABOUT, About, check_adapters, load_model
from p2pdiloco.training.huggingface import ArchitectureError
from p2pdiloco.util.files import LOCAL

KILLS = 12


@pytest.fixture
def order(tmp_path: Path) -> Order:
    """To publish a run of which there is version 0."""
    manifest = leave(tmp_path / "state", "story")
    folder = tmp_path / "published"
    folder.mkdir()
    return Order(
        state=str(folder_of(tmp_path / "state", manifest.run)),
        run=manifest.run,
        folder=str(folder),
        format="safetensors",
    )


def at_step(result: Result, step: int) -> Result:
    """A later version, of which each parameter is its step."""
    checkpoint = result.checkpoint
    shards = tuple(
        msgspec.structs.replace(
            shard,
            state=msgspec.structs.replace(
                shard.state, head=msgspec.structs.replace(shard.state.head, id=Digest(f"{step:064x}"))
            ),
        )
        for shard in checkpoint.shards
    )
    theta = torch.full_like(checkpoint.theta, float(step))
    return result._replace(checkpoint=msgspec.structs.replace(checkpoint, shards=shards, theta=theta), step=step)


@pytest.fixture
def steps(order: Order, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The run's state is at the list's last step."""
    found, now = find_result(order.state, Path(order.state), order.run), [1]
    monkeypatch.setattr(publication, "find_result", lambda *_: at_step(found, now[-1]))
    return now


def publications(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("step-"))


def contents(folder: Path) -> dict[str, object]:
    """Contents of an export's files. The order of metadata in safetensors is random."""
    found: dict[str, object] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
                found[path.name] = (file.metadata(), tensors)
        else:
            found[path.name] = path.read_bytes()
    return found


def check_whole(folder: Path) -> int:
    """Check that ``latest`` names a whole version; return its step."""
    name = latest(folder)
    assert name is not None
    about = msgspec.json.decode((folder / LATEST / ABOUT).read_bytes(), type=About)
    assert sorted(os.listdir(folder / LATEST)) == sorted((*about.files, ABOUT))
    assert int(name.split("-")[1]) == about.step
    assert all(bool((p == about.step).all()) for p in load_model(folder / LATEST).parameters())
    return about.step


def test_each_version_is_what_export_writes(order: Order, tmp_path: Path) -> None:
    folder = Path(order.folder)
    for wanted in ("hf", "safetensors"):
        done = publish(msgspec.structs.replace(order, format=wanted))
        assert done.is_new
        assert not publish(msgspec.structs.replace(order, format=wanted)).is_new, "it is there already"
        assert main(["export", order.state, "--format", wanted, "--out", str(tmp_path / wanted)]) == 0
        assert contents(folder / LATEST) == contents(tmp_path / wanted)
    assert len(publications(folder)) == 2


def test_old_ones_go_and_files_that_stay_the_same_are_links(order: Order, steps: list[int]) -> None:
    folder, order = Path(order.folder), msgspec.structs.replace(order, format="hf", keep=3)
    (folder / "step-00000001-notes").mkdir()
    (folder / ".mine.part").touch()
    for step in range(1, 60):
        steps.append(step)
        publish(order)
        assert len(publications(folder)) <= 4
    found = [folder / name for name in publications(folder) if not name.endswith("notes")]
    assert [int(path.name.split("-")[1]) for path in found] == [57, 58, 59]
    inodes = [{path.name: path.stat().st_ino for path in version.iterdir()} for version in found]
    assert inodes[0]["tokenizer.json"] == inodes[1]["tokenizer.json"] == inodes[2]["tokenizer.json"]
    assert len({inode["model.safetensors"] for inode in inodes}) == 3
    assert set(os.listdir(folder)) == {*(path.name for path in found), LATEST, "step-00000001-notes", ".mine.part"}


def test_after_going_back_the_newest_is_the_state_of_now(order: Order, steps: list[int]) -> None:
    folder = Path(order.folder)
    for step in (100, 200, 50):
        steps.append(step)
        publish(order)
    assert check_whole(folder) == 50
    assert [int(name.split("-")[1]) for name in publications(folder)] == [50, 200]
    steps.append(60)
    publish(order)
    assert [int(name.split("-")[1]) for name in publications(folder)] == [50, 60]
    publish(msgspec.structs.replace(order, keep=1))
    assert [int(name.split("-")[1]) for name in publications(folder)] == [60]


def publish_all(order: Order, result: Result, first: int) -> None:
    for step in count(first):
        publication.find_result = lambda *_, step=step: at_step(result, step)  # type: ignore[assignment]
        publish(order)


@pytest.mark.heavy
def test_whoever_is_killed_leaves_a_whole_version(order: Order) -> None:
    """In the middle of it, again and again; what is left over goes at the next start."""
    folder, random_s = Path(order.folder), random.Random(5)
    result = find_result(order.state, Path(order.state), order.run)
    context, step, halves = multiprocessing.get_context("fork"), 0, 0
    for _ in range(KILLS):
        process = context.Process(target=publish_all, args=(order, result, step + 1))
        process.start()
        before = latest(folder)
        while latest(folder) == before:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(random_s.uniform(0.0, 0.03))
        process.kill()
        process.join()
        halves += sum(name.startswith(".step") for name in os.listdir(folder))
        assert check_whole(folder) > step
        step = check_whole(folder)
        assert len(publications(folder)) <= order.keep + 1
        with hold(folder, order.run):
            assert not [name for name in os.listdir(folder) if name.endswith(".part")]
        assert check_whole(folder) == step
    assert halves, "nobody was killed in the middle"


PUBLICATIONS = 1000
AT_ONCE = 40
SPARE = 4


def live(order: Order, tmp_path: Path, result: Result, first: int, command: str) -> None:
    """A node that publishes one version after the other until it is killed."""

    async def publish_each() -> None:
        peer = Peer(order, tmp_path, command)
        for step in count(first):
            publication.find_result = lambda *_, step=step: at_step(result, step)  # type: ignore[assignment]
            peer.mark = step
            await peer.publisher.publish()

    async def write(publisher: Publisher) -> Published:
        return publication._answer(publisher._order)

    Publisher._write = write  # type: ignore[method-assign]
    asyncio.run(publish_each())


def load_all(folder: Path) -> None:
    """A server that loads the newest version again and again."""
    newest = 0
    while True:
        name = latest(folder)
        assert name is not None
        try:
            step = msgspec.json.decode((folder / name / ABOUT).read_bytes(), type=About).step
            values = torch.cat([p.flatten() for p in load_model(folder / name).parameters()])
        except (OSError, ValueError):
            assert not (folder / name).exists(), "it cannot be loaded, and was not removed meanwhile"
            continue
        assert step == 0 or bool((values == step).all())
        assert step >= newest
        newest = step


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_thousand_versions_are_whole_whoever_is_killed(order: Order, tmp_path: Path) -> None:
    """Node, server and command are killed again and again; the folder's size stays bounded."""
    folder, random_s = Path(order.folder), random.Random(7)
    order = msgspec.structs.replace(order, keep=SPARE)
    result = find_result(order.state, Path(order.state), order.run)
    context, step, killed = multiprocessing.get_context("fork"), 0, 0
    publish(order)
    one = sum(path.stat().st_size for path in (folder / LATEST).iterdir())
    server = context.Process(target=load_all, args=(folder,), daemon=True)
    server.start()
    while step < PUBLICATIONS:
        command = "sh -c 'kill -9 $$'" if killed % 5 == 4 else ""
        node = context.Process(target=live, args=(order, tmp_path, result, step + 1, command), daemon=True)
        node.start()
        goal = step + (3 if command else AT_ONCE)
        while int(str(latest(folder)).split("-")[1]) < goal:
            assert node.is_alive()
            assert server.is_alive(), "the server found a version that is not whole"
            time.sleep(0.001)
        time.sleep(random_s.uniform(0.0, 0.03))
        node.kill()
        node.join()
        killed += 1
        step = check_whole(folder)
        assert step >= goal
        assert len(publications(folder)) <= SPARE + 1
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= (SPARE + 3) * one
        if killed % 4 == 0:
            server.kill()
            server.join()
            server = context.Process(target=load_all, args=(folder,), daemon=True)
            server.start()
        with hold(folder, order.run):
            assert not [name for name in os.listdir(folder) if name.endswith(".part")]
    assert server.is_alive()
    server.kill()
    server.join()
    assert killed > PUBLICATIONS // AT_ONCE


@pytest.mark.long
def test_a_full_file_system_leaves_the_newest_version(order: Order, steps: list[int]) -> None:
    folder = Path(order.folder)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs root: mounts a small file system")
    try:
        publish(order)
        filler = folder / "filler"
        with suppress(OSError), open(filler, "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        for spare in (0, 4096, 8192):
            os.truncate(filler, filler.stat().st_size - spare)
            steps.append(steps[-1] + 1)
            with pytest.raises(OSError, match="No space"):
                publish(order)
            assert check_whole(folder) == 1
        filler.unlink()
        publish(order)
        assert check_whole(folder) == steps[-1]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """As on a full disk, no file may be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_newest_version(order: Order, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(order.folder)
    publish(order)
    steps.append(2)
    with small_files(4096), pytest.raises(OSError, match=r"model\.safetensors"):
        publish(order)
    assert set(os.listdir(folder)) == {LATEST, latest(folder)}, "half a version takes the room"

    def sync(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as full:
        full.setattr(type(LOCAL), "sync", staticmethod(sync))
        with pytest.raises(OSError, match="No space"):
            publish(order)
    assert set(os.listdir(folder)) == {LATEST, latest(folder)}
    assert check_whole(folder) == 1
    publish(order)
    assert check_whole(folder) == 2


def test_a_folder_of_another_run_or_process_is_refused(order: Order, tmp_path: Path) -> None:
    folder = Path(order.folder)
    publish(order)
    with pytest.raises(PublicationError, match=r"another run, story"), hold(folder, RunId("0" * 64)):
        pass
    with (
        hold(folder, order.run),
        pytest.raises(PublicationError, match=rf"process {os.getpid()} publishes in"),
        hold(folder, order.run),
    ):
        pass
    (tmp_path / "mine" / LATEST).mkdir(parents=True)
    with pytest.raises(PublicationError, match="is no link"), hold(tmp_path / "mine", order.run):
        pass
    sweep(tmp_path / "mine")
    assert (tmp_path / "mine" / LATEST).is_dir()


def test_how_adapters_are_applied_must_be_known_before_the_peer_starts(tmp_path: Path) -> None:
    config = RunConfig(name="tune", model=ModelConfig(kind="external"), schedule=ScheduleConfig(fragments=1))
    adapter = ("base_model.model.q_proj.lora_A.default.weight", torch.nn.Parameter(torch.ones(4, 4)))
    manifest, _, _ = make_manifest(config, PeerId("founder"), [(adapter[0], adapter[1].shape, False)], [adapter])
    check_adapters(manifest, "safetensors", None)
    for like in (None, str(tmp_path)):
        with pytest.raises(ArchitectureError, match="does not record how they are applied: give --like FOLDER"):
            check_adapters(manifest, "peft", like)
    (tmp_path / "adapter_config.json").touch()
    check_adapters(manifest, "peft", str(tmp_path))


# -- the node's side ---------------------------------------------------------------------------------------------------


class Peer:
    """A peer, as far as its publisher needs one."""

    def __init__(self, order: Order, tmp_path: Path, command: str = "", command_s: float = 60.0) -> None:
        self.mark: int | None = 1
        self.saved = 0
        self.can_save = True
        self.troubles: dict[str, str] = {}
        self.publisher = Publisher(
            order,
            every_s=60.0,
            command=command,
            log_path=tmp_path / "publisher.log",
            mark=lambda: self.mark,
            save=self.save,
            troubles=self.troubles,
            command_s=command_s,
        )

    async def save(self) -> bool:
        self.saved += 1
        return self.can_save


def script(tmp_path: Path, *lines: str) -> str:
    """A command that runs this program."""
    path = tmp_path / "command.py"
    path.write_text("\n".join(("import os, sys, time", *lines)))
    return f"{sys.executable} {path}"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_ended(pids: Path) -> bool:
    """Whether the processes whose ids are in a file have ended."""
    for number in map(int, pids.read_text().split()):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(number).status() != "zombie":
                return False
    return True


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Published]:
    """Answers of the process that writes, which is not started; the last stays."""
    answers = [Published(name="step-00000001-00000000", step=1, is_new=True)]

    async def write(_: Publisher) -> Published:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(Publisher, "_write", write)
    return answers


@pytest.mark.heavy
def test_a_process_of_its_own_publishes_and_is_replaced_if_it_dies(order: Order, tmp_path: Path) -> None:
    async def check() -> None:
        peer = Peer(order, tmp_path)
        keeping = asyncio.create_task(peer.publisher.keep())
        while latest(Path(order.folder)) is None:
            await asyncio.sleep(0.01)
            assert not keeping.done()
            assert not peer.troubles
        async with peer.publisher._one_at_a_time:
            process = peer.publisher._process._process
        assert process is not None
        process.kill()
        peer.mark = 2
        await peer.publisher.publish()
        assert "is not published" in peer.troubles[FAILED]
        assert "trying again" in peer.troubles[FAILED]
        await peer.publisher.publish()
        assert not peer.troubles
        replaced = peer.publisher._process._process
        assert replaced is not None
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert await replaced.wait() == -signal.SIGKILL

    asyncio.run(check())


def test_only_a_new_state_is_saved_and_published(
    order: Order, tmp_path: Path, in_process: list[Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        peer = Peer(order, tmp_path)
        peer.mark = None
        await peer.publisher.publish()
        assert peer.saved == 0, "a newcomer has no state yet"
        peer.mark = 1
        for _ in range(3):
            await peer.publisher.publish()
        assert peer.saved == 1
        in_process[:] = [Published(error="disk full"), in_process[0]]
        peer.mark = 2
        await peer.publisher.publish()
        assert f"the model is not published in {order.folder}: disk full; trying" in peer.troubles[FAILED]
        await peer.publisher.publish()
        assert (peer.saved, peer.troubles) == (3, {})
        peer.mark, peer.can_save = 3, False
        assert "its checkpoint was not written" in await peer.publisher.publish()
        assert "its checkpoint was not written" in peer.troubles[FAILED]
        peer.can_save = True
        assert await peer.publisher.publish() == ""
        assert (peer.saved, peer.troubles) == (5, {})

    asyncio.run(check())


def test_a_command_that_fails_is_told_and_runs_again(order: Order, tmp_path: Path, in_process: list[Published]) -> None:
    told = tmp_path / "told"
    command = script(
        tmp_path,
        "told = [*sys.argv[1:], os.environ['P2PDILOCO_FOLDER'], os.environ['P2PDILOCO_STEP']]",
        f"print(*told, file=open({str(told)!r}, 'a'))",
        f"sys.exit(3 if not os.path.exists({str(tmp_path / 'up')!r}) else 0)",
    )

    async def check() -> None:
        peer = Peer(order, tmp_path, f"{command} reload")
        for _ in range(2):
            await peer.publisher.publish()
            assert "(--on-publish) failed with status 3; trying again" in peer.troubles[COMMAND_FAILED]
        (tmp_path / "up").touch()
        for _ in range(3):
            await peer.publisher.publish()
            assert not peer.troubles
        folder = f"{order.folder}/step-00000001-00000000"
        assert told.read_text().splitlines() == [f"reload {folder} {folder} 1"] * 3, "it ran until it succeeded"
        in_process[:] = [Published(name="step-00000002-00000000", step=2, is_new=True)]
        peer.mark = 2
        await peer.publisher.publish()
        assert len(told.read_text().splitlines()) == 4

    asyncio.run(check())


@pytest.mark.heavy
def test_a_command_that_hangs_is_killed_with_all_that_it_started(
    order: Order, tmp_path: Path, in_process: list[Published]
) -> None:
    pids = tmp_path / "pids"
    command = script(
        tmp_path, f"os.fork(); print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True); time.sleep(600)"
    )

    async def check() -> None:
        peer = Peer(order, tmp_path, command, command_s=2.0)
        await peer.publisher.publish()
        assert "took longer than 2 s and was killed" in peer.troubles[COMMAND_FAILED]

    asyncio.run(check())
    assert len(pids.read_text().split()) == 2
    wait_for(lambda: all_ended(pids))


def command_of_a_node(order: Order, tmp_path: Path, command: str) -> None:
    asyncio.run(Peer(order, tmp_path, command).publisher.publish())


@pytest.mark.heavy
def test_a_command_ends_with_a_node_that_is_killed(order: Order, tmp_path: Path, in_process: list[Published]) -> None:
    pids = tmp_path / "pids"
    command = script(
        tmp_path, f"os.fork(); print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True); time.sleep(600)"
    )
    node = multiprocessing.get_context("fork").Process(target=command_of_a_node, args=(order, tmp_path, command))
    node.start()
    wait_for(lambda: pids.exists() and len(pids.read_text().splitlines()) == 2)
    node.kill()
    node.join()
    wait_for(lambda: all_ended(pids))


def test_a_command_that_is_gone_is_told(order: Order, tmp_path: Path, in_process: list[Published]) -> None:
    peer = Peer(order, tmp_path, str(tmp_path / "no-such-program"))
    asyncio.run(peer.publisher.publish())
    assert "cannot be started: there is no command" in peer.troubles[COMMAND_FAILED]
    assert publisher.COMMAND_S > 60
