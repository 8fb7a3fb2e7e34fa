"""A state folder through fifty random orders of commands: nobody ever goes on from less than there is.

What start, join and resume do to files is done here by the functions that they are made of; what a swarm does between
them (training) is a later version of each shard, signed by the peer's key and saved as the node saves it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from p2pdiloco.codec.digests import state_digest
from p2pdiloco.node.run_folder import (
    FolderInUseError,
    NameTakenError,
    RunStore,
    folder_of,
    has_finished,
    hold,
)
from p2pdiloco.peer.checkpoint import CheckpointError, load, save
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.peer.signatures import signed
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.data_blocks import Trained
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, RunId
from p2pdiloco.protocol.manifest import (
    InnerConfig,
    Layout,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import StateProof

OURS = Identity.ephemeral()
ELEMENTS = 64
STEPS = 4000
ORDERS = 50
COMMANDS = 14


def make_manifest(name: str = "story", seed: int = 0) -> Manifest:
    config = RunConfig(
        name=name,
        seed=seed,
        model=ModelConfig(),
        schedule=ScheduleConfig(fragments=2),
        inner=InnerConfig(steps=STEPS, warmup=0),
    )
    zero = state_digest(torch.zeros(ELEMENTS), torch.zeros(ELEMENTS))
    tensors = tuple(
        TensorSpec(name=name, shape=(ELEMENTS,), merge="direct", fragment=FragmentId(f)) for f, name in enumerate("ab")
    )
    return Manifest(founder=OURS.peer_id, config=config, tensors=tensors, genesis=(zero, zero))


MANIFEST = make_manifest()
LAYOUT = Layout.of(MANIFEST)


class Peer:
    """What a running peer holds of the run: in memory, and of that on the disk what it has saved."""

    def __init__(self, world: World, folder: Path, initial: InitialState | None, manifest: Manifest = MANIFEST) -> None:
        self.world = world
        self.manifest = manifest
        self.folder = folder
        if initial is None:
            initial = version_zero(manifest)
        self.shards = list(initial.shards)
        self.theta, self.momentum = initial.take()

    def commit(self, shard: int) -> None:
        """The next version of a shard. What differs from one life to another goes into its bits."""
        before = self.shards[shard].state
        piece, version = LAYOUT.shards[shard], before.head.version + 1
        self.theta[piece.start : piece.stop] = self.world.random.random()
        mine = Contributor(LearnerId(f"{OURS.peer_id}/1"), 0, 10, 0, 1)
        marks = ((mine.learner, Mark(10, 1, version)),)
        header = CommitHeader(
            shard=piece.shard,
            version=version,
            parent=before.head.id,
            step=min(STEPS, 4 * version),
            owner=OURS.peer_id,
            contributors=(signed(OURS, self.manifest.run, piece.shard, before.head.id, mine, Digest("2" * 40)),),
            tokens=before.head.tokens + 10,
            payload=Digest("1" * 40),
            result=state_digest(self.theta[piece.start : piece.stop], self.momentum[piece.start : piece.stop]),
            record=record_of(dict(marks), Trained()),
        )
        head = Head(piece.shard, version, commit_id(header), header.tokens)
        signature = OURS.sign(messages.signed_commit_bytes(head.id))
        self.shards[shard] = StateProof(ShardState(head, header.step, marks), header, signature)
        self.world.signed.append((shard, version, head.id))

    def save(self) -> None:
        """As the node does."""
        save(self.folder / "checkpoint", self.manifest, tuple(self.shards), self.theta, self.momentum, keep=2)
        for number, proof in enumerate(self.shards):
            self.world.saved[number] = max(self.world.saved[number], proof.state.head.tokens)


def version_zero(manifest: Manifest) -> InitialState:
    heads = (genesis_head(manifest.run, s.shard, manifest.genesis[s.shard]) for s in LAYOUT.shards)
    proofs = [StateProof(ShardState(head, 0, ()), None, b"") for head in heads]
    return InitialState(proofs, torch.zeros(2 * ELEMENTS), torch.zeros(2 * ELEMENTS))


class World:
    """One state folder, its peer (if one runs), and what was ever saved there."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.state = folder / "state"
        self.copy = folder / "copy"
        self.saved = [0, 0]
        """By shard: the heaviest head in any checkpoint, in tokens."""
        self.signed: list[tuple[int, int, str]] = []
        self.peer: Peer | None = None
        self.lives = ExitStack()

    def begin(self, command: str) -> None:
        """start, join or resume."""
        if self.peer is not None:
            files = contents(self.state)
            with pytest.raises(FolderInUseError, match=rf"process {os.getpid()}.*--state"), hold(self.state, MANIFEST):
                pass
            assert contents(self.state) == files, "who has no right to a folder writes nothing"
            return
        folders = [self.state]
        match command:
            case "start":
                manifest = RunStore(self.state).founded_from(MANIFEST.config) or MANIFEST
            case "resume" if self.copy.exists():
                folders.append(self.copy)
                manifest = RunStore(self.copy).choose(None)
            case _:
                manifest = MANIFEST
        assert manifest == MANIFEST
        folder = self.lives.enter_context(hold(self.state, manifest))
        assert folder == folder_of(self.state, MANIFEST.run)
        own = RunStore(*folders).load_state(manifest)
        assert (own is None) == (self.saved == [0, 0])
        tokens = [0, 0] if own is None else [proof.state.head.tokens for proof in own.shards]
        assert tokens == self.saved, f"{command} went on from {tokens}, and {self.saved} are there"
        self.peer = Peer(self, folder, own)

    def work(self) -> None:
        """Train a little. What is committed is saved before anybody hears of it; a kill then loses only the rest."""
        if self.peer is not None:
            for _ in range(self.random.randrange(1, 4)):
                self.peer.commit(self.random.randrange(2))
                self.peer.save()

    def die(self) -> None:
        """kill -9, perhaps in the middle of a checkpoint: the tensors are there, their index is not."""
        if self.peer is None:
            return
        checkpoint = self.peer.folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / ".state-00000999.safetensors.part").write_bytes(b"half" * 100)
        (checkpoint / f".state-00000998.safetensors.{self.random.random()}.part").write_bytes(b"half" * 100)
        (checkpoint / "state-00000997.safetensors").write_bytes(b"half" * 100)
        self.peer = None
        self.lives.close()

    def copy_away(self) -> None:
        """The user keeps a copy of the state folder, which grows old; or brings it back beside the newer one."""
        if self.peer is not None or self.saved == [0, 0]:
            return
        if self.copy.exists() and self.random.random() < 0.5:
            shutil.rmtree(self.state / "old-copy", ignore_errors=True)
            shutil.copytree(next(self.copy.glob("*/checkpoint")), self.state / "old-copy" / "checkpoint")
        else:
            shutil.rmtree(self.copy, ignore_errors=True)
            shutil.copytree(self.state, self.copy)

    def as_of_an_earlier_release(self) -> None:
        """The founder's folder has the run's name."""
        if self.peer is None and folder_of(self.state, MANIFEST.run).exists():
            shutil.rmtree(self.state / "story", ignore_errors=True)
            folder_of(self.state, MANIFEST.run).rename(self.state / "story")

    def check(self) -> None:
        """What must hold after each command."""
        versions = [(shard, version) for shard, version, _ in self.signed]
        assert len(set(versions)) == len(versions), "a second chain was signed with the same key"
        mine = folder_of(self.state, MANIFEST.run) / "checkpoint"
        if self.peer is not None:
            left = {path.name for path in mine.glob("*")} | {path.name for path in mine.glob(".*")}
            assert not [name for name in left if name.endswith(".part")]
            assert len([name for name in left if name.endswith(".safetensors")]) <= 2
            assert (load(mine) is None) == (not list(mine.glob("*.json")))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("seed", range(ORDERS))
def test_fifty_orders_of_commands(tmp_path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    world = World(tmp_path, seed)
    for _ in range(COMMANDS):
        command = world.random.choice(
            ["start", "join", "resume", "start", "join", "resume", "work", "work", "die", "die", "copy", "earlier"]
        )
        match command:
            case "work":
                world.work()
            case "die":
                world.die()
            case "copy":
                world.copy_away()
            case "earlier":
                world.as_of_an_earlier_release()
            case _:
                world.begin(command)
        world.check()
    world.lives.close()


def with_checkpoint(state: Path, versions: int, manifest: Manifest = MANIFEST) -> Path:
    world = World(state.parent, 0)
    folder = folder_of(state, manifest.run)
    peer = Peer(world, folder, None, manifest)
    for _ in range(versions):
        peer.commit(0)
    peer.save()
    return folder


def test_of_several_states_each_shards_heaviest_is_taken_whatever_is_newer_on_the_disk(tmp_path: Path) -> None:
    """The very bug: an old state in a folder of another name, written last."""
    folder = with_checkpoint(tmp_path / "state", 5)
    world = World(tmp_path, 1)
    old = Peer(world, tmp_path / "state" / "story", None)
    old.commit(1)
    old.save()
    old = Peer(world, folder, None)  # and one in the same folder, with a higher number
    old.save()
    found = RunStore(tmp_path / "state").load_state(MANIFEST)
    assert found is not None
    assert [proof.state.head.version for proof in found.shards] == [5, 1]


def test_a_spoilt_manifest_hides_no_checkpoint(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path / "state", 3)
    with hold(tmp_path / "state", MANIFEST):
        assert (folder / "manifest.msgpack").read_bytes() == MANIFEST.encode(), "a second copy"
    (folder / "checkpoint" / "manifest.msgpack").write_bytes(b"spoilt")
    assert RunStore(tmp_path / "state").saved_runs()[MANIFEST.run].step == 12
    assert RunStore(tmp_path / "state").load_state(MANIFEST) is not None
    assert RunStore(tmp_path / "state").founded_from(MANIFEST.config) == MANIFEST
    (folder / "manifest.msgpack").write_bytes(make_manifest(seed=9).encode())
    assert load_versions(tmp_path / "state") is None, "another run's manifest is not this run's"
    with hold(tmp_path / "state", MANIFEST):
        assert load_versions(tmp_path / "state") == [3, 0], "who knows the run puts its manifest back"


def load_versions(state: Path) -> list[int] | None:
    try:
        found = RunStore(state).load_state(MANIFEST)
    except CheckpointError:
        return None
    return None if found is None else [proof.state.head.version for proof in found.shards]


def test_spoilt_checkpoints_are_no_reason_to_begin_again(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path / "state", 3)
    for path in (folder / "checkpoint").glob("state-*.json"):
        path.write_bytes(b"spoilt")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        RunStore(tmp_path / "state").load_state(MANIFEST)


def test_a_finished_run_is_known_as_such(tmp_path: Path) -> None:
    with_checkpoint(tmp_path / "state", STEPS // 4)
    saved = RunStore(tmp_path / "state").saved_runs()[MANIFEST.run]
    assert saved.is_finished
    assert RunStore(tmp_path / "state").founded_from(MANIFEST.config) == MANIFEST
    own = RunStore(tmp_path / "state").load_state(MANIFEST)
    assert own is not None
    assert has_finished(MANIFEST, own.shards, tmp_path / "state" / MANIFEST.run)
    longer = msgspec.structs.replace(MANIFEST.config, inner=InnerConfig(steps=2 * STEPS))
    assert RunStore(tmp_path / "state").founded_from(longer) is None, "a finished run does not keep its name"


def test_a_name_with_another_configuration_is_told_with_both_commands(tmp_path: Path) -> None:
    with_checkpoint(tmp_path / "state", 3)
    changed = msgspec.structs.replace(MANIFEST.config, seed=1)
    with pytest.raises(NameTakenError, match=rf"resume {tmp_path}/state --run {MANIFEST.run[:12]}.*--name story-2"):
        RunStore(tmp_path / "state").founded_from(changed)
    assert RunStore(tmp_path / "state").founded_from(msgspec.structs.replace(changed, name="story-2")) is None


def test_of_several_runs_the_user_says_which(tmp_path: Path) -> None:
    with_checkpoint(tmp_path / "state", 3)
    with_checkpoint(tmp_path / "state", 1, make_manifest("other", seed=3))
    with pytest.raises(CheckpointError, match="name one with --run"):
        RunStore(tmp_path / "state").choose(None)
    assert RunStore(tmp_path / "state").choose("story") == MANIFEST
    assert RunStore(tmp_path / "state").choose(MANIFEST.run[:8]) == MANIFEST
    with pytest.raises(CheckpointError, match="there is no checkpoint of a run 'x'"):
        RunStore(tmp_path / "state").choose("x")


@pytest.mark.heavy
def test_another_process_is_named_and_its_end_frees_the_folder(tmp_path: Path) -> None:
    script = (
        "import sys, json, msgspec; from pathlib import Path; from p2pdiloco.node.run_folder import hold\n"
        "from p2pdiloco.protocol.manifest import Manifest\n"
        "manifest = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=Manifest)\n"
        "with hold(Path(sys.argv[1]), manifest): print('held', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "state"), MANIFEST.encode().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUseError, match=rf"process {other.pid}: stop that one \(kill {other.pid}\)"):  # noqa: SIM117
            with hold(tmp_path / "state", MANIFEST):
                pass
    finally:
        other.kill()
        other.communicate()
    with hold(tmp_path / "state", MANIFEST) as folder:
        assert json.loads((folder / "lock").read_text()) == os.getpid()
    assert RunId(folder.name) == MANIFEST.run[:12]


def test_of_an_unfinished_and_a_finished_run_the_unfinished_one_goes_on(tmp_path: Path) -> None:
    with_checkpoint(tmp_path / "state", STEPS // 4)
    other = msgspec.structs.replace(MANIFEST, founder=Identity.ephemeral().peer_id)
    with_checkpoint(tmp_path / "state", 2, other)
    assert RunStore(tmp_path / "state").founded_from(MANIFEST.config) == other


def test_what_a_join_had_downloaded_does_not_stay_beside_a_checkpoint(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path / "state", 3)
    (folder / "incoming").mkdir()
    (folder / "incoming" / "shard-00000000.state").write_bytes(b"as large as a shard")
    assert load_versions(tmp_path / "state") == [3, 0]
    assert not (folder / "incoming").exists()
