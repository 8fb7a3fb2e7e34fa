"""Limits on the size of a swarm, in one table, so that people are told before one is reached.

Each limit is enforced where its constant is defined. What an early contribution may take, and the list in a heartbeat,
limit no swarm that these allow.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median_high
from typing import Literal, NamedTuple

from p2pdiloco.access.members import KNOWN_LIMIT
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.audits import MOST_AUDITED_BYTES
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.swarm.known_peers import MAX_KNOWN
from p2pdiloco.wire.control_messages import COMMIT_BYTES, LINEAGE_BYTES, PeerStatus

WARNED_FROM = 0.8
"""Share of a limit from which on people are warned."""
CONTRIBUTOR_BYTES = 182
"""Bytes of one contribution in a commit's header, without blocks of data."""
PAYLOAD_BYTES = 0.51
"""Most bytes per parameter of a contribution in int4."""
_FEWER = "let several GPUs train as one peer (torchrun), or start a second run"
Counted = Literal["connected peers", "MiB of contributions to one merge", "learners", "known peers", "members"]


class Limit(NamedTuple):
    """Up to ``most`` of ``counted``; beyond that, ``beyond``, because of ``why``."""

    counted: Counted
    most: int
    beyond: str
    why: str
    remedy: str

    def sentence(self, count: int) -> str:
        """Return what people are told when ``count`` comes close."""
        much = f"{count:,} {self.counted}, of at most {self.most:,}"
        return f"{much}: beyond that {self.beyond}, because {self.why}. What to do: {self.remedy}"


LIMITS = (
    Limit(
        "connected peers",
        TransportLimits().connections,
        "newcomers are turned away",
        f"every peer is connected to all others in a run of up to {MOST_TOGETHER} learners",
        f"let followers leave, {_FEWER}",
    ),
    Limit(
        "learners",
        LINEAGE_BYTES // CONTRIBUTOR_BYTES,
        "peers that come back follow the chain of most peers, and not the longest one",
        "no commit fits into the history that comes with a state",
        _FEWER,
    ),
    Limit(
        "learners",
        COMMIT_BYTES // CONTRIBUTOR_BYTES,
        "all peers refuse commits, so training stops",
        "a commit names its contributions in one message",
        _FEWER,
    ),
    Limit(
        "MiB of contributions to one merge",
        MOST_AUDITED_BYTES >> 20,
        "nobody finds an owner that merges wrongly",
        "auditors fetch no more",
        "choose a smaller schedule.max_shard in the next run",
    ),
    Limit(
        "known peers",
        MAX_KNOWN,
        "this peer connects to no further ones",
        "its table of peers is full",
        "let peers that do not train leave, or start a second run",
    ),
    Limit(
        "members",
        KNOWN_LIMIT,
        "newcomers are not admitted",
        "every peer keeps all members that the run has had",
        "export the model and start a new run from it",
    ),
)


def approached(statuses: Collection[PeerStatus], largest_shard: int = 0, members: int = 0) -> list[str]:
    """Return a sentence for each limit of which WARNED_FROM is reached, as most of these peers count.

    Args:
        largest_shard: parameters of the run's largest shard; 0: not known.
        members: members that the run has had, without the founder; 0: not known.
    """
    if not statuses:
        return []
    learners = median_high(status.participating for status in statuses)
    counts: dict[Counted, int] = {
        "connected peers": median_high(status.connected for status in statuses),
        "known peers": median_high(status.known for status in statuses) - 1,
        "learners": learners,
        "MiB of contributions to one merge": int(min(learners, MOST_TOGETHER) * PAYLOAD_BYTES * largest_shard) >> 20,
        "members": members,
    }
    return [
        limit.sentence(counts[limit.counted]) for limit in LIMITS if counts[limit.counted] >= WARNED_FROM * limit.most
    ]
