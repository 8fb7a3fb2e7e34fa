"""Collects the status of the other peers, for the training script and the page.

Rules of this file:
1. The list of training peers is this peer's own view, from heartbeats; the script is told as soon as it changes. The
   other peers are asked for their status, a few at a time. Their answers are shown, and never decide anything.
2. The digests of each script's first batches show whether two peers train on the same data, which is a mistake.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from p2pdiloco.peer.peer import Peer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.util import logs
from p2pdiloco.wire import learner_ipc
from p2pdiloco.wire.control_messages import PeerStatus

log = logs.get("node")

LOOK_S = 0.5
# Interval between two messages to the script while only figures change.
TELL_S = 2.0
ASK_S = 10.0
# Maximum number of peers to ask at a time; more of them take turns.
ASKED = 16
# Maximum number of peers in a message to the script.
MOST_PEERS = 1024


class SwarmStatus:
    """Asks the live peers for their status, and sends it to the script."""

    def __init__(
        self,
        peer: Peer,
        status: Callable[[], PeerStatus],
        ask: Callable[[PeerId], Awaitable[PeerStatus | None]],
    ) -> None:
        """
        Args:
            status: returns this peer's own status.
            ask: returns the status of another peer, or None if it does not answer.
        """
        self._peer = peer
        self._status = status
        self._ask = ask
        # The last answer of each live peer.
        self.others: dict[PeerId, PeerStatus] = {}
        self._turn = 0
        self._same = ""

    async def keep(self) -> None:
        """Ask peers and inform the script until cancelled."""
        now = self._peer.host.now
        asked_at = sent_at = -math.inf
        peers: tuple[str, ...] = ()
        batches: tuple[str, ...] = ()
        while True:
            mine = self._peer.supervision.first_batches
            if now() - asked_at >= ASK_S or mine != batches:
                asked_at, batches = now(), mine
                await self.ask_peers()
            message = self.message()
            if message.peers != peers or now() - sent_at >= TELL_S:
                peers, sent_at = message.peers, now()
                self._peer.supervision.send(message)
            await asyncio.sleep(LOOK_S)

    def message(self) -> learner_ipc.Swarm:
        """Return a message to the script about the current swarm."""
        view, own = self._peer.machine.view, self._status()
        me = view.me
        training = sorted({*view.participating, me})[:MOST_PEERS]
        return learner_ipc.Swarm(
            me=me,
            peers=tuple(training),
            figures=figures(own, [self.others[p] for p in training if p in self.others]),
            same_batches=self._same,
        )

    async def ask_peers(self) -> None:
        """Ask up to ASKED of the live peers for their status."""
        live = self._peer.machine.view.live
        asked = [live[(self._turn + i) % len(live)] for i in range(min(ASKED, len(live)))]
        self._turn += len(asked)
        answers = await asyncio.gather(*map(self._ask, asked))
        self.others |= {peer: one for peer, one in zip(asked, answers, strict=True) if one is not None}
        self.others = {peer: one for peer, one in self.others.items() if peer in live}
        mine = set(self._peer.supervision.first_batches)
        same = sorted(peer for peer, one in self.others.items() if mine.intersection(one.first_batches))
        if same and not self._same:
            log.warning("another peer trains on the same batches, which adds nothing to the run", peer=same[0])
        self._same = same[0] if same else ""


def figures(own: PeerStatus, others: list[PeerStatus]) -> dict[str, float]:
    """Return numbers for the script's own log, from this peer and the other peers that have answered."""
    known = [one for one in (own, *others) if math.isfinite(one.tokens_per_second) and one.tokens_per_second > 0.0]
    rate = sum(one.tokens_per_second for one in known)
    found = {
        "peers": float(own.participating),
        "version": float(own.version_min),
        "step": float(own.step),
        "tokens": float(own.tokens_merged),
        "tokens_per_s": rate,
        "sent_mb": own.bytes_up / 1e6,
        "received_mb": own.bytes_down / 1e6,
    }
    if rate:
        found["share"] = own.tokens_per_second / rate
    with_loss = [one for one in known if one.train_loss is not None and math.isfinite(one.train_loss)]
    if with_loss:
        weights = sum(one.tokens_per_second for one in with_loss)
        found["loss"] = sum((one.train_loss or 0.0) * one.tokens_per_second for one in with_loss) / weights
    if own.held_out_loss is not None:
        found["held_out"] = own.held_out_loss
    return found
