"""Composes the status that a peer reports to other peers, its user and its training script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pdiloco.node.eta import presented
from p2pdiloco.peer.peer import Peer
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.transport.transport import Transport
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT, PeerStatus


class StatusReporter:
    """Composes the status of a peer from the peer itself, its transport and the peers that it knows."""

    def __init__(self, transport: Transport, known: KnownPeers, troubles: Sequence[Mapping[str, str]]) -> None:
        """``troubles``: problems of tasks that failed and were restarted, see ``Tasks``."""
        self._transport = transport
        self._known = known
        self._troubles = tuple(troubles)

    def sent_bytes(self) -> int:
        """Return the number of bytes that this process has sent to other peers."""
        traffic = self._transport.traffic()
        return traffic.sent_control + traffic.sent_bulk

    def trouble(self, peer: Peer) -> str:
        """Return the current problems for the user: the peer's own, then those of restarted tasks; "" if none."""
        found = (peer.trouble, *(text for troubles in self._troubles for text in troubles.values()))
        return "; ".join(filter(None, found))[:TROUBLE_LIMIT]

    def status(self, peer: Peer) -> PeerStatus:
        """Return the current status of ``peer``."""
        view, traffic = peer.machine.view, self._transport.traffic()
        versions = [head.version for head in view.known_heads] or [0]
        evaluation = view.evaluation
        report = PeerStatus(
            run=peer.manifest.run,
            name=peer.manifest.config.name,
            peer=peer.config.peer,
            phase="resting" if peer.supervision.resting else view.phase,
            step=view.step,
            total_steps=view.last_step,
            known=max(len(self._known), len(view.live)) + 1,
            live=max(len(view.live) + 1, view.learners),
            connected=len(view.live),
            participating=view.learners,
            weight_averaged=view.weight_averaged,
            version_min=min(versions),
            version_max=max(versions),
            heads_mark=view.heads_mark,
            tokens_trained=peer.metrics.tokens,
            tokens_merged=_tokens_merged(peer),
            tokens_per_second=peer.metrics.tokens_per_second,
            train_loss=peer.metrics.loss,
            reward=peer.metrics.reward,
            held_out_loss=None if evaluation is None else evaluation.loss,
            held_out_step=0 if evaluation is None else evaluation.step,
            bytes_up=self.sent_bytes(),
            bytes_down=traffic.received_control + traffic.received_bulk,
            blocked_s=peer.metrics.blocked_s,
            compute_s=peer.metrics.compute_s,
            overhead_s=peer.metrics.overhead_s,
            node_cpu_s=peer.metrics.node_cpu_s,
            epochs=view.epochs,
            blocks_repeated=view.blocks_repeated,
            trouble=self.trouble(peer),
            first_batches=peer.supervision.first_batches,
        )
        return presented(report)


def _tokens_merged(peer: Peer) -> int:
    """Return the declared tokens that the chains have merged, averaged over the shards by size."""
    merged = peer.machine.view.merged_tokens()
    total = sum(m * shard.elements for m, shard in zip(merged, peer.state.layout.shards, strict=True))
    return total // peer.state.layout.elements
