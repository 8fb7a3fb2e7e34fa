"""What comes out of a run: served after its end, fetched, exported, heard."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import run
from swarm import PEER, START_S, ended, learners_held, log_lines, printed, report_of, swarm_in, write_config
from waiting import wait_until

from p2pdiloco.peer.checkpoint import load
from p2pdiloco.util.status_pipe import Invited

SERVED = "serving the final model for"


def command(*words: object) -> str:
    done = run(*words, timeout_s=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_who_comes_after_the_end_gets_the_model(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=60)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address, "--stay-s", "300")
        with learners_held(ann):
            bob = swarm.join("B", address)
            wait_until(lambda: printed(bob, "trains on"), START_S, "B")
        assert ended(bob) == 0
        wait_until(lambda: printed(ann, SERVED), START_S, "the end of the run")
        told = log_lines(ann)
        run = ann.run_folder()
        assert f"p2pdiloco generate {run}" in "\n".join(told)

        state = tmp_path / "later"
        said = command("fetch", address, "--state", state, *PEER)
        assert "run tiny is complete: step 60" in said
        folder = next(state.glob("*/report.json")).parent
        assert json.loads((folder / "report.json").read_text())["digests"] == report_of(ann)["digests"]
        heard = command("generate", "tiny", "--state", state, "--prompt", "swarm", "--tokens", "20")
        assert heard == command("generate", run, "--prompt", "swarm", "--tokens", "20")
        assert heard.startswith("swarm")
        found = load(folder / "checkpoint")
        assert found is not None
        command("export", folder, "--out", tmp_path / "model")
        measured = command("evaluate", run, "--data", tmp_path / "corpus", "--samples", "64")
        assert measured == command("evaluate", folder, "--data", tmp_path / "corpus", "--samples", "64")
        if find_spec("transformers"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
            assert model.num_parameters() == sum(t.elements for t in found.manifest.tensors)

        late = swarm.join("C", address)  # whoever wants to train finds that nothing is left to do
        assert ended(late) == 0, log_lines(late)
        assert report_of(late)["digests"] == report_of(ann)["digests"]
        assert ann.is_running


def fetched(invite: str, state: Path) -> list[str]:
    """What ``p2pdiloco fetch`` has got, as digests."""
    assert "run tiny is complete" in command("fetch", invite, "--state", state, *PEER)
    return list(json.loads(next(state.glob("*/report.json")).read_text())["digests"])


@pytest.mark.timeout(300)
def test_a_private_runs_model_is_fetched_by_invite_and_served_again_later(tmp_path: Path) -> None:
    """From the founder that stays; then, when everybody is gone, from its folder, by whoever resumes it."""
    config = write_config(tmp_path, inner_steps=40, access="invite")
    with swarm_in(tmp_path) as swarm:
        ann = swarm.launch("A", ["start", str(config)], "--stay-s", "300")
        invite = ann.wait_for(Invited, START_S).invite
        wait_until(lambda: printed(ann, SERVED), START_S, "the end of the run")
        digests = report_of(ann)["digests"]
        assert fetched(invite, tmp_path / "first") == digests
        ann.process.terminate()
        assert ended(ann) == 0

        gone = run("fetch", invite, "--state", tmp_path / "none", *PEER, timeout_s=START_S)
        assert (gone.returncode, "Traceback" in gone.stderr) == (3, False), "nobody is there, which it says"
        again = swarm.launch("A", ["resume", str(ann.folder)], "--stay-s", "300")
        invite = again.wait_for(Invited, START_S).invite
        wait_until(lambda: printed(again, SERVED), START_S, "somebody who serves")
        assert fetched(invite, tmp_path / "second") == digests
        assert again.is_running
        again.process.terminate()
        assert ended(again) == 0
        assert swarm.launch("A", ["resume", str(ann.folder)], "--stay-s", "0")
        assert ended(swarm["A"]) == 0
        assert printed(swarm["A"], "p2pdiloco generate"), "what to do with it"
