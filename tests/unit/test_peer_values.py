"""A peer of ours with a method replaced: as an owner it puts values of its own into commits, and goes on from there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import genesis
from troupe import Member, Stage, act

from p2pdiloco.codec import merge, quantization
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.protocol import events as ev

LARGE = 1e34


def goes_wild(member: Member, declared: float | None) -> None:
    """Whatever it merges is ``LARGE``; of that it declares the length, or what it likes."""
    honest = member.peer.state.merge

    def replaced(*given: Any, **named: Any) -> Any:
        def encode(how: quantization.Recipe, merged: torch.Tensor, _: float, room: int) -> tuple[Bodies, float]:
            bodies, length = sound(how, merged.fill_(LARGE), math.inf, room)
            return bodies, length if declared is None else declared

        sound = merge.encode
        merge.encode = encode  # type: ignore[assignment]
        try:
            return honest(*given, **named)
        finally:
            merge.encode = sound

    member.peer.state.merge = replaced  # type: ignore[method-assign]


@pytest.mark.parametrize("declared", [None, 1.0])
def test_an_owner_with_values_of_its_own_ends_no_run(tmp_path: Path, declared: float | None) -> None:
    """It says how long its step is, or it says that it is short: nobody takes it, versions go on, and the honest are at
    one; what it built on it meanwhile is taken from nobody."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.add("bob", genesis(stage.manifest), has_learner=False)
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(3.0)
            goes_wild(eve, declared)
            begun = sum(ann.versions)
            for _ in range(12):
                await stage.train(ann, *[1.0] * 2)
                await stage.wait(4.0)
            assert eve.id in ann.machine.view.barred | bob.machine.view.barred, "it has owned, and was refused"
            assert sum(ann.versions) >= begun + 6
            assert ann.versions == bob.versions
            for shard, head in enumerate(ann.peer.state.heads):
                assert bob.peer.state.heads[shard] == head
            assert torch.equal(ann.peer.state.theta, bob.peer.state.theta)
            assert float(ann.peer.state.theta.abs().max()) < 1e6
            assert (
                any(isinstance(event, ev.Failed) and event.work == "values" for event in ann.events) or declared is None
            )

    act(story)
