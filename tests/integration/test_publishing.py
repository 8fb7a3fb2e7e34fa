"""A follower publishes the model that two peers train (``join --follow --publish``)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from swarm import START_S, ended, learners_held, log_lines, report_of, swarm_in, until, write_config
from test_node_publication import contents, publications
from waiting import wait_until

from p2pdiloco.cli.main import main
from p2pdiloco.node.publication import LATEST, latest
from p2pdiloco.peer.checkpoint import indices, stem
from p2pdiloco.protocol.manifest import MANIFEST
from p2pdiloco.training.model_card import CARD

pytestmark = pytest.mark.usefixtures("own_logging")


def published_from(run_folder: Path, folder: Path) -> set[str]:
    """Return the publications that are what ``export`` writes from a checkpoint. Two checkpoints may be of one
    version."""
    places, compared = run_folder / "checkpoint", set[str]()
    alone = folder.parent / "alone"
    for number, _ in indices(places):
        shutil.rmtree(alone, ignore_errors=True)
        (alone / "checkpoint").mkdir(parents=True)
        for name in (f"{stem(number)}.json", f"{stem(number)}.safetensors", MANIFEST):
            os.link(places / name, alone / "checkpoint" / name)
        again = folder.parent / f"again-{number}"
        assert main(["export", str(alone), "--out", str(again)]) == 0
        written = contents(again)
        # The card also tells what the follower knew at that time, as when the run ends.
        found = [
            name for name in publications(folder) if _without_card(contents(folder / name)) == _without_card(written)
        ]
        assert len(found) <= 1
        compared.update(found)
    return compared


def _without_card(files: dict[str, object]) -> dict[str, object]:
    return {name: content for name, content in files.items() if name != CARD}


@pytest.mark.timeout(300)
def test_a_follower_publishes_what_export_writes_until_the_end(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=150)
    folder, told = tmp_path / "published", tmp_path / "told"
    script = tmp_path / "reload.py"
    script.write_text(f"import sys; print(sys.argv[1], file=open({str(told)!r}, 'a'))")
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        with learners_held(ann):
            bob = swarm.join("B", address)
            carol = swarm.join(
                *("C", address, "--follow", "--publish", str(folder), "--publish-s", "1", "--publish-keep", "1000"),
                *("--keep-checkpoints", "1000", "--on-publish", f"{sys.executable} {script}"),
            )
            seldom = tmp_path / "seldom"
            dave = swarm.join("E", address, "--follow", "--publish", str(seldom), "--publish-s", "3600")
            for place in (folder, seldom):
                wait_until(lambda place=place: latest(place) is not None, START_S, "version 0")
            until(bob, lambda: bob.view.live >= 2, START_S, "all of them")
        second = swarm.join("D", address, "--follow", "--publish", str(folder))
        assert ended(second) == 2
        assert "publishes in" in "\n".join(log_lines(second))
        assert [ended(one) for one in (ann, bob, carol, dave)] == [0, 0, 0, 0]
    names = publications(folder)
    assert len(names) >= 3, log_lines(carol)
    assert published_from(carol.run_folder(), folder) == set(names)
    newest = latest(folder)
    assert newest is not None
    assert newest == latest(seldom), "the run's end is published, however seldom"
    assert int(newest.split("-")[1]) == 150
    assert report_of(carol)["digests"] == report_of(ann)["digests"]
    assert main(["export", str(ann.run_folder()), "--out", str(tmp_path / "of-ann")]) == 0
    assert _without_card(contents(tmp_path / "of-ann")) == _without_card(contents(folder / LATEST))
    reloaded = told.read_text().splitlines()
    assert sorted(reloaded) == [str(folder / name) for name in names], "the command ran once after each"
    assert reloaded[-1] == str(folder / newest)
