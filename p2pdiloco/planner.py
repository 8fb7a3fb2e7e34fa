"""Forecast of a run's needs in bandwidth and memory, before it is founded.

Rules of this file:
1. Pure arithmetic. All peers and their links are alike. Utilisation comes from the public model of the DiLoCo family;
   bytes on the link and memory are counted.
2. An exchange consists of an announcement, a contribution to the owner, and a commit that goes down a tree to all. In
   a large run each group merges its contributions first. A fragment with fewer shards than peers has fewer owners,
   whose links are then the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from p2pdiloco.protocol.commit_relay import FAN_OUT
from p2pdiloco.protocol.groups import MOST_TOGETHER, group_bits
from p2pdiloco.protocol.membership import BEAT_PEERS

# -- Bandwidth model ---------------------------------------------------------------------------------------------------
# Compute utilisation at a given link rate, by the public model of the DiLoCo family.
#
# Rules of this section:
# 1. Units are bits, seconds and bits per second, without headers.
# 2. A peer's link carries as much in each direction.
# 3. Learners of this project never wait. Its utilisation here is the value if they did wait, so that it can be compared
#    with other systems. In fact rounds become late, or are left out.


BUCKETS: Final = 128
# Share of the backward pass in a step.
BACKWARD: Final = 2 / 3


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the bandwidth model describes it."""

    parameters: float
    peers: int
    step_s: float = 1.0
    sync_every: int = 24
    """Steps between two exchanges of the same fragment (H)."""
    fragments: int = 24
    """Number of fragments (P)."""
    overlap: int = 2
    """Steps that an exchange may take (tau)."""
    up_bytes: float = 0.5
    """Bytes per parameter of a contribution; of gradients, for data parallel."""
    down_bytes: float = 0.5
    """Bytes per parameter of a commit."""

    @property
    def interval_s(self) -> float:
        """Seconds between the rounds of two fragments."""
        return self.step_s * self.sync_every / self.fragments


def all_reduced_bits(training: Training) -> float:
    """Return the bits that a peer sends, and receives, in one all-reduce of the whole model."""
    share = 1 - 1 / training.peers
    return training.parameters * 8 * share * (training.up_bytes + training.down_bytes)


def data_parallel(training: Training, bits_per_s: float) -> float:
    """Return the utilisation of data parallel training, which all-reduces gradients in buckets within each step."""
    step_s, bucket_s = training.step_s, all_reduced_bits(training) / bits_per_s / BUCKETS
    done = 0.0
    for bucket in range(1, BUCKETS + 1):
        made = step_s * (1 - BACKWARD) + step_s * BACKWARD * bucket / BUCKETS
        done = max(done, made) + bucket_s
    return step_s / (step_s + max(0.0, done - step_s))


def diloco(training: Training, bits_per_s: float) -> float:
    """Return the utilisation of DiLoCo, in which all learners stop every H steps to exchange the whole model."""
    computed_s = training.step_s * training.sync_every
    return computed_s / (computed_s + all_reduced_bits(training) / bits_per_s)


def _streamed(training: Training, bits: float, bits_per_s: float) -> float:
    """Return the utilisation if a fragment is sent every H / P steps and must arrive ``overlap`` steps later."""
    deadline_s = (training.overlap + 1) * training.step_s
    late_s = bits / training.fragments / bits_per_s - min(training.interval_s, deadline_s)
    return training.interval_s / (training.interval_s + max(0.0, late_s))


def streaming(training: Training, bits_per_s: float) -> float:
    """Return the utilisation of Streaming DiLoCo, which all-reduces fragments."""
    return _streamed(training, all_reduced_bits(training), bits_per_s)


def star(training: Training, bits_per_s: float) -> float:
    """Return the utilisation of Decoupled DiLoCo, whose central syncer has as fast a link to each learner."""
    bits = training.parameters * 8 * max(training.up_bytes, training.down_bytes)  # of the whole model, one way
    return _streamed(training, bits, bits_per_s)


def p2pdiloco(training: Training, bits_per_s: float) -> float:
    """Return the utilisation of this project if its learners waited.

    Peers send contributions to owners, which are peers themselves and send commits to all."""
    return _streamed(training, all_reduced_bits(training), bits_per_s)


SYSTEMS: Final[dict[str, Callable[[Training, float], float]]] = {
    "data parallel": data_parallel,
    "DiLoCo": diloco,
    "Streaming DiLoCo": streaming,
    "Decoupled DiLoCo, star": star,
    "p2pdiloco": p2pdiloco,
}


# -- Forecast ----------------------------------------------------------------------------------------------------------


DAY_S: Final = 86400.0
# Share of the payload in a full packet.
PAYLOAD_SHARE: Final = 1448 / 1514
# Bytes of a small message on the link (117 bytes measured, benchmarks/protocol/README.md, and 104 of headers).
CONTROL_BYTES: Final = 220
# Bytes of a commit for each contribution that it names, and seconds to check its signature
# (``python -m benchmarks.scale.signatures``).
HEADER_BYTES: Final = 180
CHECK_S: Final = 140e-6
# Memory of a node: bytes per parameter, and a constant (``python -m benchmarks.memory``).
NODE_BYTES: Final = 9.0
NODE_FIXED_BYTES: Final = 45e6
# Memory of a learner in bytes per parameter: model, gradients, AdamW. Activations come on top.
LEARNER_BYTES: Final = 16.0
# Bytes per parameter that a newcomer downloads: parameters and momentum.
STATE_BYTES: Final = 8.0
# Longest exchange that is recommended, in steps; a longer overlap costs loss (benchmarks/quality/README.md).
MOST_OVERLAP: Final = 8
MOST_SYNC_EVERY: Final = 768
# Codecs that are recommended, with their bytes per parameter and direction: the default, and a coarser step of 1.0,
# which costs 0.5 % of loss and saves a third of the bytes (docs/results.md).
CODECS: Final = (("int4", 0.43), ("int4-coarse", 0.27))


class PeerLines(msgspec.Struct, frozen=True, kw_only=True):
    """The link of each peer."""

    up_bits_per_s: float
    down_bits_per_s: float
    round_trip_s: float = 0.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A planned run."""

    fragments: tuple[tuple[int, ...], ...]
    """For each fragment, the number of parameters of each of its shards."""
    peers: int
    step_s: float
    steps: int
    """Total number of steps."""
    sync_every: int
    overlap: int
    up_bytes: float
    down_bytes: float
    heartbeat_s: float = 1.0
    together: int = MOST_TOGETHER
    """Number of learners beyond which there are groups."""

    @property
    def parameters(self) -> int:
        """Number of parameters of all fragments together."""
        return sum(map(sum, self.fragments))

    @property
    def names_per_s(self) -> float:
        """Contributions that commits name, by the second: all learners, in each version of each shard."""
        return self.peers * sum(map(len, self.fragments)) / (self.sync_every * self.step_s)

    @property
    def training(self) -> Training:
        """The run as the bandwidth model describes it."""
        return Training(
            parameters=self.parameters,
            peers=self.peers,
            step_s=self.step_s,
            sync_every=self.sync_every,
            fragments=len(self.fragments),
            overlap=self.overlap,
            up_bytes=self.up_bytes,
            down_bytes=self.down_bytes,
        )


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a run. Bytes are those on the link of one peer in one direction; the other one has as many."""

    parameters: int
    bytes_a_step: float
    bytes_a_day: float
    mean_bits_per_s: float
    exchange_s: float
    """Seconds from the round of the largest fragment until all peers have its commit."""
    staleness_steps: float
    is_on_time: bool
    rounds_kept: float
    utilisation: dict[str, float]
    """Utilisation by system, on this link."""
    rounds: int
    """Number of exchanges of each fragment in the run."""
    named_share: float
    """Share of the bytes that name learners in commits."""
    checking_share: float
    """Share of a core that checks these learners' signatures."""
    node_bytes: float
    learner_bytes: float
    join_s: float


def control_bytes_per_s(wanted: Wanted) -> float:
    """Return a peer's control traffic: heartbeats, the announcements and answers of rounds, and what commits name.

    With many connections, heartbeats are sent less often; in large runs a peer is connected to few of the others."""
    others = min(wanted.peers - 1, 2 * wanted.together)  # its group, and as many bridges
    interval_s = wanted.heartbeat_s * max(1.0, others / BEAT_PEERS)
    versions_per_s = wanted.names_per_s / wanted.peers
    return CONTROL_BYTES * others * (1 / interval_s + 2 * versions_per_s) + HEADER_BYTES * wanted.names_per_s


def bytes_a_step(wanted: Wanted) -> float:
    """Return the bytes that a peer sends in a step, with headers."""
    away = 1 - 1 / wanted.peers
    exchanged = wanted.parameters * away * (wanted.up_bytes + wanted.down_bytes) / wanted.sync_every
    return exchanged / PAYLOAD_SHARE + control_bytes_per_s(wanted) * wanted.step_s


def exchange_s(wanted: Wanted, lines: PeerLines) -> float:
    """Return the seconds of an exchange of the largest fragment on otherwise idle links."""
    shards, groups = max(wanted.fragments, key=sum), 1 << group_bits(wanted.peers, wanted.together)
    members, parameters = math.ceil(wanted.peers / groups), sum(shards)
    owned = max(max(shards), parameters / wanted.peers)
    turns, levels = commit_turns(members, groups)
    up, down = (8 / PAYLOAD_SHARE / rate for rate in (lines.up_bits_per_s, lines.down_bits_per_s))
    sent = parameters * (wanted.peers - 1) / wanted.peers
    collected = wanted.up_bytes * max(sent * up, owned * (members - 1) * down)
    of_groups = wanted.up_bytes * owned * max(up, (groups - 1) * down) if groups > 1 else 0.0
    named = HEADER_BYTES * wanted.peers
    relayed = max((wanted.down_bytes * owned + named) * turns * up, wanted.down_bytes * parameters * down)
    trips = 2 + levels + (groups > 1)
    return collected + of_groups + relayed + trips * lines.round_trip_s / 2


def commit_turns(members: int, groups: int) -> tuple[int, int]:
    """Return how many times one payload's time passes until all have a commit, and over how many hops the last gets it.

    Payloads go one after the other. The root of a group's tree sends to other groups first
    (``protocol/commit_relay.py``).
    """
    entered, last = [(0, 0)], (0, 0)
    for group in range(groups):
        here = [entered[group]]
        to_groups = _children(groups, group)
        entered += _sent(entered[group], 0, to_groups)
        for place in range(members):
            here += _sent(here[place], 0 if place else to_groups, _children(members, place))
        last = max(last, *here)
    return last


def _children(nodes: int, place: int) -> int:
    """Return how many children a node of the tree has."""
    return max(0, min(FAN_OUT, nodes - 1 - FAN_OUT * place))


def _sent(had: tuple[int, int], before: int, children: int) -> list[tuple[int, int]]:
    """Return turns and hops of the children of a node that ``had`` it so, and sends to so many others before."""
    turns, hops = had
    return [(turns + before + child + 1, hops + 1) for child in range(children)]


def make_plan(wanted: Wanted, lines: PeerLines) -> Forecast:
    """Return the forecast of a run."""
    step_bytes, took_s = bytes_a_step(wanted), exchange_s(wanted, lines)
    rate = min(lines.up_bits_per_s, lines.down_bits_per_s)
    day_bytes = step_bytes * DAY_S / wanted.step_s
    donors_bits = lines.up_bits_per_s * max(1, wanted.peers - 1)
    state_bits = STATE_BYTES * wanted.parameters * 8 / PAYLOAD_SHARE
    return Forecast(
        parameters=wanted.parameters,
        bytes_a_step=step_bytes,
        bytes_a_day=day_bytes,
        mean_bits_per_s=8 * step_bytes / wanted.step_s,
        exchange_s=took_s,
        staleness_steps=took_s / wanted.step_s,
        is_on_time=took_s <= wanted.overlap * wanted.step_s,
        rounds_kept=min(1.0, rate * wanted.step_s / (8 * step_bytes)),
        utilisation=_utilisation(wanted, rate * PAYLOAD_SHARE),
        rounds=wanted.steps // wanted.sync_every,
        named_share=HEADER_BYTES * wanted.names_per_s * wanted.step_s / step_bytes,
        checking_share=CHECK_S * wanted.names_per_s,
        node_bytes=NODE_BYTES * wanted.parameters + NODE_FIXED_BYTES,
        learner_bytes=LEARNER_BYTES * wanted.parameters,
        join_s=state_bits / min(lines.down_bits_per_s, donors_bits),
    )


def _utilisation(wanted: Wanted, bits_per_s: float) -> dict[str, float]:
    bf16 = msgspec.structs.replace(wanted.training, up_bytes=2.0, down_bytes=2.0)
    found = {
        name: system(bf16 if name in ("data parallel", "DiLoCo") else wanted.training, bits_per_s)
        for name, system in SYSTEMS.items()
    }
    return {**found, "p2pdiloco": 1.0}  # learners never wait; rounds are left out instead


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which no round is left out or late."""

    codec: str
    sync_every: int
    overlap: int
    rounds: int
    """Number of exchanges of each fragment with these settings."""


def advise(wanted: Wanted, lines: PeerLines) -> Advice | None:
    """Return the smallest H, and for it the finest codec, with which no round is left out and exchanges take few steps.

    None: no settings achieve that."""
    for sync_every in _growing(wanted.sync_every):
        for codec, size in CODECS:
            tried = msgspec.structs.replace(wanted, sync_every=sync_every, up_bytes=size, down_bytes=size)
            plan = make_plan(tried, lines)
            overlap = max(1, math.ceil(plan.staleness_steps))
            if plan.rounds_kept == 1.0 and overlap <= min(max(MOST_OVERLAP, wanted.overlap), sync_every - 1):
                overlap = max(overlap, min(wanted.overlap, sync_every - 1))
                return Advice(codec=codec, sync_every=sync_every, overlap=overlap, rounds=wanted.steps // sync_every)
    return None


def _growing(first: int) -> Sequence[int]:
    found = [first]
    while found[-1] * 2 <= MOST_SYNC_EVERY:
        found.append(found[-1] * 2)
    return found
