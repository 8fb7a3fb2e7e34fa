"""The metrics of a run as Prometheus scrapes them, and whether a peer is healthy and ready (docs/watching.md).

Rules of this file:
1. A name ends with its unit (``_seconds``, ``_bytes``, ``_tokens``), a counter's with ``_total``. Names do not change.
2. Labels are bounded: there is no metric for each shard, and of the peers only live ones have some, labelled by the
   ends of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import prometheus_client
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from p2pdiloco.observability.snapshot import RunSnapshot
from p2pdiloco.util.logs import printable, short

PREFIX = "p2pdiloco_"
MOST_PEERS = 256
LONGEST_LABEL = 80
Labels = dict[str, str]
Samples = list[tuple[Labels, float | None]]


class Metric(NamedTuple):
    """Name, kind and meaning of one metric."""

    name: str
    """Without ``PREFIX``."""
    kind: str
    """``gauge`` or ``counter``."""
    help: str


METRICS = (
    Metric("info", "gauge", "always 1; labels: run, name, peer"),
    Metric("ready", "gauge", "1: this peer holds the whole model"),
    Metric("step", "gauge", "global step"),
    Metric("steps", "gauge", "number of global steps of the run"),
    Metric("done_ratio", "gauge", "fraction of the steps done"),
    Metric("left_seconds", "gauge", "estimated time left"),
    Metric("share_ratio", "gauge", "this peer's recent share of the merged tokens"),
    Metric("trained_tokens_total", "counter", "tokens trained by this peer's learner"),
    Metric("merged_tokens_total", "counter", "tokens of all peers merged into the model"),
    Metric("tokens_per_second", "gauge", "this peer's training rate"),
    Metric("swarm_tokens_per_second", "gauge", "training rate of all peers that report one"),
    Metric("train_loss", "gauge", "smoothed training loss of this peer, nats per token"),
    Metric("held_out_loss", "gauge", "held-out loss of the global model, nats per token"),
    Metric("peers", "gauge", "peers by state: known, live, participating, averaged"),
    Metric("version", "gauge", "lowest and highest version of the shards"),
    Metric("sent_bytes_total", "counter", "bytes of frames sent"),
    Metric("received_bytes_total", "counter", "bytes of frames received"),
    Metric("sent_bytes_per_second", "gauge", "recent send rate"),
    Metric("received_bytes_per_second", "gauge", "recent receive rate"),
    Metric("up_budget_bytes_per_second", "gauge", "send limit; absent without one"),
    Metric("compute_seconds_total", "counter", "learner time in training steps"),
    Metric("overhead_seconds_total", "counter", "learner time between steps: copies, evaluations, saves, messages"),
    Metric("blocked_seconds_total", "counter", "the part of it waiting for the network; must stay 0"),
    Metric("node_cpu_seconds_total", "counter", "CPU time of the node since the learner's first step"),
    Metric("happened_total", "counter", "forks, refusals and faults of other peers"),
    Metric("troubles", "gauge", "problems that need a person now"),
    Metric("peer_tokens_per_second", "gauge", "self-reported training rate of each live peer"),
    Metric("peer_share_ratio", "gauge", "share of each live peer in the merged tokens"),
    Metric("peer_round_trip_seconds", "gauge", "round-trip time to each connected peer"),
)


def expose(snapshot: RunSnapshot, accept: str = "") -> tuple[bytes, str]:
    """Return all metrics of ``snapshot`` in the format that the HTTP header ``accept`` asks for (Prometheus's text
    format or OpenMetrics), and its content type. A value that is not known is left out."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[prometheus_client.Metric]:
        """Yield a family for each metric of which something is known."""
        found = _labelled(self._snapshot)
        found |= {name: [({}, value)] for name, value in _unlabelled(self._snapshot).items()}
        for metric in METRICS:
            samples = [(labels, value) for labels, value in found.get(metric.name, []) if value is not None]
            if samples:
                name = PREFIX + metric.name
                family = prometheus_client.Metric(name.removesuffix("_total"), metric.help, metric.kind)
                for labels, value in samples:
                    cut = {label: printable(text)[:LONGEST_LABEL] for label, text in labels.items()}
                    family.add_sample(name, cut, float(value))
                yield family


def _labelled(snapshot: RunSnapshot) -> dict[str, Samples]:
    title = snapshot.title
    versions = [row.version for row in snapshot.shards]
    present = snapshot.headcount
    states = {
        "known": present.known,
        "live": present.live,
        "participating": present.participating,
        "averaged": present.weight_averaged,
    }
    return {
        "info": [({"run": title.run[:12], "name": title.name, "peer": short(title.me)}, 1.0)],
        "peers": [({"state": state}, number) for state, number in states.items()],
        "version": [({"which": "least"}, min(versions)), ({"which": "most"}, max(versions))] if versions else [],
        "happened_total": [({"what": what}, number) for what, number in sorted(snapshot.counts.items())],
        **_by_peer(snapshot),
    }


def _unlabelled(snapshot: RunSnapshot) -> dict[str, float | None]:
    """Return the values of all metrics without labels, by their names without ``PREFIX``. None: not known."""
    course, link, costs = snapshot.course, snapshot.link, snapshot.costs
    return {
        "ready": float(not unready_reason(snapshot)),
        "step": course.step,
        "steps": course.total_steps or None,
        "done_ratio": course.done,
        "left_seconds": course.left_s,
        "share_ratio": course.my_share,
        "trained_tokens_total": course.tokens_trained,
        "merged_tokens_total": course.tokens_merged,
        "tokens_per_second": course.tokens_per_s,
        "swarm_tokens_per_second": course.swarm_tokens_per_s,
        "train_loss": course.train_loss,
        "held_out_loss": course.held_out_loss,
        "sent_bytes_total": link.up_bytes,
        "received_bytes_total": link.down_bytes,
        "sent_bytes_per_second": link.up_per_s,
        "received_bytes_per_second": link.down_per_s,
        "up_budget_bytes_per_second": link.up_budget,
        "compute_seconds_total": costs.compute_s,
        "overhead_seconds_total": costs.overhead_s,
        "blocked_seconds_total": costs.blocked_s,
        "node_cpu_seconds_total": costs.node_cpu_s,
        "troubles": len(snapshot.troubles),
    }


def _by_peer(snapshot: RunSnapshot) -> dict[str, Samples]:
    live = [row for row in snapshot.peers if row.is_live][:MOST_PEERS]
    rate: Samples = []
    share: Samples = []
    trip: Samples = []
    for row, name in zip(live, _unique_names(row.peer for row in live), strict=True):
        label = {"peer": name}
        rate.append((label, row.words.tokens_per_s if row.words is not None else None))
        share.append((label, row.share))
        trip.append((label, row.reach.round_trip_s if row.reach is not None else None))
    return {"peer_tokens_per_second": rate, "peer_share_ratio": share, "peer_round_trip_seconds": trip}


def _unique_names(peers: Iterable[str]) -> list[str]:
    """Return the short name of each peer, or its whole id where two peers have the same short name."""
    every = list(peers)
    shorts = [short(peer) for peer in every]
    return [peer if shorts.count(name) > 1 else name for peer, name in zip(every, shorts, strict=True)]


def unhealthy_reason(snapshot: RunSnapshot) -> str:
    """Return what a person should look at, or an empty string if the peer is healthy."""
    return "; ".join(snapshot.troubles)


def unready_reason(snapshot: RunSnapshot) -> str:
    """Return why this peer takes no part yet, or an empty string if it is ready."""
    if snapshot.course.phase in ("starting", "joining"):
        return f"{snapshot.course.phase}: the model is not complete on this peer yet"
    return ""
