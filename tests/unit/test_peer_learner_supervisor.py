"""A learner's lives as its peer sees them: a real link, a stage around, and deaths when the test says so."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from actors import genesis
from troupe import Member, Stage, act

from p2pdiloco.peer.learner_supervisor import HUNG_S, HUNG_STEPS, MISUSED, RESTARTS, STABLE_S
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.util.logs import short
from p2pdiloco.wire import learner_ipc


def test_what_the_learner_could_not_take_at_once_it_takes_later(tmp_path: Path) -> None:
    """Several versions come during one long step of its own: each is told of when the one before is taken."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            bob.learner.step(3.0)
            for _ in range(3):
                await stage.train(ann, *[1.0] * 4)
                await stage.wait(5.0)
            assert min(bob.versions) >= 2
            await stage.rest(bob)
            assert bob.machine.core.learner is not None
            unmerged = torch.cat([torch.full((64,), 3.0 * (not m.steps)) for m in bob.machine.core.learner.marks])
            assert torch.equal(bob.learner.flat(), bob.state.theta + unmerged)

    act(story)


def test_a_learner_that_dies_is_started_again_from_the_global_parameters(tmp_path: Path) -> None:
    """Its unmerged progress is gone, and nobody waits for it meanwhile."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 5)
            first = ann.machine.core.learner
            assert first is not None
            assert first.tokens == 50
            ann.learner.die()
            await stage.settle()
            assert ann.machine.core.learner is None
            assert ann.machine.core.unmerged_tokens() == 0
            await stage.wait(1.5)
            assert len(ann.lives) == 2
            await stage.ready(ann)
            second = ann.machine.core.learner
            assert second is not None
            assert second.id != first.id
            assert second.tokens == 0
            assert torch.equal(ann.learner.flat(), ann.state.theta)
            versions = ann.versions
            await stage.train(ann, *[1.0] * 8)
            assert min(ann.versions) > max(versions)

    act(story)


def test_a_learner_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """Also where the machine has no process left for longer than one try."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            start, left = ann.host.start_learner, [2]

            @contextlib.asynccontextmanager
            async def start_later(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
                if left[0]:
                    left[0] -= 1
                    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
                async with start(*arguments, **options) as life:
                    yield life

            ann.host.start_learner = start_later  # type: ignore[method-assign]
            ann.learner.die()
            await stage.wait(3.5)
            assert "temporarily unavailable" in ann.peer.supervision.absence
            await stage.wait(3.0)
            assert len(ann.lives) == 2
            await stage.ready(ann)
            assert not ann.peer.supervision.absence
            assert not ann.peer.is_over

    act(story)


def test_what_was_queued_for_a_dead_learner_does_not_move_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            for _ in range(3):
                await stage.train(ann, *[1.0] * 4)
            bob.learner.die()
            await stage.wait(1.5)
            await stage.ready(bob)
            await stage.rest(bob)
            assert torch.equal(bob.learner.flat(), bob.state.theta)

    act(story)


def test_a_learner_that_starts_during_a_pause_rests_until_it_is_over(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.peer.supervision.rest("on battery")
            await stage.rest(ann)
            assert ann.learner.link.is_resting
            ann.learner.die()
            await stage.wait(1.5)
            assert len(ann.lives) == 2
            await stage.ready(ann)
            await stage.rest(ann)
            assert ann.learner.link.is_resting
            ann.peer.supervision.rest("")
            await stage.rest(ann)
            assert not ann.learner.link.is_resting

    act(story)


def silent(member: Member, seconds: float) -> None:
    """Its learner says nothing for so long."""
    for _ in range(round(seconds)):
        member.peer.supervision.look_for_hang(1.0)


def test_a_learner_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0)
            silent(ann, HUNG_S - 1)
            assert not ann.peer.trouble
            silent(ann, 1)
            assert ann.peer.trouble.startswith("the learner hangs (no step for 180 s, where one takes 0.5 s)")
            silent(ann, 1)
            await stage.wait(1.5)
            assert len(ann.lives) == 2
            assert not ann.peer.trouble
            assert [event for event in ann.metrics.events() if event in ("learner-hung", "learner-lost")] == [
                "learner-hung",
                "learner-lost",
            ]
            await stage.ready(ann)
            await stage.train(ann, 1.0)
            silent(ann, HUNG_S)
            await stage.wait(3.0)
            assert len(ann.lives) == 3

    act(story)


@pytest.mark.parametrize("what", ["first step", "at the end", "rest", "evaluation", "slow steps", "slow before"])
def test_a_learner_that_may_be_silent_for_long_is_not_ended(tmp_path: Path, what: str) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            if what != "first step":
                seconds = {"slow steps": 60.0, "evaluation": 5.0}.get(what, 0.5)
                ann.learner._heard(
                    learner_ipc.Progress(
                        steps=1, tokens=10, loss=None, step_time_s=seconds, overhead_s=0.0, blocked_s=0.0
                    )
                )
            limit_s = 1000 * HUNG_S
            match what:
                case "at the end":
                    ann.learner._heard(learner_ipc.Paused(steps=1, tokens=10, step=1))
                case "rest":
                    ann.peer.supervision.rest("on battery")
                case "evaluation":
                    ann.peer.supervision.send_effect(ef.Evaluate(version=1))
                    inner, samples = stage.manifest.config.inner, stage.manifest.config.evaluation.samples
                    limit_s = HUNG_STEPS * 5.0 * (1 + samples / inner.batch)
                    assert limit_s > 2 * HUNG_S
                case "slow steps":
                    limit_s = HUNG_STEPS * 60.0
                case "slow before":
                    silent(ann, HUNG_S - 1)
                    ann.learner._heard(learner_ipc.Shifted(shards=()))
                    limit_s = 2 * (HUNG_S - 1)
                case _:
                    pass
            silent(ann, limit_s - 1)
            await stage.settle()
            assert not ann.peer.trouble
            silent(ann, 2)
            assert bool(ann.peer.trouble) is (limit_s < 1000 * HUNG_S), "but not for ever"

    act(story)


def test_a_script_that_makes_no_steps_is_not_ended_and_its_user_is_told_what_to_do(tmp_path: Path) -> None:
    """It may be busy with something else, or be a notebook between two cells."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(script="somewhere")
            await stage.train(ann, 1.0)
            silent(ann, 3 * HUNG_S)
            assert ann.peer.trouble.startswith("the training script makes no steps (no step for 180 s")
            assert "kill -9" in ann.peer.trouble
            assert ann.metrics.events().count("learner-hung") == 1
            assert not ann.learner.is_over
            await stage.train(ann, 1.0)
            assert not ann.peer.trouble

    act(story)


@pytest.mark.parametrize("first_life_s", [0.0, STABLE_S])
def test_too_many_lives_lost_in_a_row_end_the_peer(tmp_path: Path, first_life_s: float) -> None:
    """However long the peer itself has lived."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.wait(first_life_s)
            for life in range(1, RESTARTS + 1):
                ann.learner.die()
                await stage.wait(2.0**life)
                assert len(ann.lives) == life + 1
                await stage.ready(ann)
            assert ann.ending is None
            ann.learner.die()
            await stage.wait(60.0)
            assert len(ann.lives) == RESTARTS + 1
            assert ann.ending is not None
            assert (ann.ending.status, ann.ending.reason) == (1, "the learner cannot go on: it was killed")

    act(story)


def test_a_long_life_proves_the_learner_sound(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            for life in range(1, 2 * RESTARTS):
                await stage.wait(601.0)
                ann.learner.die()
                await stage.wait(1.5)
                assert len(ann.lives) == life + 1, "after a second, as after a first crash"
                await stage.ready(ann)
            assert ann.ending is None

    act(story)


def test_a_learner_that_the_user_must_repair_is_not_started_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.learner.die(MISUSED)
            await stage.wait(60.0)
            assert len(ann.lives) == 1
            assert ann.ending is not None
            assert ann.ending.status == MISUSED == 2, "as the learner's program ends"

    act(story)


def test_the_learner_hears_of_the_swarms_step(tmp_path: Path) -> None:
    """It is the slower one; its own step counts from where the others are."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside()
            await stage.train(ann, *[1.0] * 8)
            await stage.rest(bob)
            assert bob.learner.link.counts.global_step == bob.machine.core.step == 8
            await stage.train(bob, 1.0)
            assert bob.machine.core.step == 8, "a step that was begun before the others went on (T1c)"
            await stage.train(bob, 1.0)
            assert bob.machine.core.step == 9

    act(story)


def test_a_peer_whose_connection_ends_is_forgotten_and_said_to_be_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.add("bob", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            assert ann.machine.core.membership.live == (bob.id,)
            stage.disconnect(ann, bob)
            assert ann.machine.core.membership.live == ()
            assert bob.id not in ann.machine.core.membership.peers
            assert ann.events[-1] == ev.PeerDisconnected(bob.id, "cut")

    act(story)


def test_the_learner_saves_its_own_state_by_the_clock(tmp_path: Path) -> None:
    """And is told where."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(checkpoint_s=60.0)
            for saves in (1, 2):
                await stage.wait(61.0)
                await stage.rest(ann)
                assert ann.learner.saves == saves
            given = dict(zip(ann.arguments[::2], ann.arguments[1::2], strict=True))
            assert given["--inner-state"] == str(tmp_path / "ann" / "checkpoint" / "learner.safetensors")
            assert given["--manifest"] == str(tmp_path / "ann" / "manifest.msgpack")
            assert given["--incarnation"] == ann.peer.supervision.learner
            assert given["--reattach-s"] == "60.0"

    act(story)


def test_a_learner_of_the_last_life_is_said_to_be_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            assert "learner-adopted" not in ann.metrics.events()
            ann.is_learner_waiting = True
            ann.learner.die()
            await stage.wait(1.5)
            assert ann.metrics.events().count("learner-adopted") == 1

    act(story)


def test_a_snapshot_counts_when_it_was_taken_in_full(tmp_path: Path) -> None:
    """What the machine hears of a snapshot it hears after the node has brought it up to date."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            kinds = [type(event) for event in ann.events]
            assert kinds.index(ev.Snapshotted) < kinds.index(ev.Encoded)
            assert not any(isinstance(event, ev.Failed) for event in ann.events)

    act(story)


def test_a_learner_that_stops_to_be_finite_says_what_was_merged_last_and_from_whom(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            supervision = ann.peer.supervision
            ann.learner._heard(learner_ipc.Unable(reason="its loss is nan"))
            assert supervision.trouble == "its loss is nan", "nothing was merged"
            ann.learner._heard(learner_ipc.Unable(reason=""))
            assert supervision.trouble == ""
            await stage.train(ann, *[1.0] * 5)
            version = max(ann.versions)
            assert version > 0
            ann.learner._heard(learner_ipc.Unable(reason="its loss is nan"))
            me = short(ann.id)
            assert f"last merge: version {version} of shard" in supervision.trouble
            assert supervision.trouble.endswith(f"by {me}, contributors {me}")
            told = supervision.trouble
            await stage.train(ann, *[1.0] * 5)
            ann.learner._heard(learner_ipc.Unable(reason="its loss is still nan"))
            assert supervision.trouble == told, "what came later is no cause"

    act(story)


def test_what_was_to_be_given_to_a_learner_that_died_is_not_given_to_the_next(tmp_path: Path) -> None:
    """Jobs may wait for longer than a life; the next would train before it has been given everything."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.learner.die()
            await stage.settle()
            ann.held["tensors"] = []
            await stage.wait(1.5)
            ann.learner.die()
            await stage.wait(3.0)
            ward, told = ann.peer.supervision.child, list[learner_ipc.FromNode]()
            assert ward is not None
            assert ward.is_given
            assert ward.process is not None
            with patch.object(ward.process, "send", told.append):
                await ann.release("tensors")
            given = [type(message) for message in told if isinstance(message, learner_ipc.Shift | learner_ipc.Begin)]
            assert given == [learner_ipc.Shift, learner_ipc.Begin]

    act(story)
