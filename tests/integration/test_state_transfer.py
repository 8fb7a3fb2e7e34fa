"""State transfers between real nodes over real sockets: several donors, one that lies, one that dies, a newcomer that
is cut off and comes again."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from waiting import until

from p2pdiloco.codec.digests import state_digest
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.node.node import Node
from p2pdiloco.node.run_creation import version_zero
from p2pdiloco.peer import state_client, state_server
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, ShardId
from p2pdiloco.protocol.manifest import (
    InnerConfig,
    Layout,
    Manifest,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
    make_layout,
)
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import RequestRefused
from p2pdiloco.wire.control_messages import GetChunk, GetState, encode

FRAGMENTS = 2
SHARDS = 12
SHARD_ELEMENTS = CHUNK + 1000
"""Two chunks, one of them small."""
WAIT_S = 30.0
UP_BYTES_PER_S = 4e6
"""Slow enough to meet a transfer in its middle."""


def run() -> tuple[Manifest, torch.Tensor, torch.Tensor]:
    elements = SHARDS // FRAGMENTS * SHARD_ELEMENTS
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(elements,), merge="rda", fragment=FragmentId(i)) for i in range(FRAGMENTS)
    )
    schedule = ScheduleConfig(fragments=FRAGMENTS, max_shard=SHARD_ELEMENTS)
    layout = make_layout(tensors, FRAGMENTS, schedule.max_shard, "rda")
    theta = torch.randn(layout.elements, generator=torch.Generator().manual_seed(1))
    momentum = torch.randn(layout.elements, generator=torch.Generator().manual_seed(2)).bfloat16()
    genesis = tuple(state_digest(theta[s.start : s.stop], momentum[s.start : s.stop]) for s in layout.shards)
    outer = OuterConfig(momentum_type="bfloat16")
    config = RunConfig(name="transfer", access="open", inner=InnerConfig(steps=10**9), schedule=schedule, outer=outer)
    manifest = Manifest(founder=PeerId("founder"), config=config, tensors=tensors, genesis=genesis)
    assert len(layout.shards) == SHARDS
    return manifest, theta, momentum


MANIFEST, THETA, MOMENTUM = run()
LAYOUT = Layout.of(MANIFEST)
HEAD = genesis_head(MANIFEST.run, ShardId(0), MANIFEST.genesis[0])


def founded() -> InitialState:
    """What a founder brings; a peer lets go of it as it puts it in its place, so each has a copy."""
    return version_zero(MANIFEST, THETA.clone(), MOMENTUM.clone())


@asynccontextmanager
async def peer(folder: Path, initial: InitialState | None) -> AsyncIterator[Node]:
    """A follower that takes part from now on; addresses are told."""
    identity = Identity.ephemeral()
    nowhere = Directory(identity, listen=[], announce=[], initial_peers=[])  # never opened
    link = LinkOptions(listen="/ip4/127.0.0.1/tcp/0", up_bytes_per_s=UP_BYTES_PER_S)
    options = PeerOptions(folder=folder, link=link, is_follower=True)
    async with Node.open(MANIFEST, options, identity, nowhere, initial) as node:
        node.begin()
        yield node


async def meet(newcomer: Node, donors: list[Node]) -> None:
    for donor in donors:
        await newcomer.transport.dial(donor.transport.listen_addresses()[0])


async def is_current(node: Node) -> None:
    await until(lambda: node.peer.machine.core.is_current, WAIT_S)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def has_all(node: Node) -> bool:
    state = node.peer.state
    return torch.equal(state.theta, THETA) and torch.equal(state.momentum, MOMENTUM)


def with_donors(folder: Path, count: int, scenario: Callable[[list[Node], AsyncExitStack], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            donors = [await stack.enter_async_context(peer(folder / f"donor{i}", founded())) for i in range(count)]
            await scenario(donors, stack)

    uvloop.run(main())


def test_a_node_listens_where_its_last_life_did(tmp_path: Path) -> None:
    """Others' books and invites name that port."""
    found = []

    async def main() -> None:
        for _ in range(2):
            async with peer(tmp_path, founded()) as node:
                found.append(node.transport.listen_addresses()[0].partition("/p2p/")[0])

    uvloop.run(main())
    assert found[0] == found[1]


def test_what_a_peer_brings_is_not_kept_beside_the_state(tmp_path: Path) -> None:
    theta = THETA.clone()
    kept, initial = weakref.ref(theta), version_zero(MANIFEST, theta, MOMENTUM)
    del theta

    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        node = await stack.enter_async_context(peer(tmp_path / "founder", initial))  # whose caller waits, with initial
        assert has_all(node)
        assert kept() is None

    with_donors(tmp_path, 0, scenario)


def lie_about_chunks(donor: Node) -> None:
    """Whatever chunk it is asked for, it sends another. (What it *has* it would find spoilt itself, and hand out none
    of it.)"""
    copies = donor.peer.state_server
    honest = copies.chunk

    async def chunk(shard: ShardId, head: Digest, chunk: int) -> memoryview:
        data = bytearray(await honest(shard, head, chunk))
        data[0] ^= 1
        return memoryview(data)

    copies.chunk = chunk  # type: ignore[method-assign]


def test_a_newcomer_takes_from_all_donors_and_refuses_the_chunks_of_a_liar(tmp_path: Path) -> None:
    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        lie_about_chunks(donors[2])
        newcomer = await stack.enter_async_context(peer(tmp_path / "new", None))
        await meet(newcomer, donors)
        await is_current(newcomer)
        assert has_all(newcomer)
        assert newcomer.peer.metrics.faults["state"] >= 1
        sent = [donor.transport.traffic().sent_bulk for donor in donors]
        assert min(sent[:2]) > 0

    with_donors(tmp_path, 3, scenario)
    liars = {row["peer"] for row in events(tmp_path / "new", "fault")}
    assert len(liars) == 1
    assert sum(row["bytes"] for row in events(tmp_path / "new", "fetched")) == 6 * LAYOUT.elements
    assert events(tmp_path / "new", "downloaded")[0]["bytes"] == 6 * LAYOUT.elements


def test_a_donor_that_dies_in_the_middle_costs_what_it_was_sending(tmp_path: Path) -> None:
    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        dying = peer(tmp_path / "dying", founded())
        donor = await dying.__aenter__()
        newcomer = await stack.enter_async_context(peer(tmp_path / "new", None))
        await meet(newcomer, [donor, *donors])
        await until(lambda: donor.transport.traffic().sent_bulk > 2_000_000, WAIT_S)
        assert not newcomer.peer.machine.core.is_current
        for channel in list(donor.transport._channels.values()):
            assert channel.transport is not None
            channel.transport.abort()
        await dying.__aexit__(None, None, None)
        await is_current(newcomer)
        assert has_all(newcomer)
        assert not newcomer.peer.metrics.faults

    with_donors(tmp_path, 1, scenario)


def test_a_newcomer_that_is_cut_off_goes_on_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_client, "KEEP_FROM_S", 0.0)
    folder = tmp_path / "new"

    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        async with peer(folder, None) as newcomer:
            await meet(newcomer, donors)
            await until(
                lambda: len(list((folder / state_client.INCOMING).glob(f"*{state_client.SUFFIX}"))) >= 3, WAIT_S
            )
            assert not newcomer.peer.machine.core.is_current
        files = sorted((folder / state_client.INCOMING).glob(f"*{state_client.SUFFIX}"))
        spoilt = bytearray(files[0].read_bytes())
        spoilt[-1] ^= 1
        files[0].write_bytes(spoilt)
        kept = state_client.load(folder / state_client.INCOMING, MANIFEST)
        assert kept is not None
        assert len(kept.shards) == len(files) - 1
        before = len(events(folder, "fetched"))
        again = await stack.enter_async_context(peer(folder, InitialState(kept.shards, kept.theta, kept.momentum)))
        await meet(again, donors)
        await is_current(again)
        assert has_all(again)
        assert len(events(folder, "fetched")) - before == SHARDS - len(kept.shards)
        await until(lambda: not (folder / state_client.INCOMING).exists(), WAIT_S)
        assert list((folder / "checkpoint").glob("state-*.json"))

    with_donors(tmp_path, 2, scenario)


@pytest.mark.parametrize("body", [b"", b"\x00" * 8, b"\x00\x00\x00\x04abcd", b"\xff" * 5000])
def test_what_is_no_downloaded_shard_is_removed(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "shard-00000003.state"
    path.write_bytes(body)
    (tmp_path / "shard-x.state").write_bytes(body)
    (tmp_path / "shard-00000099.state").write_bytes(body)
    assert state_client.load(tmp_path, MANIFEST) is None
    assert not list(tmp_path.iterdir())


def test_chunks_wait_for_what_the_donor_itself_has_to_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "YIELD_MOST_S", WAIT_S)
    question = encode(GetChunk(ShardId(0), HEAD.id, 0))

    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        waiting, looks = [10 * state_server.LITTLE_BYTES], 0

        def queued_bytes(peer: PeerId) -> int:
            nonlocal looks
            looks += peer != "newcomer"
            return waiting[0] if peer != "newcomer" else 0

        monkeypatch.setattr(donors[0].transport, "queued_bytes", queued_bytes)
        monkeypatch.setattr(donors[0].transport, "peers", lambda: [PeerId("other")])
        asking = asyncio.create_task(donors[0].peer.answer(PeerId("newcomer"), question))
        await until(lambda: looks > 3, WAIT_S)
        assert not asking.done()
        waiting[0] = 0
        answer = await asking
        assert answer.priority > 0
        assert answer.payload is not None

    with_donors(tmp_path, 1, scenario)


def test_questions_that_are_none_are_refused(tmp_path: Path) -> None:
    """Shards and chunks that do not exist, heads that are not here, and bytes that are no question."""
    head = HEAD.id
    questions = [
        encode(GetState(ShardId(SHARDS))),
        encode(GetChunk(ShardId(SHARDS), head, 0)),
        encode(GetChunk(ShardId(0), head, 2)),
        encode(GetChunk(ShardId(0), Digest("0" * 40), 0)),
        encode(["chunk?", -1, head, 0]),
        encode(["chunk?", 0, head, 2**63]),
        encode(["chunk?", 0, "x" * 41, 0]),
        b"",
    ]

    async def scenario(donors: list[Node], stack: AsyncExitStack) -> None:
        for question in questions:
            with pytest.raises(RequestRefused):
                await donors[0].peer.answer(PeerId("somebody"), question)
        answers = await asyncio.gather(
            *(donors[0].peer.answer(PeerId("somebody"), encode(GetState(ShardId(0)))) for _ in range(5))
        )
        assert len({answer.body for answer in answers}) == 1

    with_donors(tmp_path, 1, scenario)
