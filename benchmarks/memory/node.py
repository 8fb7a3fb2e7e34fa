"""Node that reports its memory by component: the peer of ``benchmarks.wire.exchange`` with two more questions.

Not counted is what the process held before it created a state (Python, torch, kernels that have run once). Checkpoints
are written only on request, so that a node can be measured at rest.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import tempfile
import time
from pathlib import Path

import torch
import uvloop

from benchmarks.memory import residence
from benchmarks.wire import line
from benchmarks.wire.exchange_peer import SYNC_EVERY, TOKENS, ExchangePeer, Rounds, block_of, incoming_lines, run_of
from p2pdiloco.codec import digests, outer_optimizer, quantization
from p2pdiloco.codec.formats import CHUNK, recipe
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.peer.options import LinkOptions, PeerOptions
from p2pdiloco.transport.identity import Identity

PATIENCE_S = 5.0


def warm() -> None:
    """What every process has that merges, whatever the model: kernels, and a chunk's working memory."""
    gradient, theta = torch.ones(CHUNK), torch.zeros(CHUNK)
    momentum = torch.zeros(CHUNK, dtype=torch.bfloat16)
    body = bytes(quantization.encode_chunk(recipe("int4"), gradient))
    bodies, factors = Bodies.of(body), outer_optimizer.Factors(learning_rate=0.1, momentum_factor=0.9)
    outer_optimizer.step_shard(bodies, bodies, theta, momentum, gradient, True, factors)
    outer_optimizer.step_aside(body, theta, momentum, (gradient, torch.empty_like(momentum)), **factors)
    digests.digest_list(theta, momentum)


class MeasuredRounds(Rounds):
    """And two questions."""

    def __init__(self, peer: ExchangePeer, config: line.Message, before: dict[str, int]) -> None:
        super().__init__(peer, config)
        self._before_all = before

    async def obey(self, command: line.Message) -> None:
        """Do it and answer."""
        match command["do"]:
            case "rest":
                await asyncio.sleep(float(command["seconds"]))
                line.answer(**self._rest())
            case "save":
                line.answer(**await self._save())
            case "round":
                await self._round()
                line.answer(peak=line.memory("VmHWM"))
            case _:
                await super().obey(command)

    async def _round(self) -> None:
        """One version more of every shard. Where the machine has other work an owner may be late, and what was given to
        it is given again at the next round: there is one every ``PATIENCE_S``."""
        peer = self._peer
        self._rounds += 1
        peer.gradient = block_of(self._index, self._rounds)
        came = peer.awaits(self._rounds)
        while not came.done():
            peer.stand_in.train(SYNC_EVERY if self._index == 0 else 1, TOKENS if self._index else 12 * TOKENS)
            await asyncio.wait([came], timeout=PATIENCE_S)

    def _rest(self) -> dict[str, int]:
        """Bytes by component."""
        peer = self._peer.peer
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        found = residence.components()
        shelves = peer.driver.payload_cache.shards
        return {
            **{name: size - self._before_all[name] for name, size in found.items()},
            **residence.vectors(("theta", "shift", "snapshot")),
            "momentum": peer.state.momentum.numel() * peer.state.momentum.element_size(),
            "payloads": sum(shelf.memory_bytes(digest) for shelf in shelves for digest in shelf.payloads),
            "disk": sum(path.stat().st_size for path in self._peer.options.folder.rglob("*") if path.is_file()),
        }

    async def _save(self) -> dict[str, float]:
        """What a checkpoint takes beyond what is there, in bytes and seconds."""
        fields = ("RssAnon", "RssShmem")
        before, began = residence.resident(*fields), time.monotonic()
        with residence.Peak(*fields) as peak:
            assert await self._peer.peer.checkpoint_writer.save(is_last=False), "no checkpoint was written"
        return {"peak": peak.most - before, "seconds": time.monotonic() - began}


async def serve(config: line.Message) -> None:
    """Take part until the parent closes the pipe."""
    warm()
    before = residence.components()
    manifest, initial = run_of(config)
    identity = Identity.ephemeral()
    nowhere = Directory(identity, listen=[], announce=[], initial_peers=[])  # never opened: addresses are told
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-memory-", dir=config.get("folder")) as folder:
        options = PeerOptions(folder=Path(folder), link=LinkOptions(listen=f"/ip4/{config['host']}/tcp/0"))
        async with ExchangePeer.open(manifest, options, identity, nowhere, initial) as peer:
            del initial
            peer.begin()
            line.answer(address=peer.transport.listen_addresses()[0])
            rounds = MeasuredRounds(peer, config, before)
            incoming = incoming_lines()
            while (command := await incoming.get()) is not None:
                await rounds.obey(command)


if __name__ == "__main__":
    line.live(lambda config: uvloop.run(serve(config)))
