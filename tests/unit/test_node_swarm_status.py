"""What a training script is told of the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_node_eta import STATUS

from p2pdiloco.node.swarm_status import ASKED, MOST_PEERS, SwarmStatus, figures
from p2pdiloco.wire.control_messages import PeerStatus


def standing(peer: str, rate: float, loss: float | None, **more: Any) -> PeerStatus:
    return msgspec.structs.replace(STATUS, peer=peer, tokens_per_second=rate, train_loss=loss, **more)


def test_the_loss_is_weighted_by_tokens_and_the_share_is_of_the_rate() -> None:
    own = standing("ann", 100.0, 2.0, participating=3, bytes_up=3_000_000, held_out_loss=1.75)
    found = figures(own, [standing("bob", 300.0, 1.0), standing("cid", 0.0, 9.0), standing("dan", float("nan"), 9.0)])
    assert found["loss"] == pytest.approx(1.25)
    assert (found["share"], found["tokens_per_s"], found["peers"]) == (0.25, 400.0, 3.0)
    assert (found["sent_mb"], found["held_out"]) == (3.0, 1.75)


def test_what_is_not_known_is_left_out_and_nonsense_is_not_shown() -> None:
    found = figures(standing("ann", 0.0, None), [standing("bob", 10.0, float("inf"))])
    assert "loss" not in found
    assert "held_out" not in found
    assert found["share"] == 0.0


def looking(
    live: tuple[str, ...], answers: dict[str, PeerStatus], mine: tuple[str, ...] = ()
) -> tuple[SwarmStatus, list[str]]:
    asked: list[str] = []

    async def ask(peer: str) -> PeerStatus | None:
        asked.append(peer)
        return answers.get(peer)

    view = SimpleNamespace(me="ann", live=live, participating=frozenset(live))
    peer: Any = SimpleNamespace(machine=SimpleNamespace(view=view), supervision=SimpleNamespace(first_batches=mine))
    return SwarmStatus(peer, lambda: standing("ann", 10.0, 1.0), ask), asked  # type: ignore[arg-type]


def test_a_peer_with_the_same_first_batches_is_named() -> None:
    twin = standing("bob", 10.0, 3.0, first_batches=("x", "b", "c"))
    other = standing("cid", 10.0, 2.0, first_batches=("p", "q"))
    seen, _ = looking(("bob", "cid"), {"bob": twin, "cid": other}, mine=("a", "b"))
    asyncio.run(seen.ask_peers())
    told = seen.message()
    assert told.same_batches == "bob"
    assert (told.me, told.peers) == ("ann", ("ann", "bob", "cid"))
    assert told.figures["loss"] == pytest.approx(2.0)
    apart, _ = looking(("cid",), {"cid": other}, mine=("a", "b"))
    asyncio.run(apart.ask_peers())
    assert apart.message().same_batches == ""


def test_of_many_peers_a_few_are_asked_at_a_time_and_all_in_turns() -> None:
    crowd = tuple(f"peer {i:04}" for i in range(MOST_PEERS + 50))
    seen, asked = looking(crowd, {})
    asyncio.run(seen.ask_peers())
    assert len(asked) == ASKED
    asyncio.run(seen.ask_peers())
    assert len(set(asked)) == 2 * ASKED
    assert len(seen.message().peers) == MOST_PEERS


def test_who_has_gone_is_forgotten() -> None:
    seen, _ = looking(("bob",), {"bob": standing("bob", 30.0, 1.0)})
    asyncio.run(seen.ask_peers())
    assert seen.message().figures["share"] == 0.25
    seen._peer.machine.view.live = ()  # type: ignore[misc]
    seen._peer.machine.view.participating = frozenset()
    asyncio.run(seen.ask_peers())
    assert seen.message().figures["share"] == 1.0
