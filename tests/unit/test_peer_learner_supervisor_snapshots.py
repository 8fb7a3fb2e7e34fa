"""How much of a learner's model is copied at once: whole peers on a stage, where every fragment has a round."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from troupe import Member, Stage, act

from p2pdiloco.peer import learner_supervisor, learner_updates
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev

FRAGMENTS = 8
PAGE = 1024
"""Parameters in one."""
AT_ONCE = 2
"""Fragments that are copied at once."""


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model had billions."""
    monkeypatch.setattr(learner_supervisor, "KEPT", 0)
    monkeypatch.setattr(learner_updates, "KEPT", 0)


def fragments_held(member: Member) -> int:
    """Of shift and snapshot together."""
    pages = os.fstat(member.vectors.fd).st_blocks * 512 // (4 * PAGE)
    return pages - FRAGMENTS


def test_where_every_fragment_has_a_round_at_once_they_follow_each_other(tmp_path: Path) -> None:
    """The copies of two at a time, and what was merged of them; all that was trained is merged."""

    async def story() -> None:
        async with Stage(tmp_path, elements=PAGE, fragments=FRAGMENTS) as stage:
            ann = await stage.found()
            held, asked = list[int](), list[int]()

            def seen(event: ev.Event, effects: list[ef.Effect]) -> None:
                held.append(fragments_held(ann))
                asked.append(sum(isinstance(effect, ef.Snapshot) for effect in effects))

            await stage.train(ann, 0.5)
            assert fragments_held(ann) <= 2 * AT_ONCE
            ann.before = seen
            ann.peer.request_leave("the test is over")
            while ann.ending is None:
                await stage.rest(ann)
                await stage.wait(0.5)
            assert max(asked) == FRAGMENTS
            assert AT_ONCE <= max(held) <= 2 * AT_ONCE
            assert ann.machine.core.unmerged_tokens() == 0
            assert torch.equal(ann.state.theta, torch.full_like(ann.state.theta, 1.0 + 0.75 * 0.5))

    act(story)


def test_the_next_learner_is_asked_for_what_the_last_did_not_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path, elements=PAGE, fragments=FRAGMENTS) as stage:
            ann = await stage.found()
            for _ in range(2 * FRAGMENTS):  # a long step, as the node sees it
                ann.learner.step(1.0)
            ann.learner.boundary()
            await stage.settle()
            ann.learner.die()
            await stage.wait(1.5)
            await stage.ready(ann)
            await stage.train(ann, *[1.0] * (2 * FRAGMENTS))
            assert min(ann.versions) >= 1

    act(story)
