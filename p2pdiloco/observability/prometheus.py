"""A picture for machines: Prometheus's text format, and whether a peer is healthy and ready (docs/watching.md).

Rules of this file:
1. Names have their unit at their end (``_seconds``, ``_bytes``, ``_tokens``), counters ``_total``. They do not change.
2. Labels are bounded: shards are not told one by one, and of the peers only live ones, by the ends of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from p2pdiloco.observability.snapshot import RunSnapshot
from p2pdiloco.util.logs import printable, short

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "p2pdiloco_"
MOST_PEERS = 256
LONGEST_LABEL = 80
Labels = dict[str, str]


class Metric(NamedTuple):
    """One name."""

    name: str
    kind: str
    """``gauge`` or ``counter``."""
    help: str


NAMES = (
    Metric("info", "gauge", "always 1; the run, its name and this peer are labels"),
    Metric("ready", "gauge", "1: this peer holds the whole model"),
    Metric("step", "gauge", "global step"),
    Metric("steps", "gauge", "global steps that the run has"),
    Metric("done_ratio", "gauge", "share of the steps that is done"),
    Metric("left_seconds", "gauge", "time left at the pace of the last minute"),
    Metric("share_ratio", "gauge", "this peer's share of what is merged, lately"),
    Metric("trained_tokens_total", "counter", "tokens that this peer's learner has trained"),
    Metric("merged_tokens_total", "counter", "tokens of all peers that are in the model"),
    Metric("tokens_per_second", "gauge", "this peer's rate"),
    Metric("swarm_tokens_per_second", "gauge", "of all peers that have told theirs"),
    Metric("train_loss", "gauge", "this learner's, smoothed, nats a token"),
    Metric("held_out_loss", "gauge", "the global model's, nats a token"),
    Metric("peers", "gauge", "by state: known, live, participating, averaged (in the last merge)"),
    Metric("version", "gauge", "of the shards, by which: least, most"),
    Metric("sent_bytes_total", "counter", "frames sent"),
    Metric("received_bytes_total", "counter", "frames received"),
    Metric("sent_bytes_per_second", "gauge", "lately"),
    Metric("received_bytes_per_second", "gauge", "lately"),
    Metric("up_budget_bytes_per_second", "gauge", "what this peer may send; missing: no limit"),
    Metric("compute_seconds_total", "counter", "learner's time in its steps"),
    Metric("exchange_seconds_total", "counter", "learner's time in copies to and from the node"),
    Metric("blocked_seconds_total", "counter", "learner's time waiting for the network; must stay 0"),
    Metric("spent_total", "counter", "what this life of the node has cost, by --price"),
    Metric("happened_total", "counter", "forks, refusals and others' faults, by what"),
    Metric("troubles", "gauge", "what a person should look at now"),
    Metric("peer_tokens_per_second", "gauge", "of each live peer, by its own words"),
    Metric("peer_share_ratio", "gauge", "of each live peer, of what is merged since this peer looks"),
    Metric("peer_round_trip_seconds", "gauge", "to each connected peer"),
)


def exposition(picture: RunSnapshot) -> str:
    """All of it. What is not known is left out."""
    found = _samples(picture)
    lines = []
    for metric in NAMES:
        samples = [(labels, value) for labels, value in found.get(metric.name, []) if value is not None]
        if samples:
            name = PREFIX + metric.name
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


Samples = dict[str, list[tuple[Labels, float | None]]]


def _samples(picture: RunSnapshot) -> Samples:
    title = picture.title
    versions = [row.version for row in picture.shards]
    present = picture.headcount
    states = {
        "known": present.known,
        "live": present.live,
        "participating": present.participating,
        "averaged": present.weight_averaged,
    }
    many: Samples = {
        "info": [({"run": title.run[:12], "name": title.name, "peer": short(title.me)}, 1.0)],
        "peers": [({"state": state}, number) for state, number in states.items()],
        "version": [({"which": "least"}, min(versions)), ({"which": "most"}, max(versions))] if versions else [],
        "happened_total": [({"what": what}, number) for what, number in sorted(picture.counts.items())],
        **_of_peers(picture),
    }
    alone: Samples = {name: [({}, value)] for name, value in single(picture).items()}
    return alone | many


def single(picture: RunSnapshot) -> dict[str, float | None]:
    """The numbers without labels, by their names without the prefix. None: not known."""
    course, link, costs = picture.course, picture.link, picture.costs
    return {
        "ready": float(not is_ready(picture)),
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
        "exchange_seconds_total": costs.exchange_s,
        "blocked_seconds_total": costs.blocked_s,
        "spent_total": None if picture.account is None else picture.account.cost,
        "troubles": len(picture.troubles),
    }


def _of_peers(picture: RunSnapshot) -> Samples:
    live = [row for row in picture.peers if row.is_live][:MOST_PEERS]
    named = _named(row.peer for row in live)
    rate: list[tuple[Labels, float | None]] = []
    share: list[tuple[Labels, float | None]] = []
    trip: list[tuple[Labels, float | None]] = []
    for row, name in zip(live, named, strict=True):
        label = {"peer": name}
        rate.append((label, row.words.tokens_per_s if row.words is not None else None))
        share.append((label, row.share))
        trip.append((label, row.reach.round_trip_s if row.reach is not None else None))
    return {"peer_tokens_per_second": rate, "peer_share_ratio": share, "peer_round_trip_seconds": trip}


def _named(peers: Iterable[str]) -> list[str]:
    """Short names; the whole id where two have the same."""
    every = list(peers)
    shorts = [short(peer) for peer in every]
    return [peer if shorts.count(name) > 1 else name for peer, name in zip(every, shorts, strict=True)]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    cut = printable(value)[:LONGEST_LABEL]
    return cut.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return str(int(value)) if value == int(value) else f"{value:.9g}"


def is_healthy(picture: RunSnapshot) -> str:
    """Empty, or what a person should look at."""
    return "; ".join(picture.troubles)


def is_ready(picture: RunSnapshot) -> str:
    """Empty, or why this peer takes no part yet."""
    if picture.course.phase in ("starting", "joining"):
        return f"{picture.course.phase}: the model is not whole here yet"
    return ""
