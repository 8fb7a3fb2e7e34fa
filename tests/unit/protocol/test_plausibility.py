"""Rules P of docs/protocol.md: how much of what a peer declares is believed. H = 4, steps of 0.5 s and 10 tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from stage import (
    SHARD,
    A,
    B,
    C,
    D,
    Stage,
    bare,
    commit_on,
    digest,
    head_of,
    life,
    notes,
    only,
    sent,
    tokens,
    with_payload,
)

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.config import LONGEST_RUN, Sizes
from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import FragmentId, PeerId, ShardId
from p2pdiloco.protocol.messages import Contributor, Head
from p2pdiloco.protocol.suspicion import COMMITS_LEAST

HUGE = 2**55
BURST = 8
"""Two rounds' steps."""
RANGE = 256
"""64 rounds' steps."""
LEAD = 64
"""16 rounds' steps."""


def step_of(stage: Stage) -> int:
    return stage.machine.view.step


def tokens_and_steps(start: int, stop: int, steps: int, peer: PeerId = B) -> Contributor:
    return Contributor(life(peer), start, stop, 0, steps)


# -- steps -------------------------------------------------------------------------------------------------------------


def claims_of_b(stage: Stage, step: int) -> list[msg.Message]:
    ahead = msgspec.structs.replace(stage.contribution(B), step=step)
    return [msg.Heads((), step), msg.Round(FragmentId(0), step, (stage.head(),)), ahead]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("step", [1000, HUGE])
def test_a_claim_moves_the_step_by_two_rounds_at_most(kind: int, step: int) -> None:
    """P1a: however often it is made; and the round that it opens is of no later step, nor what comes of it."""
    stage = Stage(B, C, owners="abc", total_steps=1000)
    for _ in range(100):
        stage.hear(B, claims_of_b(stage, step)[kind])
    assert step_of(stage) <= BURST
    assert stage.machine.contributions.rounds[0].step <= BURST
    effects = stage.work(stage.offer(C) + stage.wait(8.0))
    headers = [commit.header for _, commit in sent(effects, msg.Commit)]
    assert headers
    assert all(header.step <= 2 * BURST for header in headers)
    assert not only(effects, ef.Leave)
    assert stage.machine.view.phase == "training"


def test_a_claim_counts_for_eight_times_the_median_learners_steps_meanwhile() -> None:
    """P1a: the allowance fills with time, and never holds more than two rounds."""
    stage = Stage(B, C)
    stage.announce(B, 1000)
    assert step_of(stage) == BURST
    stage.wait(0.255)
    stage.announce(B, 1000)
    assert step_of(stage) == BURST + 4, "half a step of the median learner"
    stage.wait(60.0)
    stage.announce(B, 1000)
    assert step_of(stage) == 2 * BURST + 4


def test_what_more_than_half_of_all_say_is_believed() -> None:
    """P1b: this peer is one of them."""
    stage = Stage(B, C)
    stage.says(B, step=500)
    stage.hear(B, msg.Heads((), 500))
    assert step_of(stage) == BURST, "one of three"
    stage.says(C, step=400)
    stage.hear(B, msg.Heads((), 500))
    assert step_of(stage) == 400, "two of three"
    lonely = Stage(B)
    lonely.says(B, step=500)
    lonely.hear(B, msg.Heads((), 500))
    assert step_of(lonely) == BURST, "one of two"


def test_who_stood_still_catches_up_at_once() -> None:
    """P1a: with one other peer, which made a step of 0.5 s after the other for an hour."""
    stage = Stage(B)
    stage.train(1)
    stage.now += 3600.0
    stage.tell(ev.Woke())
    stage.announce(B, 7200)
    assert step_of(stage) == 7200


def test_a_newcomer_is_where_most_of_its_shards_are() -> None:
    """P1d: one shard's state that is far ahead of the others does not count."""
    stage = Stage(B, is_founder=False, has_learner=False, fragments=((ShardId(0), ShardId(1), ShardId(2)),))
    heads = tuple(Head(ShardId(shard), 40, digest(f"head {shard}"), 1000) for shard in range(3))
    stage.hear(B, msg.Heads(heads, 0))
    for head, step in zip(heads, (60, 60, 1800), strict=True):
        stage.work(stage.tell(ev.Fetched(B, ev.ShardState(head, step, ()))))
    assert step_of(stage) == 60


def test_no_claim_counts_beyond_the_last_step_and_a_round() -> None:
    """P1e: whoever says it."""
    stage = Stage(B, C, D, total_steps=100)
    for peer in (B, C, D):
        stage.says(peer, step=HUGE)
    stage.hear(B, msg.Heads((), HUGE))
    assert step_of(stage) == 104


def test_a_round_beyond_the_last_that_counts_is_answered() -> None:
    """P1g: at the run's end each version takes a turn more, and who has nothing to give must say so (M3a): once a
    version, however often it is announced."""
    stage = Stage(B, weight=0.0, total_steps=4)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    stage.tell(ev.LearnerPaused(4, 40))
    for version, step in enumerate((8, 9, 10), start=1):
        given = sent(stage.work(stage.announce(B, step), ef.Snapshot), msg.Contribution)
        assert [(to, c.base, c.contributor.tokens) for to, c in given] == [(B, stage.head(), 0)]
        assert not stage.announce(B, step), "it has answered"
        stage.take(stage.commit(tokens(B, 40 * version, 40 * version + 40), step=8))
    assert step_of(stage) == 8


def test_a_follower_is_where_the_others_say_they_are() -> None:
    """P1b: it hears of the end, though the last round is long over."""
    stage = Stage(B, has_learner=False, total_steps=10)
    stage.says(B, step=10, phase="finished", is_participating=False)
    stage.wait(1.0)
    assert step_of(stage) == 10
    assert stage.machine.view.has_finished
    training = Stage(B, total_steps=10)
    training.says(B, step=10)
    training.wait(1.0)
    assert step_of(training) == 0, "who trains waits for rounds"


def test_a_commit_is_of_no_step_far_beyond_its_parents() -> None:
    """P2a: 16 turns at most, else it is not taken."""
    stage = Stage(B, total_steps=1000)
    stage.take(stage.commit(tokens(B, 0, 40), step=LEAD + 1))
    assert stage.head().version == 0
    stage.take(stage.commit(tokens(B, 0, 40), step=LEAD))
    assert stage.head().version == 1
    assert step_of(stage) == BURST, "and that is a claim like any other"
    stage.train(1)
    assert [sync_round.step for _, sync_round in sent(stage.train(4), msg.Round)] == [BURST + 4], (
        "rounds go on from there"
    )


def test_an_owner_keeps_to_the_step_that_others_take() -> None:
    """P2a: after a shard stood still while its learner trained on."""
    stage = Stage(B, owners="ab", total_steps=10**6)
    stage.says(B, is_participating=False)
    effects = stage.work(stage.train(1000))
    [(_, commit)] = sent(effects, msg.Commit)
    assert commit.header.step == LEAD
    assert stage.head().version == 1


# -- what a contribution holds -----------------------------------------------------------------------------------------

TOO_MUCH = {
    "tokens": tokens_and_steps(0, 1001, 10),
    "2^55 tokens": tokens_and_steps(0, HUGE, 10),
    "steps": tokens_and_steps(0, 1000, RANGE + 1),
    "a mark beyond the run": tokens_and_steps(HUGE, HUGE + 10, 1),
    "blocks": Contributor(life(B), 0, 100, 0, 10, tuple(map(Block, range(4)))),
}
LIMITS: dict[str, Any] = {"sizes": Sizes(step_tokens=100, block_tokens=40), "total_steps": 1000}


@pytest.mark.parametrize("contributor", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_contribution_that_no_learner_can_make_is_refused(contributor: Contributor) -> None:
    """P3a: before anything is added."""
    stage = Stage(B, C, owners="abc", has_learner=False, **LIMITS)
    effects = stage.hear(B, stage.contribution(B, 0, 40, contributor=contributor))
    assert [to for to, _ in sent(effects, msg.Refused)] == [B]
    most = Contributor(life(B), 0, 100 * RANGE, 0, RANGE, tuple(map(Block, range(3))))
    assert not sent(stage.hear(B, stage.contribution(B, 0, 40, contributor=most)), msg.Refused)


@pytest.mark.parametrize("contributor", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_commit_that_holds_what_no_learner_can_make_is_not_taken(contributor: Contributor) -> None:
    """P3a: whoever made it."""
    stage = Stage(B, C, blocks=100, **LIMITS)
    stage.take(stage.commit(contributor))
    assert stage.head().version == 0
    stage.take(stage.commit(tokens(B, 0, 50)))
    assert stage.head().version == 1


@pytest.mark.parametrize(("runs", "is_merged"), [(2, True), (8, True), (9, False)])
def test_a_learner_may_make_the_steps_of_a_run_again_but_not_for_ever(runs: int, is_merged: bool) -> None:
    """P3a: it outlived its node, whose state was of the run's beginning (whole peers, seed 2299)."""
    stage = Stage(B, C, owners="abc", has_learner=False, **LIMITS)
    steps = runs * LONGEST_RUN
    late = Contributor(life(B), 10 * steps - 100, 10 * steps, steps - 10, steps)
    refused = sent(stage.hear(B, stage.contribution(B, 0, 40, contributor=late)), msg.Refused)
    assert not refused if is_merged else refused


def test_no_chain_counts_beyond_what_a_message_can_hold() -> None:
    """P3b: near the end of the range nothing is merged any more."""
    stage = Stage(B, C, owners="abc", has_learner=False, is_founder=False)
    full = Head(SHARD, 2**30, digest("full"), 2**56 - 100)
    for peer in (B, C):
        stage.hear(peer, msg.Heads((full,), 0))
    stage.work(stage.tell(ev.Fetched(B, ev.ShardState(full, 0, ()))))
    assert stage.head() == full
    assert sent(stage.offer(B), msg.Refused)
    stage.take(stage.commit(tokens(B, 0, 40)))
    assert stage.head() == full


def test_who_holds_more_than_a_contribution_declares_the_last_of_it() -> None:
    """P3c: and all of it leaves its delta."""
    stage = Stage(B, owners="ba", total_steps=10**6)
    [(_, given)] = sent(stage.give(1000), msg.Contribution)
    assert bare(given.contributor) == Contributor(life(A), 10_000 - 2560, 10_000, 1000 - RANGE, 1000)
    effects = stage.work(stage.take(stage.commit(given.contributor)))
    assert [apply.settled for apply in only(effects, ef.Apply)] == [(given.payload,)]
    assert stage.machine.view.unmerged_tokens() == 0
    stage.work(stage.train(4))
    later = stage.machine.contributions.pending[SHARD].contribution
    assert bare(later.contributor) == Contributor(life(A), 10_000, 10_040, 1000, 1004)


def test_a_commit_that_holds_what_a_learner_never_gave_is_not_taken_by_its_peer() -> None:
    """P3d."""
    stage = Stage(B, C, owners="bac", total_steps=10**6)
    stage.train(3)
    effects = stage.take(stage.commit(tokens(A, 0, 2000)))
    assert stage.head().version == 0
    assert "has not contributed (up to 2000)" in notes(effects, "commit")[0]
    effects = stage.give(5)
    [(_, given)] = sent(effects, msg.Contribution)
    stage.take(stage.commit(given.contributor))
    assert stage.head().version == 1
    assert stage.machine.view.unmerged_tokens() == 0


def test_a_state_that_holds_what_a_learner_never_gave_is_not_taken_by_its_peer() -> None:
    """P3d: one that has what it gave is."""
    stage = Stage(B, C, owners="bac", total_steps=10**6)
    [(_, given)] = sent(stage.give(4), msg.Contribution)
    heavier = Head(SHARD, 3, digest("heavier"), 5000)
    for mark, is_taken in ((given.contributor.tokens_to + 1, False), (given.contributor.tokens_to, True)):
        marks = ((life(A), ev.Mark(mark, 4, 1)),)
        effects = stage.work(stage.bring(ev.ShardState(heavier, 4, marks), B))
        assert bool(only(effects, ef.Install)) == is_taken
        assert (stage.head() == heavier) == is_taken
        assert any("has not contributed" in note for note in notes(effects, "fetch")) != is_taken


def counted(stage: Stage, *given: Contributor) -> int:
    """The tokens that a commit of these adds to the chain, once it is taken."""
    before = stage.head()
    stage.take(stage.commit(*given))
    assert stage.head().version == before.version + 1
    return stage.head().tokens - before.tokens


@pytest.mark.parametrize("usual", [10, 40])
def test_a_version_counts_for_at_most_one_usual_contribution_each(usual: int) -> None:
    """P3e: so one member neither ends a run with a budget nor makes its chain the heaviest with a number."""
    liar = PeerId("e")
    stage = Stage(B, C, D, liar, owners="bacde", has_learner=False, total_steps=10**6)
    peers = (B, C, D)
    assert counted(stage, *(tokens(peer, 0, usual) for peer in peers)) == 3 * usual
    claim = Contributor(life(liar), 0, 10 * RANGE, 0, RANGE)
    assert counted(stage, *(tokens(peer, usual, 2 * usual) for peer in peers), claim) == 4 * usual
    assert stage.machine.core.chains[SHARD].marks[life(liar)].tokens == claim.tokens_to, "merged it is whole"
    rest = (
        tokens(peer, 2 * usual, 2 * usual + more) for peer, more in zip(peers, (10, usual, usual + 10), strict=True)
    )
    assert counted(stage, *rest) == min(2 * usual + 20, 3 * usual), "what one has less, another may have more"


def count(counts: TokenCounts, *tokens: int, first: int = 512) -> tuple[int, TokenCounts]:
    """The next version, of what so many peers give, always the same ones: what it counts for, and the next record."""
    version = max((at for _, at in counts.usual), default=0) + 1
    return counts.count(version, {PeerId(f"p{n}"): tokens[n] for n in range(len(tokens))}, first)


def usual_of(counts: TokenCounts) -> int:
    """The usual contribution."""
    return count(counts, 10**9)[0]


def test_the_first_contributions_count_for_at_most_two_rounds_of_the_runs_batches() -> None:
    """P3e: there is no usual one yet."""
    limits = Stage().machine.core.chains[SHARD].limits
    first = limits.first_tokens
    assert limits.round_steps == 4
    assert first == 4 * limits.step_tokens // 16
    assert count(NOTHING_COUNTED, first, first=first)[0] == first
    for keys in (1, 2, 8):
        assert count(NOTHING_COUNTED, *([10**9] * keys), first=first)[0] == 2 * first * keys


def test_what_is_usual_lies_between_the_middle_ones_of_a_version_and_moves_slowly() -> None:
    """P3g: one of four that declares most, two of four, and one version in four that holds nothing else, move it
    little, up or down; one of few does not move it."""
    _, counts = count(NOTHING_COUNTED, 512, 512, 512, 3_145_728)
    assert usual_of(counts) == 512
    for given in ([512, 512, 512, 3_145_728], [512, 512, 3_145_728, 3_145_728], [1, 1, 512, 512], [1, 512, 512]):
        after = counts
        for _ in range(40):
            _, after = count(after, *given)
        assert usual_of(after) == 512
    assert usual_of(count(counts, 1)[1]) == 512, "one of four"
    after = counts
    for version in range(80):
        _, after = count(after, *([3_145_728] * 4 if version % 4 == 3 else [512] * 4))
        assert usual_of(after) < 2 * 512
    for _ in range(40):
        _, counts = count(counts, 64, 64, 64)
    assert usual_of(counts) == 64, "it follows what all do"
    _, counts = count(NOTHING_COUNTED, 10)
    for _ in range(40):
        _, counts = count(counts, 512)
    assert usual_of(counts) >= 300, "a young chain's grows"


def test_who_was_left_out_counts_for_the_versions_that_it_waited() -> None:
    """P3e, P3g: else an owner that leaves honest contributions out shortens the run, and raises what is usual."""
    stage = Stage(B, C, D, has_learner=False, total_steps=10**6)
    assert counted(stage, *(tokens(peer, 0, 40) for peer in (B, C, D))) == 120
    for version in range(1, 16):
        start = 40 * version
        assert counted(stage, tokens(B, start, start + 40), tokens(C, start, start + 40)) == 80
    assert counted(stage, tokens(B, 640, 680), tokens(C, 640, 680), tokens(D, 40, 1240)) == 80 + 16 * 40
    assert counted(stage, tokens(B, 680, 2040), tokens(PeerId("e"), 0, 40)) == 80


def test_a_record_that_names_versions_to_come_is_taken_for_one_of_the_last() -> None:
    """P3e: whoever offers a state chooses the record before its lineage."""
    _, honest = count(NOTHING_COUNTED, 512, 512, 512)
    for last in (-(10**6), 1, 2, 10**6):
        record = msgspec.structs.replace(honest, usual=tuple((one, last) for one, _ in honest.usual))
        counts_for, after = record.count(2, {PeerId("p0"): 512, PeerId("p1"): 10**9}, 512)
        assert 2 * 512 <= counts_for <= 2 * 16 * 512
        assert sorted(at for _, at in after.usual) == ([1, 2, 2] if last == 1 else [2, 2]), "and p2 is soon forgotten"


def test_a_commit_whose_usual_is_not_the_chains_is_not_taken() -> None:
    """P3g: nor one whose tokens are those that were declared."""
    stage = Stage(B, C, owners="bac", has_learner=False, total_steps=10**6)
    stage.take(stage.commit(tokens(B, 0, 40), tokens(C, 0, 40)))
    sound = stage.commit(tokens(B, 40, 80), tokens(C, 40, 1040))
    assert sound.tokens == 80 + 80
    for wrong in (
        msgspec.structs.replace(sound, tokens=80 + 40 + 1000),
        msgspec.structs.replace(sound, counts=NOTHING_COUNTED.count(2, {B: 4000}, 10**6)[1]),
    ):
        effects = stage.take(wrong)
        assert "its cumulative tokens are wrong" in notes(effects, "commit")[0]
    stage.take(sound)
    assert stage.head() == head_of(sound)


def test_a_contribution_that_most_others_disagree_with_counts_for_fewer_tokens() -> None:
    """P3h: for the budget and the fork rule; what is merged is merged whole."""
    stage = Stage(B, C, D, owners="bacd", has_learner=False, total_steps=10**6)
    contributors = [tokens(peer, 0, 40) for peer in (B, C, D)]
    header = stage.commit(*contributors, factors=(100, 100, 25))
    assert header.tokens == 40 + 40 + 10
    stage.take(header)
    chain = stage.machine.core.chains[SHARD]
    assert chain.head is not None
    assert chain.head.tokens == 90
    assert chain.counts.merged == 120
    assert {mark.tokens for mark in chain.marks.values()} == {40}
    assert stage.commit(tokens(B, 40, 41), tokens(C, 40, 80), factors=(10, 100)).tokens == 90 + 1 + 40, "but for one"


def test_a_commit_whose_factors_cannot_be_is_not_taken() -> None:
    """P3h: one for each contributor, and none below a tenth."""
    stage = Stage(B, C, owners="bac", has_learner=False, total_steps=10**6)
    contributors = tokens(B, 0, 40), tokens(C, 0, 40)
    for factors, why in (((100,), "one factor for each"), ((9, 100), "is not between"), ((0, 0), "is not between")):
        effects = stage.take(stage.commit(*contributors, factors=factors))
        assert why in notes(effects, "commit")[0]
    effects = stage.take(msgspec.structs.replace(stage.commit(*contributors), factors=(50, 100)))
    assert "its cumulative tokens are wrong" in notes(effects, "commit")[0]
    sound = stage.commit(*contributors, factors=(10, 100))
    stage.take(sound)
    assert stage.head() == head_of(sound)


# -- ownership, data ---------------------------------------------------------------------------------------------------


def test_a_weight_counts_for_at_most_twice_the_median() -> None:
    """P4a."""
    stage = Stage(B, C, D)
    stage.says(D, weight=1e12)
    assert dict(stage.machine.core.membership.owners.candidates) == {A: 1.0, B: 1.0, C: 1.0, D: 2.0}
    pair = Stage(B)
    pair.says(B, weight=1e12)
    assert dict(pair.machine.core.membership.owners.candidates) == {A: 1.0, B: 2.0}, "of two, the smaller one"


def test_an_owner_that_lets_the_takeover_time_pass_owns_last_for_a_while() -> None:
    """P4b: four times as long each time; a commit of its makes up for it."""
    stage = Stage(B, C, owners="bca")
    stage.give()
    takeover_s = stage.machine.aggregation.waits().takeover_s
    stage.wait(takeover_s + 0.6)
    weights = dict(stage.machine.core.membership.owners.candidates)
    assert weights[B] < 1e-6 < weights[C]
    stage.take(stage.commit(tokens(C, 0, 40), owner=C), sender=C)
    stage.wait(4 * 3 * takeover_s)
    assert dict(stage.machine.core.membership.owners.candidates)[B] == 1.0
    stage.machine.core.membership.on_takeover_missed(B, stage.now, 1.0)
    stage.wait(16 * 3 * 1.0 - 0.6)
    assert dict(stage.machine.core.membership.owners.candidates)[B] < 1e-6
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    for version, (givers, is_suspect) in enumerate((((B,), False), ((B,), True), ((B, C, D), True))):
        small_commits = stage.machine.aggregation.small_commits
        for _ in range(COMMITS_LEAST if is_suspect else 0):
            small_commits.record(B, is_small=True)
            small_commits.record(C, is_small=False)
        stage.machine.core.membership.on_takeover_missed(B, stage.now, 1.0)
        stage.take(stage.commit(*(tokens(peer, 40 * version, 40 * version + 40) for peer in givers), owner=B))
        stage.wait(0.6)
        is_last = dict(stage.machine.core.membership.owners.candidates)[B] < 1e-6
        assert is_last == (version == 1), "not by its own contribution alone, if it regularly leaves others out"


@pytest.mark.parametrize("is_reconnecting", [False, True])
def test_forty_heavy_owners_that_never_merge_do_not_stop_rounds(is_reconnecting: bool) -> None:
    """P4b: each of them is waited for once, and the next versions come without them, also if they reconnect."""
    idle = tuple(PeerId(f"idle {i}") for i in range(40))
    stage = Stage(B, *idle, total_steps=10**6, takeover_ceiling_s=10.0)

    def connect(*peers: PeerId) -> None:
        for peer in peers:
            stage.says(peer, weight=1e12, is_participating=False)

    connect(*idle)
    stage.says(B, is_participating=False, weight=0.0)
    times = []
    for _ in range(6):
        if is_reconnecting:
            for peer in idle:
                stage.tell(ev.PeerDisconnected(peer, "it reconnects"))
                stage.tell(ev.PeerConnected(peer))
            connect(*idle)
        began_at, version = stage.now, stage.head().version
        stage.work(stage.train(4))
        while stage.head().version == version:
            stage.work(stage.wait(0.5))
        times.append(stage.now - began_at)
    assert times[0] < 41 * stage.config.takeover_ceiling_s
    assert max(times[3:]) <= stage.config.takeover_ceiling_s


def test_of_a_peers_claims_no_more_count_than_a_learner_holds() -> None:
    """D2c: the first 64."""
    stage = Stage(B, blocks=100)
    stage.says(B, claims=tuple(map(Block, range(100))))
    assert stage.machine.core.membership.claims_of(B) == tuple(map(Block, range(64)))


# -- memory ------------------------------------------------------------------------------------------------------------


def ahead(stage: Stage, peer: PeerId, shard: int, size: int) -> msg.Contribution:
    head = Head(ShardId(shard), 9, digest(f"ahead {shard}"), 9999)
    given = with_payload(tokens(peer, 0, 40), f"{peer} {shard} {size}")
    return stage.contribution(peer, 0, 40, base=head, shard=ShardId(shard), payload_bytes=size, contributor=given)


def test_what_waits_for_a_later_head_has_few_bytes() -> None:
    """P6a: one each, and more within a peer's share of ``early_bytes``, over all shards."""
    shards = tuple(map(ShardId, range(4)))
    stage = Stage(B, C, has_learner=False, fragments=(shards,), early_bytes=1000)
    assert stage.machine.wants(B, ahead(stage, B, 0, 500))
    assert stage.machine.wants(B, ahead(stage, B, 0, 501)), "else no swarm of hundreds could give anything early"
    for shard in range(4):
        stage.hear(B, ahead(stage, B, shard, 200))
    assert sum(len(stage.machine.payloads(shard)) for shard in shards) == 2
    assert sent(stage.hear(B, ahead(stage, B, 3, 200)), msg.Refused), "and its sender is told"
    assert not stage.machine.wants(B, ahead(stage, B, 3, 101))
    assert stage.machine.wants(C, ahead(stage, C, 3, 200)), "others have shares of their own"
    stage.hear(B, ahead(stage, B, 0, 300))
    assert sum(len(stage.machine.payloads(shard)) for shard in shards) == 2, (
        "a newer one for the same shard takes the place of the old one"
    )


def test_no_memory_is_taken_for_what_cannot_be_used() -> None:
    """P6a: in another's name, for a shard that is not there, or while states are missing."""
    stage = Stage(B)
    assert stage.machine.wants(B, stage.contribution(B))
    assert not stage.machine.wants(B, stage.contribution(C))
    assert not stage.machine.wants(C, stage.contribution(C))
    assert not stage.machine.wants(B, stage.contribution(B, shard=ShardId(1)))
    assert not stage.machine.wants(B, stage.contribution(B, base=Head(ShardId(1), 9, digest("x"), 9999)))
    assert not stage.machine.wants(B, stage.contribution(B, shard=ShardId(7), base=Head(ShardId(7), 0, digest("x"), 0)))
    joining = Stage(B, is_founder=False, has_learner=False)
    assert not joining.machine.wants(B, stage.contribution(B))


def test_commits_that_wait_are_bounded_over_all_shards() -> None:
    """B1c: four logs, and four for each shard."""
    shards = tuple(map(ShardId, range(64)))
    stage = Stage(B, has_learner=False, fragments=(shards,), log_length=8)
    for shard in shards:
        for version in range(2, 10):
            head = Head(shard, version, digest(f"{shard} {version}"), 100 * version)
            stage.hear(B, msg.Commit(commit_on(head, tokens(B, 100 * version, 100 * version + 10))))
    assert sum(len(stage.machine.payloads(shard)) for shard in shards) == 4 * (8 + 64)


# -- siblings ----------------------------------------------------------------------------------------------------------


def test_heads_are_one_of_each_shard() -> None:
    """S4: a list that names one twice is ignored, and not answered a thousand times."""
    stage = Stage(B)
    stage.take(stage.commit(tokens(B, 0, 40)))
    lighter = tuple(Head(SHARD, 1, digest(f"fork {i}"), 1) for i in range(1000))
    assert not sent(stage.hear(B, msg.Round(FragmentId(0), 4, lighter)), msg.Heads)
    assert len(sent(stage.hear(B, msg.Round(FragmentId(0), 4, lighter[:1])), msg.Heads)) == 1
    heavier = tuple(Head(SHARD, 2, digest(f"fork {i}"), 100 + i) for i in range(2))
    assert not sent(stage.hear(B, msg.Heads(heavier, 4)) + stage.wait(5.0), msg.CommitsRequest)


def test_who_was_asked_in_vain_is_not_asked_again_at_once() -> None:
    """A3d: heads that nobody delivers do not keep others' from being fetched."""
    stage = Stage(B, C)
    real = head_of(stage.commit(tokens(C, 0, 40)))

    def asked_within(seconds: float) -> set[PeerId]:
        asked: set[PeerId] = set()
        for _ in range(round(seconds / 0.1)):
            effects = stage.hear(B, msg.Heads((Head(SHARD, 9, digest("none"), HUGE),), 4))
            effects += stage.hear(C, msg.Heads((real,), 4)) + stage.wait(0.1)
            asked |= {to for to, _ in sent(effects, msg.CommitsRequest)}
        return asked

    assert asked_within(1.0) == {B}
    assert asked_within(2.0) == {C}, "B's head is heavier, but leads nowhere"


def test_one_peer_that_answers_late_does_not_make_all_wait() -> None:
    """P7d: what it echoes late, or says that it does."""
    stage = Stage(B, C, D)
    views = stage.machine.core.membership.peers
    for peer, trip_s in ((B, 0.1), (C, 0.2), (D, 30.0)):
        views[peer].round_trip_s = trip_s
        stage.beats.pop(peer)
    stage.tell(ev.PeerDisconnected(PeerId("nobody"), "makes the machine look"))
    assert stage.machine.core.membership.slowest_round_trip_s == pytest.approx(0.5 + 8 * 0.2)
    views[D].round_trip_s = 1.5
    stage.tell(ev.PeerDisconnected(PeerId("nobody"), "makes the machine look"))
    assert stage.machine.core.membership.slowest_round_trip_s == 1.5, "an honest slow line counts in full"


IMPOSSIBLE = {
    "step": {"step": 10 * LEAD + 1},
    "step beyond any run": {"step": LONGEST_RUN + LEAD + 1, "head": Head(SHARD, 2**40, digest("h"), 1000)},
    "tokens": {"head": Head(SHARD, 10, digest("h"), 10 * 4096 * RANGE * 100 + 1)},
    "mark": {"marks": ((life(B), ev.Mark(2**57, 1, 1)),)},
    "negative mark": {"marks": ((life(B), ev.Mark(-1, 1, 1)),)},
    "mark of a later version": {"marks": ((life(B), ev.Mark(1, 1, 11)),)},
}


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_state_that_no_chain_has_is_not_taken(changes: dict[str, Any]) -> None:
    """P7c: and another peer is asked."""
    stage = Stage(B, C, is_founder=False, has_learner=False, total_steps=10**6, sizes=Sizes(step_tokens=100))
    sound = ev.ShardState(Head(SHARD, 10, digest("h"), 1000), 40, ((life(B), ev.Mark(500, 50, 10)),))
    stage.hear(B, msg.Heads((sound.head,), 40))
    stage.hear(C, msg.Heads((sound.head,), 40))
    effects = stage.tell(ev.Fetched(B, msgspec.structs.replace(sound, **changes)))
    assert not only(effects, ef.Install)
    assert [fetch.peer for fetch in only(effects, ef.Fetch)] == [C]
    assert only(stage.tell(ev.Fetched(C, sound)), ef.Install)
