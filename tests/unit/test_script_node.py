"""The node of a training script: started again within bounds, whatever it dies of; found by its welcome."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from actors import make_manifest

import p2pdiloco
from p2pdiloco import script_node
from p2pdiloco.access.certificates import NEVER, NO_CAP, Role
from p2pdiloco.access.invite_code import Invite, encode_invite
from p2pdiloco.cli.main import _parse
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.script_node import LEAVE_S, RESTARTS, STABLE_S, NodeRequest, ScriptNode, ScriptNodeError, leaving_s
from p2pdiloco.swarm.credentials import Credentials, make_invite
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training import founding_file, script_arguments
from p2pdiloco.training.dataset_files import cached
from p2pdiloco.training.node_reconnect import NodeConnection, NodeListener, find_learner, learner_socket_name
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import status_pipe
from p2pdiloco.util.files import state_home
from p2pdiloco.util.status_pipe import Exited
from p2pdiloco.wire import learner_ipc

RUN = RunId("0" * 40)


class Clock:
    """Time as a number, where the companion looks at it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0.001)  # for the process


class Dying(ScriptNode):
    """Its nodes die at once."""

    def __init__(self, folder: Path, peers: Sequence[str] = ()) -> None:
        super().__init__(folder, NodeRequest("story", tuple(peers), None if peers else folder / "foundation", ()))
        self.started: list[list[str]] = []
        self.status = 1

    def _start(self, arguments: Sequence[str]) -> None:
        self.started.append(list(arguments))
        self._process = psutil.Popen(["sh", "-c", f"exit {self.status}"])
        self._process.wait()
        self._is_child, self._began = True, script_node.time.monotonic()
        self.log_path.touch()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(script_node, "time", clock)
    return clock


def starts(node: Dying, clock: Clock, seconds: float) -> list[float]:
    """When it was started again, while the script looks for it for so long."""
    seen, began = [], clock.now
    while clock.now < began + seconds:
        count = len(node.started)
        if not node.restart_if_ended(RUN):
            break
        seen += [clock.now - began] * (len(node.started) - count)
        clock.now += 0.25
    return seen


def test_a_node_that_keeps_dying_is_started_with_growing_pauses_and_then_no_more(tmp_path: Path, clock: Clock) -> None:
    node = Dying(tmp_path)
    node._start([])
    seen = starts(node, clock, 1000.0)
    assert len(seen) == RESTARTS
    assert seen[0] == 0.0, "at once"
    pauses = [b - a for a, b in itertools.pairwise(seen)]
    assert pauses == pytest.approx([4.25, 8.25, 16.25, 32.25])
    assert not node.restart_if_ended(RUN)
    node.release_folder()


def test_after_a_long_life_earlier_deaths_are_forgotten(tmp_path: Path, clock: Clock) -> None:
    node = Dying(tmp_path)
    node._start([])
    assert len(starts(node, clock, 0.25)) == 1
    clock.now += STABLE_S
    assert len(starts(node, clock, 1000.0)) == RESTARTS
    node.release_folder()


def test_one_that_is_told_to_end_is_not_started_again(tmp_path: Path, clock: Clock) -> None:
    node = Dying(tmp_path)
    node._start([])
    node.stop(script_node.signal.SIGTERM)
    assert starts(node, clock, 100.0) == []
    node.release_folder()


def test_a_founders_node_founds_again_and_a_joiners_joins_the_same_run(tmp_path: Path, clock: Clock) -> None:
    founder, joiner = Dying(tmp_path / "a"), Dying(tmp_path / "b", ["ADDR"])
    for node in (founder, joiner):
        node._start([])
        assert node.restart_if_ended(RUN)
        node.release_folder()
    assert founder.started[-1] == ["start", str(tmp_path / "a" / "foundation"), "--bootstrap"]
    assert joiner.started[-1] == ["join", "--run", "story"], "it has no state yet"
    assert joiner._environment()["P2PDILOCO_INVITE"] == "ADDR", "which other users of the machine cannot see"


def test_who_finds_nobody_and_has_no_state_is_told_so(tmp_path: Path, clock: Clock) -> None:
    node = Dying(tmp_path, ["ADDR"])
    node.status = script_node.NOBODY_THERE
    with pytest.raises(ScriptNodeError, match="the node ended with status 3"):
        node.connect()
    assert node.started == [["join", "--run", "story"]]
    node.release_folder()


ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"


def has_run(folder: Path, seed: int = 0) -> RunId:
    """The state of a run called story, of which somebody else is the founder."""
    manifest = make_manifest()
    config = msgspec.structs.replace(manifest.config, name="story", seed=seed)
    manifest = msgspec.structs.replace(manifest, config=config)
    place = folder_of(folder, manifest.run) / "checkpoint"
    place.mkdir(parents=True)
    (place / "manifest.msgpack").write_bytes(manifest.encode())
    (place / "state-00000001.json").touch()
    return manifest.run


def test_who_has_the_runs_state_goes_on_though_nobody_answers(tmp_path: Path, clock: Clock) -> None:
    """Before, the bootstrap that had gone was asked for again, and the script ended."""
    run = has_run(tmp_path)
    node = Dying(tmp_path, ["ADDR"])
    node.status = script_node.NOBODY_THERE
    with pytest.raises(ScriptNodeError, match="the node ended with status 3"):
        node.connect()
    resumed = ["resume", str(tmp_path), "--run", run]
    assert node.started == [["join", "--run", "story"], resumed]
    assert node.restart_if_ended(run)
    assert node.started[-1] == resumed
    node.status = 1
    for _ in range(2):
        clock.now += 10.0
        assert node.restart_if_ended(run)
        clock.now += 10.0
        assert node.restart_if_ended(run)
    assert node.started[-1] == [*resumed, "--bootstrap", "ADDR"]
    node.release_folder()


def test_a_folder_with_a_run_that_somebody_else_founded_is_not_founded_anew(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same name: the script was given no initial_peers, since nobody of them was left."""
    run = has_run(tmp_path / "joined")
    node = Dying(tmp_path / "joined")
    with pytest.raises(ScriptNodeError, match="the node ended with status 1"):
        node.connect()
    assert node.started == [["resume", str(tmp_path / "joined"), "--run", run]]
    assert not node.is_founder
    assert "which was founded elsewhere: continuing it" in caplog.text
    node.release_folder()
    assert has_run(tmp_path / "founded") == run
    (tmp_path / "founded" / "foundation").touch()
    founder = Dying(tmp_path / "founded")
    assert founder.is_founder
    founder.release_folder()


def made_invite(run: RunId) -> Invite:
    founder = Credentials(run, b"", Identity.ephemeral())
    return make_invite(founder, bytes(16), role=Role.LEARNER, cap=NO_CAP, not_after=NEVER, addresses=(ADDRESS,))


def test_of_several_runs_of_one_name_the_invites_goes_on(tmp_path: Path, clock: Clock) -> None:
    runs = sorted(has_run(tmp_path, seed) for seed in range(2))
    invites = [encode_invite(made_invite(run)) for run in (*runs, RunId("f" * 40))]
    for number, invite in enumerate(invites):
        node = Dying(tmp_path, [invite])
        node.status = script_node.NOBODY_THERE
        with pytest.raises(ScriptNodeError, match="the node ended with status 3"):
            node.connect()
        resumed = [["resume", str(tmp_path), "--run", runs[number]]] if number < len(runs) else []
        assert node.started == [["join", "--run", "story"], *resumed]
        node.release_folder()
    for _ in range(2):  # the folder is free again
        with pytest.raises(ScriptNodeError, match="has several runs called story"):
            Dying(tmp_path)
    node = Dying(tmp_path, ["ADDR"])
    node.status = script_node.NOBODY_THERE
    with pytest.raises(ScriptNodeError, match="has several runs called story"):
        node.connect()
    assert len(node.started) == 1


def test_who_is_to_join_is_told_that_there_is_nobody(tmp_path: Path, clock: Clock) -> None:
    node = ScriptNode(tmp_path, NodeRequest("story", (), None, ()))
    with pytest.raises(ScriptNodeError, match="found=False, and nobody to join: give initial_peers"):
        node.connect()
    node.release_folder()


def test_a_second_script_is_refused_the_folder(tmp_path: Path) -> None:
    # another process's lock: ours would be given twice (lockf)
    first = psutil.Popen(
        ["python3", "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
         "print('held', flush=True); sys.stdin.read()", str(tmp_path / "script.lock")],
        stdin=-1, stdout=-1,
    )  # fmt: skip
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(ScriptNodeError, match="is in use by another training script"):
        ScriptNode(tmp_path, NodeRequest("story", (), None, ()))
    first.stdin.close()
    first.wait()


@contextlib.contextmanager
def visit(name: str) -> Iterator[socket.socket]:
    """A node that has found its script."""
    memory = os.memfd_create("test")
    connection = find_learner(name, memory)
    assert connection is not None
    try:
        yield connection
    finally:
        connection.close()
        os.close(memory)


def test_a_folder_that_was_moved_while_training_ends_no_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node cannot come back, and the script trains on alone."""
    folder = tmp_path / "state"
    node = Dying(folder)
    node._start([])
    folder.rename(tmp_path / "elsewhere")
    node._start = ScriptNode._start.__get__(node)  # type: ignore[method-assign]
    assert not node.restart_if_ended(RUN)
    assert "the node cannot be restarted" in caplog.text
    assert "its log cannot be read" in node.ending
    node.release_folder()


def test_folders_of_one_path_in_two_containers_have_socket_names_of_their_own(tmp_path: Path) -> None:
    """On the host's network they share the namespace of abstract sockets."""
    folder = tmp_path / "state"
    folder.mkdir()
    first = learner_socket_name(folder)
    assert learner_socket_name(tmp_path / "." / "state") == first
    folder.rename(tmp_path / "other")
    folder.mkdir()
    assert learner_socket_name(folder) != first


def test_a_socket_name_that_is_taken_is_told_so(tmp_path: Path) -> None:
    node = ScriptNode(tmp_path, NodeRequest("story", (), tmp_path / "foundation", ()))
    taken = NodeListener(node.socket_name, 60.0, is_script=True)
    assert taken.open()
    with pytest.raises(ScriptNodeError, match="another process on this machine waits for the node of"):
        node.connect()
    taken.close()
    node.release_folder()


def test_a_script_is_told_the_run_before_it_takes_the_node_however_slowly() -> None:
    name = f"p2pdiloco-test-{os.getpid()}"
    listener = NodeListener(name, 60.0, is_script=True)
    assert listener.open()
    welcome = learner_ipc.welcome(b"manifest" * 100)
    with visit(name) as connection:
        for byte in welcome[:-1]:
            assert listener.poll() is None
            connection.send(bytes([byte]))
        assert listener.poll() is None
        connection.send(welcome[-1:] + learner_ipc.encode(learner_ipc.Pause()))
        found = listener.poll()
    assert isinstance(found, NodeConnection)
    assert found.manifest == b"manifest" * 100
    assert not listener.is_open
    found.dismiss()


def test_a_node_that_leaves_in_its_welcome_is_forgotten_and_the_next_is_heard() -> None:
    name = f"p2pdiloco-test-{os.getpid()}-again"
    listener = NodeListener(name, 60.0, is_script=True)
    assert listener.open()
    with visit(name) as connection:
        connection.send(learner_ipc.welcome(b"first")[:-1])
        assert listener.poll() is None
    assert listener.poll() is None
    with visit(name) as connection:
        connection.send(learner_ipc.welcome(b"second"))
        found = listener.poll()
    assert found is not None
    assert found.manifest == b"second"
    found.dismiss()


def test_a_welcome_that_claims_too_much_is_refused_before_it_is_read() -> None:
    name = f"p2pdiloco-test-{os.getpid()}-large"
    listener = NodeListener(name, 60.0, is_script=True)
    assert listener.open()
    with visit(name) as connection:
        connection.send(b"\xff\xff\xff\xff")
        assert listener.poll() is None
        assert listener._connection is None
    listener.close()


def test_the_node_of_a_large_model_is_waited_for_longer() -> None:
    """Else it is killed while it merges and writes what was trained last (1.1 billion parameters on 24 GB: 140 s)."""
    assert leaving_s(10_000) - LEAVE_S < 1.0
    assert leaving_s(1_100_000_000) > 2 * LEAVE_S
    for options in (("--up", "1mbit", "--leave-s", "600"), ("--leave-s=600",)):
        assert leaving_s(0, options) == LEAVE_S + 600
    for options in (("--leave-s",), ("--leave-s", "long")):
        assert leaving_s(0, options) == LEAVE_S, "the node refuses them"


@pytest.mark.parametrize(("stay_s", "status"), [(30.0, 0), (0.0, -9)])
def test_a_node_that_stays_after_the_end_is_waited_for(tmp_path: Path, stay_s: float, status: int) -> None:
    node = ScriptNode(
        tmp_path, NodeRequest.of("story", "ADDR", None, tmp_path / "foundation", ("--up", "1mbit"), stay_s)
    )
    assert node._request.options == ("--up", "1mbit", *(("--stay-s", "30.0") if stay_s else ()))
    node._process = psutil.Popen(["sleep", "0.5"])
    assert node.wait(0.1) == status


def test_a_folder_that_cannot_be_used_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = torch.nn.Linear(2, 1)
    outer = p2pdiloco.DiLoCo(
        model, torch.optim.SGD(model.parameters()), run="story", tokens_per_step=8, state=tmp_path / "file" / "state"
    )
    for _ in range(2):
        with pytest.raises(p2pdiloco.DiLoCoError, match=r"Not a directory.*: the state folder cannot be used"):
            outer.start()


def test_the_swarms_step_is_at_most_the_runs_last(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    outer = p2pdiloco.DiLoCo(model, torch.optim.SGD(model.parameters()), run="story", tokens_per_step=8, state=tmp_path)
    assert (outer.global_step, outer.total_steps) == (0, 0)
    for step, told in ((59, 59), (61, 60)):
        outer._link = SimpleNamespace(counts=SimpleNamespace(global_step=step), last_step=60)  # type: ignore[assignment]
        assert (outer.global_step, outer.total_steps) == (told, 60)


@pytest.mark.heavy
def test_what_was_wrong_with_an_option_is_told_and_not_where_help_is(tmp_path: Path) -> None:
    """``node_options`` are the user's own words."""
    node = ScriptNode(tmp_path, NodeRequest("story", ("ADDR",), None, ("--upp", "3")))
    with pytest.raises(ScriptNodeError) as told:
        node.connect()
    assert str(told.value) == "the node ended with status 2: there is no option --upp: did you mean --up?"
    assert "see p2pdiloco join --help" in node.log_path.read_text()
    node.release_folder()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    options = {"run": "story", "tokens_per_step": 8, "state": tmp_path, "node_options": ("--upp", "3")}
    with pytest.raises(p2pdiloco.DiLoCoError, match="there is no option --upp"):
        p2pdiloco.DiLoCo(model, optimizer, **options).start()
    assert not (tmp_path / founding_file.NAME).exists(), "nothing is founded"


def test_a_node_that_reports_nothing_ends_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    node = Dying(tmp_path)
    node._start([])
    assert node.ending == "the node ended with status 1: its log is empty"
    node.log_path.write_text("Traceback (most recent call last):\nMemoryError\n\n")
    assert node.ending == "the node ended with status 1: MemoryError"
    node.release_folder()


def test_one_invite_may_be_given_as_a_text(tmp_path: Path) -> None:
    text = encode_invite(made_invite(RunId("f" * 40)))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    address = "/ip4/192.0.2.1/tcp/1"
    for given, peers in ((address, (address,)), ([address], (address,)), (f" {text}\n", (text,)), ([], ()), ((), ())):
        wish = p2pdiloco.DiLoCo(
            model, optimizer, run="story", tokens_per_step=8, initial_peers=given, state=tmp_path
        )._request
        assert wish is not None
        assert (wish.peers, wish.foundation is None) == (peers, bool(peers))
    for bad in (f"{text} junk", text + " " * 500 + "; touch x", f"{text}\njunk", text[:-1], "p2pdiloco"):
        for given in (bad, [bad], [address, bad]):
            with pytest.raises(p2pdiloco.DiLoCoError, match=r"initial_peers: .*copy it again"):
                p2pdiloco.DiLoCo(
                    model, optimizer, run="story", tokens_per_step=8, initial_peers=given, state=tmp_path / "new"
                )
    assert not (tmp_path / "new").exists()


def test_a_user_without_a_home_folder_is_told_where_the_state_is_unless_it_names_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in containers, with a user id that has no name."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert _parse(["members", "--state", "here"]).state == Path("here")
    assert not caplog.records
    assert _parse(["members"]).state == tmp_path / ".local/state/p2pdiloco"
    (told,) = caplog.messages
    assert f"below {tmp_path}. Set HOME, or name a state folder (--state" in told
    assert cached("data", lambda _: None).parent == tmp_path / ".cache/p2pdiloco/tokens"


def test_a_state_folder_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(p2pdiloco.DiLoCoError, match=r"caf.udce9' is not valid UTF-8.*choose another folder"):
        script_arguments.state_folder(tmp_path / os.fsdecode(b"caf\xe9"), "story")


@pytest.mark.parametrize("home", ["", "elsewhere"])
def test_commands_and_scripts_keep_their_state_in_one_place(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / home) if home else "")
    expected = tmp_path / (home or ".local/state") / "p2pdiloco"
    assert state_home() == expected
    assert _parse(["members"]).state == expected
    model = torch.nn.Linear(2, 1)
    assert (
        p2pdiloco.DiLoCo(model, torch.optim.SGD(model.parameters()), run="story", tokens_per_step=8)._state
        == expected / "story"
    )


def test_a_script_that_comes_after_the_end_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its loop makes a step at least before it looks."""
    model = torch.nn.Linear(2, 1)
    outer = p2pdiloco.DiLoCo(model, torch.optim.SGD(model.parameters()), run="story", tokens_per_step=8, state=tmp_path)
    last = 60
    for step, is_training, is_told in ((last - 1, True, False), (last - 1, False, False), (last, False, True)):
        caplog.clear()
        outer._link = SimpleNamespace(is_training=is_training, counts=SimpleNamespace(global_step=step))  # type: ignore[assignment]
        outer._tell_end("story", last, tmp_path)
        assert [f"run story is complete at step {last}:" in record.message for record in caplog.records] == [
            True
        ] * is_told
        told = f"p2pdiloco prolong {tmp_path} --steps N", "choose another run="
        assert all(remedy in record.message for record in caplog.records for remedy in told)


def test_a_nodes_last_words_steer_no_terminal(tmp_path: Path) -> None:
    """Other peers' words may be in them."""
    words = "\x1b]0;mine\x07\x9b2J\u202eno\u2028to join from another machine:  x"
    node = Dying(tmp_path)
    node._start([])
    node.log_path.write_text(f"first\n{words}\n")
    assert node.ending.isprintable()
    assert "no to join" in node.ending, "it is one line"
    with status_pipe.opened() as (node._reports, fd):
        os.write(fd, msgspec.json.encode(Exited(1, words)) + b"\n")
    assert node.ending.isprintable()
    assert "no to join" in node.ending
    node.release_folder()
