"""``p2pdiloco export`` and ``generate``: from a state folder, or by a run's name."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

import p2pdiloco
from p2pdiloco.cli.main import main
from p2pdiloco.node.results import farewell, finished_message
from p2pdiloco.node.run_creation import make_manifest, version_zero
from p2pdiloco.peer.checkpoint import save
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Manifest, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training.export import ABOUT
from p2pdiloco.training.models import build_model
from p2pdiloco.training.parameters import embedding_names, trainable
from p2pdiloco.transport.identity import KEY_FILE
from p2pdiloco.wire.control_messages import PeerStatus

pytestmark = pytest.mark.usefixtures("own_logging")
SMALL = ModelConfig(width=16, depth=1, heads=2, context=8)


def leave(state: Path, name: str, seed: int = 0) -> Manifest:
    """A peer's folder with version 0 of a run."""
    model = build_model(SMALL, seed)
    embeddings, parameters = embedding_names(model), trainable(model)
    named = [(tensor, p.shape, tensor in embeddings) for tensor, p in parameters]
    run = RunConfig(name=name, model=SMALL, seed=seed, schedule=ScheduleConfig(fragments=1))
    manifest, theta, momentum = make_manifest(run, PeerId("founder"), named, parameters)
    initial = version_zero(manifest, theta, momentum)
    save(folder_of(state, manifest.run) / "checkpoint", manifest, initial.shards, theta, momentum, keep=2)
    return manifest


def ended(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_run_is_exported_by_its_folder_and_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    manifest, _ = leave(state, "story"), leave(state, "other")
    for source in (folder_of(state, manifest.run), "story", manifest.run[:8]):
        status, said, _ = ended(capsys, "export", source, "--state", state, "--out", out)
        assert status == 0
        assert f"{out}: run story at step 0, 0 tokens merged (README.md, config.json" in said
        assert f"AutoModelForCausalLM.from_pretrained('{out}')" in said
    status, said, _ = ended(capsys, "export", state, "--run", "story", "--format", "safetensors", "--out", out)
    assert (status, f"p2pdiloco.load_model('{out}')" in said) == (0, True)
    assert p2pdiloco.load_model(out).context == 8


def test_a_run_is_exported_again_where_its_export_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first export has made a folder of the run's name, which was looked into for the run."""
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "state", "story")
    for _ in range(2):
        status, said, told = ended(capsys, "export", "story", "--state", "state")
        assert (status, told) == (0, "")
        assert said.startswith("story: run story at step 0")


def test_a_run_is_heard_by_its_folder_its_name_and_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    leave(state, "story")
    ended(capsys, "export", "story", "--state", state, "--out", out, "--format", "safetensors")
    how = ("--prompt", "def ", "--tokens", "12", "--seed", "5", "--state", state)
    heard = [ended(capsys, "generate", source, *how) for source in (state, "story", out)]
    assert heard[0] == heard[1] == heard[2]
    assert heard[0][0] == 0
    assert heard[0][1].startswith("def ")
    assert ended(capsys, "generate", out, *how[:4], "--seed", "6") != heard[0]


def test_a_run_of_a_peer_below_the_state_folder_is_found_where_that_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training scripts keep theirs there."""
    state, out = tmp_path / "state", tmp_path / "out"
    theirs = leave(state / "story", "story")
    status, _, said = ended(capsys, "export", "story", "--state", state, "--out", out)
    assert (status, "no run of that name" in said) == (2, True), "what has no identity is no state folder"
    (state / "story" / KEY_FILE).touch()
    status, said, _ = ended(capsys, "export", "story", "--state", state, "--out", out)
    assert (status, f"{out}: run story at step 0" in said) == (0, True)
    assert ended(capsys, "export", theirs.run[:8], "--state", state, "--out", out)[0] == 0
    ours = leave(state, "story", seed=1)
    assert ended(capsys, "export", "story", "--state", state, "--format", "safetensors", "--out", out)[0] == 0
    assert ours.run in (out / ABOUT).read_text()
    leave(state / "other", "other", seed=2)
    (state / "other" / KEY_FILE).touch()
    assert ended(capsys, "export", state, "--run", "other", "--out", out)[0] == 0
    status, _, said = ended(capsys, "export", state, "--run", "stroy")
    assert (status, "--run is one of story" in said) == (2, True)


@pytest.mark.parametrize("command", ["export", "generate"])
def test_what_is_not_there_is_told_with_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    status, _, said = ended(capsys, command, "story", "--state", state)
    assert status == 2
    assert "p2pdiloco fetch ADDR" in said
    leave(state, "story")
    leave(state, "other", seed=1)
    status, _, said = ended(capsys, command, "stroy", "--state", state)
    assert (status, "no run of that name" in said) == (2, True)
    status, _, said = ended(capsys, command, state)
    assert (status, "name one with --run" in said) == (2, True)
    (tmp_path / "empty").mkdir()
    status, _, said = ended(capsys, command, tmp_path / "empty")
    assert (status, "there is no checkpoint" in said) == (2, True)


def test_the_end_tells_path_loss_tokens_and_the_next_command() -> None:
    status = PeerStatus(
        run="a" * 40,
        name="story",
        peer="me",
        phase="finished",
        step=360,
        total_steps=360,
        known=1,
        live=1,
        participating=0,
        weight_averaged=2,
        version_min=30,
        version_max=30,
        heads_mark=1,
        tokens_trained=250_000,
        tokens_merged=1_000_000,
        tokens_per_second=0.0,
        train_loss=None,
        held_out_loss=1.5764,
        held_out_step=360,
        bytes_up=0,
        bytes_down=0,
        blocked_s=0.0,
    )
    said = str(farewell(status, Path("/state/aaaa")))
    assert said.startswith("run story is complete: ")
    for told in (
        "step 360",
        "1.576 nats",
        "1,000,000 tokens",
        "/state/aaaa\n",
        "p2pdiloco generate /state/aaaa",
    ):
        assert told in said
    assert "p2pdiloco export /state/aaaa --out story" in said
    of_scripts = str(farewell(status, Path("/state/aaaa"), is_scripts=True))
    assert "generate" not in of_scripts, "it refuses them"
    assert "p2pdiloco export /state/aaaa --out story" in of_scripts
    early = [
        str(farewell(msgspec.structs.replace(status, step=359), Path("/x"), is_scripts=is_scripts))
        for is_scripts in (False, True)
    ]
    assert early[0].startswith("run story as it is now: step 359, ")
    assert "prolong" not in early[0]
    assert ["same command again" in early[0], "same script again" in early[1]] == [True, True]
    assert "p2pdiloco prolong /state/aaaa --steps N" in said
    assert "p2pdiloco prolong /x --tokens N" in str(farewell(status, Path("/x"), has_budget=True))


def test_a_finished_run_says_where_its_model_is_and_how_to_serve_it(tmp_path: Path) -> None:
    said = finished_message(leave(tmp_path, "story"), Path("/state/aaaa"))
    for told in (
        "has finished all 1000 steps",
        "p2pdiloco generate /state/aaaa",
        "resume /state/aaaa --stay-s 3600",
        "prolong /state/aaaa --steps N",
    ):
        assert told in said
    manifest = leave(tmp_path, "script")
    config = msgspec.structs.replace(manifest.config, model=ModelConfig(kind="external"))
    said = finished_message(msgspec.structs.replace(manifest, config=config), Path("/state/aaaa"))
    assert ("generate" in said, "p2pdiloco export /state/aaaa" in said) == (False, True)


def test_the_loss_of_the_newest_version_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, "story")
    status, said, _ = ended(capsys, "evaluate", "story", "--state", tmp_path, "--samples", "8")
    told = re.search(r"held-out loss (\d\.\d{4}) nats a token \(8 windows", said)
    assert status == 0
    assert told is not None
    assert float(told[1]) == pytest.approx(math.log(256), abs=0.5), "that of an untrained model"
