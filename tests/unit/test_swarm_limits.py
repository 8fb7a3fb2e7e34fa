"""Each limit of ``p2pdiloco.swarm.limits`` holds in the code that enforces it, and is told before it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from holders import Holder, members, the_founder

from p2pdiloco.access.certificates import Grant
from p2pdiloco.access.members import NotAMemberError
from p2pdiloco.cli import doctor
from p2pdiloco.net.endpoint import Peers
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.peer.state_proof import lineage_of
from p2pdiloco.protocol.connectivity import listed, prints_in
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, LearnerId, PeerId, RunId, ShardId
from p2pdiloco.protocol.membership import MAX_PEERS
from p2pdiloco.protocol.messages import SIGNATURE_BYTES, Commit, CommitHeader, Contributor, Heartbeat
from p2pdiloco.swarm import limits
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.limits import CONTRIBUTOR_BYTES, LIMITS, Counted, Limit, approached
from p2pdiloco.swarm.run_lookup import RunAnswer
from p2pdiloco.wire.control_messages import COMMIT_BYTES, LINEAGE_BYTES, PeerStatus, decode_message, encode
from p2pdiloco.wire.directory_records import PeerRecord, RunRecord

STATUS = PeerStatus(
    run=cast(Any, "run"), name="r", peer="p", phase="training", step=1, total_steps=2, known=1, live=1, participating=1,
    weight_averaged=1, version_min=0, version_max=0, heads_mark=0, tokens_trained=0, tokens_merged=0,
    tokens_per_second=0.0, train_loss=None, held_out_loss=None, held_out_step=0, bytes_up=0, bytes_down=0,
    blocked_s=0.0,
)  # fmt: skip


def of(counted: Counted) -> list[Limit]:
    return [limit for limit in LIMITS if limit.counted == counted]


# -- what enforces them ------------------------------------------------------------------------------------------------


def connects(peers: int) -> bool:
    """Whether the last of so many peers is served."""
    places, context = Peers(Mock(now=0.0), TransportLimits().connections, {}), Mock()
    context.scores.is_shut_out.return_value = False
    places._context = context
    served = [
        places.handle_proved(
            Mock(
                peer=PeerId(f"p{i}"), host=f"10.{i >> 8}.{i & 255}.1", received_at=0.0, greeting=SimpleNamespace(lane=0)
            )
        )
        for i in range(peers)
    ]
    return served[-1]


def is_known(peers: int) -> bool:
    known = KnownPeers(PeerId("me"))
    for i in range(peers):
        known.learn(PeerId(f"p{i}"), PeerRecord(("/ip4/127.0.0.1/tcp/1",)), 0.0)
    return PeerId(f"p{peers - 1}") in known


def is_admitted(peers: int) -> bool:
    """Whether the last of so many members, whose certificates need not be checked again, has a place."""
    here = members()
    for i in range(peers - 1):
        here._known[PeerId(f"p{i}")] = Grant(subject=PeerId(f"p{i}"), role=FIRST.grant.role, steps=FIRST.grant.steps)
    try:
        return bool(here.admit(FIRST.peer, FIRST.chain, 0.0))
    except NotAMemberError:
        return False


FIRST: Holder = the_founder().certifies()


def commit(contributors: int, size: int | None = None) -> CommitHeader:
    """A commit of so many contributions, filled up to ``size`` bytes as a signed one, or as a message."""
    given = tuple(
        Contributor(
            LearnerId(f"{'k' * 52}{i:05}/{i:08x}"),
            10**9,
            10**9 + 10**6,
            10**5,
            10**5 + 24,
            (),
            bytes(DIGEST_BYTES),
            bytes(SIGNATURE_BYTES),
        )
        for i in range(contributors)
    )
    known = Digest("ab" * DIGEST_BYTES)
    header = CommitHeader(ShardId(0), 1, known, 4, PeerId("owner"), given, 2**50, known, known, known)
    header = msgspec.structs.replace(header, factors=(37,) * contributors)
    for i in count():
        lacking = 0 if size is None else size - len(encode(Commit(header)))
        if lacking <= 0:
            return header
        longer = msgspec.structs.replace(given[i], learner=LearnerId(given[i].learner + "x" * min(lacking, 80)))
        given = (*given[:i], longer, *given[i + 1 :])
        header = msgspec.structs.replace(header, contributors=given)
    raise AssertionError


SIGNED_MORE = len(encode((commit(1), bytes(SIGNATURE_BYTES)))) - len(encode(Commit(commit(1))))


def has_lineage(size: int) -> bool:
    header = commit(LINEAGE_BYTES // CONTRIBUTOR_BYTES - 30, size - SIGNED_MORE)
    assert len(encode((header, bytes(SIGNATURE_BYTES)))) == size
    return bool(lineage_of([(header, bytes(SIGNATURE_BYTES))]))


def is_decoded(size: int) -> bool:
    body = encode(Commit(commit(COMMIT_BYTES // CONTRIBUTOR_BYTES - 30, size)))
    assert len(body) == size
    try:
        return bool(decode_message(body))
    except ValueError:
        return False


def is_heard(peers: int) -> bool:
    """Whether a heartbeat that lists so many peers is understood."""
    prints = frozenset(range(peers))
    beat = Heartbeat(1, 1, 0.0, "training", True, 1, 1.0, 0, 1.0, hears=listed(prints))
    try:
        heard = decode_message(encode(beat))
    except ValueError:
        return False
    assert isinstance(heard, Heartbeat)
    return prints_in(heard.hears or b"") == prints


ENFORCED: list[tuple[Callable[[int], bool], int]] = [
    (connects, of("connected peers")[0].most),
    (is_known, of("known peers")[0].most),
    (is_admitted, of("members")[0].most),
    (has_lineage, LINEAGE_BYTES),
    (is_decoded, COMMIT_BYTES),
    (is_heard, MAX_PEERS),
]


@pytest.mark.parametrize(("holds", "most"), ENFORCED, ids=lambda each: getattr(each, "__name__", None))
def test_what_a_limit_allows_is_done_and_one_more_is_not(holds: Callable[[int], bool], most: int) -> None:
    assert holds(most - 1)
    assert holds(most)
    assert not holds(most + 1)


def test_the_table_counts_contributions_as_large_as_they_are() -> None:
    """A header has so many more bytes for each."""
    more = (len(encode(commit(1000))) - len(encode(commit(500)))) / 500
    assert more == pytest.approx(CONTRIBUTOR_BYTES, rel=0.02)


# -- who is told -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.counted} {limit.most}")
def test_a_limit_is_told_from_four_fifths_on(limit: Limit) -> None:
    def told(number: int) -> bool:
        status, given = STATUS, {}
        match limit.counted:
            case "connected peers":
                status = msgspec.structs.replace(STATUS, connected=number)
            case "known peers":
                status = msgspec.structs.replace(STATUS, known=number + 1)
            case "learners":
                status = msgspec.structs.replace(STATUS, participating=number)
            case "MiB of contributions to one merge":
                given = {"largest_shard": int((number + 0.5) * 2**20 / limits.PAYLOAD_BYTES)}
            case "members":
                given = {"members": number}
        return limit.sentence(number) in approached([status], **given)

    first = next(number for number in count() if number >= 0.8 * limit.most)
    assert told(first)
    assert not told(first - 1)


def test_doctor_tells_before_one_joins() -> None:
    answers = RunAnswer(RunId("a" * 40), RunRecord("story", 1000), (msgspec.structs.replace(STATUS, connected=500),))
    findings, _ = asyncio.run(doctor._run(answers, cast(Any, None)))
    assert [(one.verdict, one.detail) for one in findings[1:]] == [("warning", LIMITS[0].sentence(500))]


def test_one_peer_that_lies_alarms_nobody() -> None:
    liar = msgspec.structs.replace(STATUS, connected=10**6, known=10**6, participating=10**6)
    assert not approached([])
    assert not approached([liar, STATUS, STATUS])
    assert len(approached([liar])) == 4


def test_the_page_on_operating_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for limit in LIMITS:
        assert f"| {limit.most:,} {limit.counted} | {limit.beyond} |" in page
