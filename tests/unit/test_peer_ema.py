"""A running average of the model: what it is, that it lies on the disk, and that nobody else's state depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from actors import FOUNDER, genesis
from torch import Tensor
from troupe import Member, Stage, act

from p2pdiloco.cli.main import _parse
from p2pdiloco.cli.peer_options import peer_options
from p2pdiloco.peer.checkpoint import AVERAGE, load
from p2pdiloco.peer.ema import POWER, RunningAverage, span, weight
from p2pdiloco.peer.options import MachineOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.ids import RunId, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util.files import LOCAL

AVERAGING = MachineOptions(keeps_average=True)


def expected(seen: Iterator[Tensor]) -> Tensor:
    """By the definition: look k counts (POWER + 1) / (k + POWER)."""
    found = torch.zeros(())
    for k, theta in enumerate(seen, start=1):
        share = (POWER + 1) / (k + POWER)
        found = (1 - share) * found + share * theta
    return found


def of(member: Member) -> RunningAverage:
    assert member.peer.average is not None
    return member.peer.average


def test_looks_count_by_the_part_of_the_run_that_they_are_of() -> None:
    """The last k / (POWER + 1) of k looks have about two thirds of the weight, whatever k is."""
    for looks in (170, 1700):
        weights = [weight(k) for k in range(1, looks + 1)]
        for k, share in enumerate(weights):
            weights[:k] = [w * (1.0 - share) for w in weights[:k]]
        assert sum(weights) == pytest.approx(1.0)
        assert 0.6 < sum(weights[-span(looks) :]) < 0.7
    assert weight(1) == 1.0, "the first is the average"


def test_a_follower_averages_every_version_that_it_takes(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(has_learner=False, machine=AVERAGING)
            seen = [bob.state.theta.clone()]
            for _ in range(5):
                await stage.train(ann, *[1.0] * 4)
                seen.append(bob.state.theta.clone())
            assert bob.versions == ann.versions == [5, 5]
            assert of(bob).looks == [6, 6]
            assert torch.allclose(of(bob).theta, expected(iter(seen)))
            assert not torch.equal(of(bob).theta, bob.state.theta)
            assert torch.equal(bob.state.theta, ann.state.theta)
            assert ann.peer.average is None

    act(story)


def test_an_average_goes_on_in_the_next_life_and_a_spoilt_one_begins_anew(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(machine=AVERAGING)
            await stage.train(ann, *[1.0] * 8)
            await stage.wait(61.0)
            path, before, looks = tmp_path / "ann" / "checkpoint" / AVERAGE, of(ann).theta.clone(), of(ann).looks
            stage.kill(ann)
            found = load(path.parent)
            assert found is not None
            for is_spoilt in (False, True):
                if is_spoilt:
                    data = bytearray(path.read_bytes())
                    data[5] ^= 1
                    path.write_bytes(data)
                state = InitialState(found.shards, found.theta.clone(), found.momentum.clone())
                again = await stage.add("ann", state, identity=FOUNDER, machine=AVERAGING)
                assert of(again).looks == ([1, 1] if is_spoilt else looks)
                assert torch.equal(of(again).theta, found.theta if is_spoilt else before)
                stage.kill(again)

    act(story)


def test_a_newcomers_average_begins_with_what_it_fetched(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 8)
            bob = await stage.add("bob", has_learner=False, machine=AVERAGING, weight=0.0)
            await stage.wait(3.0)
            assert bob.versions == ann.versions
            assert of(bob).looks == [1, 1]
            assert torch.equal(of(bob).theta, ann.state.theta)

    act(story)


def test_what_is_of_another_run_or_half_there_is_not_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.add("ann", genesis(stage.manifest), identity=FOUNDER, machine=AVERAGING)
            layout, folder = Layout.of(stage.manifest), tmp_path / "somewhere"
            await of(ann).save(folder, ann.host)
            other = RunningAverage(RunId("other"), layout)
            with pytest.raises(ValueError, match="another run"):
                other.load(folder, LOCAL)
            assert other.looks == [0, 0]
            (folder / AVERAGE).write_bytes((folder / AVERAGE).read_bytes()[:100])
            with pytest.raises(ValueError, match=r"."):
                of(ann).load(folder, LOCAL)
            unseen = RunningAverage(stage.manifest.run, layout)
            unseen.look(ShardId(0), torch.ones(layout.shards[0].elements))
            await unseen.save(tmp_path / "nowhere", ann.host)
            assert not (tmp_path / "nowhere").exists(), "one shard was never seen"

    act(story)


@pytest.mark.parametrize(
    ("words", "keeps"), [("", False), ("--average", True), ("--follow", True), ("--follow --no-average", False)]
)
def test_a_follower_keeps_one_unless_it_is_told_not_to(words: str, keeps: bool) -> None:
    arguments = _parse(["join", "ADDR", *words.split()])
    assert peer_options(arguments, Path("state")).machine.keeps_average is keeps
