"""Rules V of docs/protocol.md: what an owner may put into a commit, and what becomes of one that nobody takes."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
import torch
from stage import SHARD, A, B, C, D, Stage, commit_on, digest, head_of, life, notes, only, sent, tokens

from p2pdiloco.codec import compression, digests, quantization
from p2pdiloco.codec.digests import StateForm, packed
from p2pdiloco.codec.formats import recipe
from p2pdiloco.peer.learner_updates import Moves
from p2pdiloco.peer.model_state import ContributionError, MergeResult, ModelState, Staged, UnfitCommitError, payload_of
from p2pdiloco.peer.state_proof import is_listed
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import record_of
from p2pdiloco.protocol.config import Sizes
from p2pdiloco.protocol.counted_tokens import USUAL_VERSIONS
from p2pdiloco.protocol.data_blocks import Trained
from p2pdiloco.protocol.ids import FragmentId, PeerId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.norm_bound import (
    MEMORY,
    MOST_CHANGE,
    MOST_OCTAVES,
    NO_NORM,
    OCTAVE,
    NormBound,
    counted_steps,
    octaves,
)
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire.control_messages import StateOffer, StateProof

ELEMENTS = 600
ROUND = 24
NOTHING = Moves(None, (), (), False)
HUGE = struct.pack("<BBHI", 2, 3, 0, ELEMENTS) + b"\x7e" * ELEMENTS + b"\x96" * ELEMENTS
"""A body in bf16, each value 1e38: two of them add up to no number."""
TINY = struct.pack("<BBHI", 2, 3, 0, ELEMENTS) + bytes(ELEMENTS) + b"\1" + bytes(ELEMENTS - 1)
"""One value 2^-133, the others 0."""
LONG, BACK = (
    struct.pack("<BBHI", 2, 3, 0, ELEMENTS) + high * ELEMENTS + bytes(ELEMENTS) for high in (b"\x78", b"\xf8")
)
"""Each value 2^113, and each -2^113."""


def unfit(stage: Stage, header: msg.CommitHeader, sender: PeerId = B) -> list[ef.Effect]:
    """A commit comes whose values do not fit."""
    effects = stage.hear_in_turn(sender, header)
    assert only(effects, ef.Apply)
    return effects + stage.tell(ev.Failed("values", header.shard, None, "too long"))


def owners(stage: Stage) -> set[PeerId]:
    return {peer for peer, _ in stage.machine.core.membership.owners.candidates}


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_a_merged_step_is_at_most_a_leap_longer_than_those_before() -> None:
    """V1b: and the first one no longer than parameters can move."""
    stage = Stage(B, C, has_learner=False, sizes=Sizes(elements=(100,)))
    first = stage.machine.core.chains[SHARD].longest((tokens(C, 0, 40),))
    assert first == pytest.approx(math.sqrt(100) * 4)  # of 4 steps
    for length in (1.01 * first, math.inf, math.nan):
        apart = Stage(B, C, has_learner=False, sizes=Sizes(elements=(100,)))
        effects = apart.take(counted(apart, 40, length))
        assert "fits" in notes(effects, "commit")[0]
        assert apart.head().version == 0
    stage.take(counted(stage, 40, 1.0))
    assert stage.head().version == 1
    longest = stage.machine.core.chains[SHARD].longest((tokens(C, 40, 80),))
    assert longest == pytest.approx(16.0)
    old = NormBound(MEMORY, 0)
    assert old.longest(4, 4, 1.0) == pytest.approx(24.0), "4 steps, each of at most 6"
    stage.take(counted(stage, 40, 0.99 * longest))
    assert stage.head().version == 2
    effects = stage.take(counted(stage, 40, 1e30))
    assert stage.head().version == 2
    assert "length 1e+30" in notes(effects, "commit")[0]


def test_steps_that_one_member_declares_make_no_update_longer() -> None:
    """V1b: an owner that declares the most would else put in a step of 8 times the length."""
    for steps, found in (((13,), 13), ((40,), 40), ((13, 14, 20), 20), ((40, 50, 1536), 50), ((30, 1536), 30)):
        assert counted_steps(steps, ROUND) == found
    for liars in ((13, 1536), (13, 14, 1536), (13, 14, 1536, 1536)):
        assert counted_steps(liars, ROUND) == ROUND
    stage = Stage(B, C, D, has_learner=False)
    several = tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40)
    chain = stage.machine.core.chains[SHARD]
    stage.take(stage.commit(*several, length=4.0, record=chain.record_after(1, several, 4.0)))
    both, sync_round = (tokens(B, 40, 80), tokens(C, 40, 80)), 10 * chain.limits.round_steps
    assert chain.longest((*both, tokens(D, 40, 40 + 64 * sync_round))) == chain.longest(
        (*both, tokens(D, 40, 40 + sync_round))
    )
    longer = chain.longest((tokens(B, 40, 40 + 64 * sync_round), *both[1:], tokens(D, 40, 40 + 64 * sync_round)))
    assert longer == 8 * chain.longest((*both, tokens(D, 40, 40 + sync_round))), "most of them were away"


def counted(stage: Stage, given: int, length: float) -> msg.CommitHeader:
    """A child of the head of so many more tokens of c's, and of this length; all else is as it should be."""
    chain = stage.machine.core.chains[SHARD]
    before = max((mark.tokens for _, mark in chain.state().marks), default=0)
    contributors = (tokens(C, before, before + given),)
    is_sound = 0.0 < length < 1e38
    record = chain.record_after(stage.head().version + 1, contributors, length if is_sound else 1.0)
    return stage.commit(*contributors, length=length, record=record)


def test_the_mean_of_lengths_is_the_same_everywhere() -> None:
    """V1c: integers, without a logarithm; it is in the record, and travels with the state."""
    assert [octaves(x) for x in (0.5, 1.0, 1.5, 2.0, 3.0)] == [-OCTAVE, 0, OCTAVE // 2, OCTAVE, OCTAVE + OCTAVE // 2]
    stage = Stage(B, C, has_learner=False)
    stage.take(counted(stage, 40, 8.0))
    state = stage.machine.core.chains[SHARD].state()
    assert state.norm_bound == NormBound(1, OCTAVE), "8 long after 4 steps"
    assert stage.machine.core.chains[SHARD].log[-1].record == record_of(dict(state.marks), Trained(), state.norm_bound)
    assert record_of(dict(state.marks), Trained(), NormBound(1, 0)) != record_of(dict(state.marks), Trained())
    other = Stage(B, has_learner=False, is_founder=False)
    other.hear(B, msg.Heads((state.head,), 0))
    other.work(other.tell(ev.Fetched(B, state)))
    assert other.machine.core.chains[SHARD].norm_bound == state.norm_bound
    apart = Stage(B, has_learner=False, is_founder=False)
    for norm_bound in (NormBound(MEMORY + 1, 0), NormBound(-1, 0), NormBound(1, MOST_OCTAVES + 1)):
        effects = apart.tell(ev.Fetched(B, msgspec.structs.replace(state, norm_bound=norm_bound)))
        assert "its norm bound is malformed" in notes(effects, "fetch")[0]


def test_an_owner_in_four_that_leaps_raises_the_mean_by_little() -> None:
    """V1c: nothing counts for more than a leap, up or down; what has no length counts for nothing."""
    norm_bound = NO_NORM
    for version in range(400):
        longest = norm_bound.longest(ROUND, ROUND, 1.0)
        norm_bound = norm_bound.after(longest if version % 4 == 3 else float(ROUND), ROUND, ROUND)
        assert norm_bound.octaves < 2 * OCTAVE + MOST_CHANGE // MEMORY
    assert NormBound(8, 0).after(1e-30, ROUND, ROUND).octaves == -MOST_CHANGE // MEMORY
    assert norm_bound.after(0.0, ROUND, ROUND) is norm_bound


def test_few_contributions_move_the_model_no_farther_than_usual_and_raise_no_bound() -> None:
    """V1g: else an owner that merges its own, and its accomplice's, again and again, may go ever farther."""
    usual = NormBound(MEMORY, 0)
    for steps, longest in ((1, 1.0), (ROUND, ROUND), (64 * ROUND, ROUND)):
        assert usual.longest(steps, ROUND, 1.0, is_few=True) == longest < usual.longest(steps, ROUND, 1.0)
    assert usual.after(2.0 * ROUND, ROUND, ROUND, is_few=True) is usual
    stage = Stage(B, C, D, has_learner=False)
    several = tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40)
    chain = stage.machine.core.chains[SHARD]
    stage.take(stage.commit(*several, length=4.0, record=chain.record_after(1, several, 4.0)))
    alone = (tokens(B, 40, 80),)
    assert chain.longest((*alone, tokens(C, 40, 80))) == pytest.approx(64.0), "two of three"
    assert chain.longest(alone) == pytest.approx(4.0)
    for length, version in ((4.1, 1), (4.0, 2)):
        stage.take(stage.commit(*alone, length=length, record=chain.record_after(2, alone, length)))
        assert stage.head().version == version
    assert (chain.norm_bound.counted, chain.counts.versions) == (1, 1), "it has raised nothing"


@pytest.mark.parametrize(
    ("usual", "enough"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (8, 6), (10, 7), (16, 12)]
)
def test_so_many_of_the_usual_contributors_prove_enough(usual: int, enough: int) -> None:
    """V1g: that two of five, or of eight, are fewer than half of those whom a merge holds, whoever owns it."""
    peers = [PeerId(f"p{number:02}") for number in range(usual)]
    stage = Stage(*peers, has_learner=False)
    chain = stage.machine.core.chains[SHARD]
    assert not chain.is_few([tokens(peers[0], 0, 40)]), "before the first version nobody is missing"
    stage.take(stage.commit(*(tokens(peer, 0, 40) for peer in peers), owner=peers[0]), sender=peers[0])
    for number in range(usual + 1):
        strangers = [tokens(PeerId(f"s{other}"), 0, 40) for other in range(3)]
        assert chain.is_few([*(tokens(peer, 40, 80) for peer in peers[:number]), *strangers]) == (number < enough)


def test_who_has_not_contributed_for_sixteen_versions_is_not_missing_any_more() -> None:
    """V1g: and who owns most versions cannot make others forgotten."""
    stage = Stage(B, C, D, has_learner=False)
    chain = stage.machine.core.chains[SHARD]
    stage.take(stage.commit(tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40)))
    for version in range(1, USUAL_VERSIONS):
        assert chain.is_few([tokens(B, 40 * version, 40 * version + 40)])
        stage.take(stage.commit(tokens(B, 40 * version, 40 * version + 40)))
    stage.take(stage.commit(tokens(B, 640, 680)))
    assert not chain.is_few([tokens(B, 680, 720)])


def test_learners_that_come_back_and_rates_that_are_warmed_up_fit() -> None:
    """V1b: half of 64 rounds straight on in one step, and all of a young chain's; twelvefold after a first contribution
    of one step."""
    norm_bound = NO_NORM
    for _ in range(MEMORY):
        norm_bound = norm_bound.after(float(ROUND), ROUND, ROUND)
        assert norm_bound.longest(64 * ROUND, ROUND, 1.0) >= (32 if norm_bound.counted == MEMORY else 64) * ROUND
    norm_bound = NO_NORM.after(1.0, 1, ROUND)
    for sync_round in range(1, 40):  # 1,000 steps of warm-up
        length = ROUND * (ROUND * sync_round - ROUND / 2)
        assert length <= norm_bound.longest(ROUND, ROUND, 1.0)
        norm_bound = norm_bound.after(length, ROUND, ROUND)


# -- tensors -----------------------------------------------------------------------------------------------------------


class Owner:
    """A shard's state, and commits of one contribution."""

    def __init__(self) -> None:
        tensors = (TensorSpec(name="all", shape=(ELEMENTS,), merge="rda", fragment=FragmentId(0)),)
        self.state = ModelState(
            make_layout(tensors, 1, 1 << 20, "rda"),
            OuterConfig(learning_rate=0.7, momentum=0.9),
            CodecConfig(),
            SharedVectors.create(ELEMENTS),
            round_steps=ROUND,
        )
        self.state.put(SHARD, digest("zero"), torch.zeros(ELEMENTS), self.state.form.still(ELEMENTS))

    def merge(self, scale: float, longest: float = math.inf) -> MergeResult:
        """A step of ones times ``scale``."""
        self.state.shifts.begin_snapshot(FragmentId(0))
        self.state.shifts.part("snapshot", SHARD).copy_(self.state.theta - scale)
        self.state.shifts.complete_snapshot(FragmentId(0))
        payload, _ = self.state.encode(SHARD, digest("zero"))
        return self.state.merge(SHARD, digest("zero"), 1, [(tokens(C, 0, 40), payload)], None, longest)

    def apply(self, merged: MergeResult, length: float, listed: bytes | None = None) -> None:
        """As whoever takes a commit that declares ``length``."""
        result = digest_of(merged.digests if listed is None else listed)
        parent = msg.Head(SHARD, 0, digest("zero"), 0)
        changes = {"payload": merged.payload_digest, "result": result, "length": length}
        header = commit_on(parent, tokens(C, 0, 40), **changes)
        found = merged.digests if listed is None else listed
        self.state.apply(header, msg.commit_id(header), merged.payload, found, NOTHING)


def test_a_commit_is_no_longer_than_it_declares_and_gives_what_was_signed() -> None:
    """V1a: nothing is changed by one that does not."""
    merged, other = Owner().merge(0.5), Owner()
    with pytest.raises(UnfitCommitError, match="has norm"):
        other.apply(merged, 0.99 * merged.length)
    with pytest.raises(UnfitCommitError, match="malformed"):
        other.apply(merged._replace(payload=merged.payload[:-1]), merged.length)
    with pytest.raises(UnfitCommitError, match="does not have its digest"):
        other.apply(merged, merged.length, bytes(len(merged.digests)))
    assert not other.state.theta.any()
    other.apply(merged, merged.length)
    assert float(other.state.momentum.norm()) == pytest.approx(merged.length)


def test_a_contribution_that_no_merge_can_hold_is_its_givers_fault() -> None:
    """V1e: finite all the same; and what is malformed."""
    owner, payload = Owner(), Owner().merge(0.5).payload
    huge = compression.join([HUGE])
    for spoilt in (huge, payload[:-1]):
        given = [(tokens(B, 0, 40), payload), (tokens(C, 0, 40), spoilt)]
        with pytest.raises(ContributionError, match=f"contribution of {C}") as found:
            owner.state.merge(SHARD, digest("zero"), 1, given)
        assert found.value.learner == tokens(C, 0, 40).learner
        assert owner.state.merge(SHARD, digest("zero"), 1, given[:1]).length > 0.0


def test_a_declared_weight_does_not_make_a_merge_ones_own() -> None:
    """V4a: one of four declares the most tokens and steps that others believe, and gives the opposite of what the
    others do, thirty times as long."""
    owner, how = Owner(), recipe("bf16")
    found = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(3))

    def given(
        peer: PeerId, values: torch.Tensor, count: int, steps: int
    ) -> tuple[msg.Contributor, compression.Payload]:
        bodies = quantization.encode_vector(how, values, room=compression.index_bytes(1))
        contributor = msg.Contributor(life(peer), 0, count, 0, steps)
        return contributor, payload_of(bodies, how, True)

    honest = [given(peer, found, 512, ROUND) for peer in (A, B, C)]
    liar = given(D, -30.0 * found, 2**24 * 64 * ROUND, 64 * ROUND)
    merged = owner.state.merge(SHARD, digest("zero"), 1, [*honest, liar], how)
    values = quantization.decode_chunks(
        list(compression.split(merged.payload, 1, quantization.LARGEST_BODY)), torch.empty(ELEMENTS)
    )
    assert float(values @ found) > 0.0
    assert merged.length < 1.3 * float(found.norm())


def test_what_is_too_short_to_have_a_direction_spoils_nothing() -> None:
    """V1e: one over its length would be no number; and two that cancel out."""
    owner, payload = Owner(), Owner().merge(0.5).payload
    for bodies in ([TINY], [LONG, BACK]):
        others = [
            (tokens(giver, 0, 10**6), compression.join([body])) for giver, body in zip((C, D), bodies, strict=False)
        ]
        merged = owner.state.merge(SHARD, digest("zero"), 1, [(tokens(B, 0, 40), payload), *others], None, 40.0)
        assert merged.length <= 40.0
        owner.apply(merged, merged.length)
        owner = Owner()
    alone = owner.state.merge(SHARD, digest("zero"), 1, [(tokens(B, 0, 40), payload)])
    beside = [(tokens(B, 0, 40), payload), (tokens(C, 0, 40), compression.join([TINY]))]
    merged = owner.state.merge(SHARD, digest("zero"), 1, beside)
    assert merged.length == pytest.approx(alone.length / 2, rel=0.01), "it counts as one of zeros"


def test_an_owner_states_how_much_each_contribution_counted() -> None:
    """V4c: in its commit, so that everybody can make the same merge again."""
    stage = Stage(B, C, D, has_learner=False, owners="abcd", min_quorum=3)
    for peer in (B, C):
        stage.offer(peer)
    [merge] = only(stage.offer(D), ef.Merge)
    names = (merge.shard, merge.base.id, digest("payload"), digest("result"))
    effects = stage.tell(ev.Merged(*names, factors=(100, 10, 100)))
    [header] = {commit.header for _, commit in sent(effects, msg.Commit)}
    assert header.factors == (100, 10, 100)
    assert header.tokens < header.counts.merged
    assert stage.machine.core.chains[SHARD].problem(header) is None


def test_an_owner_shortens_what_would_be_too_long() -> None:
    """V1b."""
    stage = Stage(B, C, has_learner=False, owners="abc", grace_share=0.0, sizes=Sizes(elements=(100,)))
    [merge] = only(stage.offer(C), ef.Merge)
    assert merge.longest == pytest.approx(40.0)
    effects = stage.tell(ev.Merged(SHARD, merge.base.id, digest("payload"), digest("result"), 39.0))
    [header] = {commit.header for _, commit in sent(effects, msg.Commit)}
    assert header.length == 39.0
    assert stage.machine.core.chains[SHARD].problem(header) is None
    merged = Owner().merge(0.5, longest=1.0)
    assert 0.8 <= merged.length <= 1.0


def test_a_state_that_is_not_finite_is_not_taken() -> None:
    """V3a: whoever signed it."""
    for value, is_taken in ((1.0, True), (math.inf, False), (math.nan, False)):
        theta, momentum = torch.full((4,), value), torch.zeros(4)
        data = packed(theta, momentum)
        state = ev.ShardState(msg.Head(SHARD, 0, digest("zero"), 0), 0, ())
        offer = StateOffer(StateProof(state, None, b""), digests.digest_list(theta, momentum))
        assert is_listed(offer, 0, data, StateForm()) == is_taken


def test_a_state_that_is_too_far_away_is_not_taken() -> None:
    """V3b: what nobody saw being made is measured as a whole."""
    stage = Stage(B, C, has_learner=False, sizes=Sizes(elements=(100,)))
    stage.take(counted(stage, 40, 4.0))
    later = msg.Head(SHARD, 3, digest("later"), 900)
    [install] = only(stage.bring(ev.ShardState(later, 4, ()), B), ef.Install)
    assert install.farthest == pytest.approx(16 * 4.0 * (2 + 2 * stage.config.log_length + 64))
    stage.tell(ev.Failed("values", SHARD, None, "too far"))
    for peer in (B, C):
        stage.announce(peer, 8, stage.head())
    effects = stage.tell(ev.Fetched(B, ev.ShardState(later, 4, ()), stage.lineage()))
    assert "was rejected here" in notes(effects, "fetch")[0]
    away = msg.Head(SHARD, 500, digest("away"), 9000)
    assert stage.machine.core.chains[SHARD].farthest(away, ()) > 4 * install.farthest
    for _ in range(MEMORY):
        stage.take(counted(stage, 40, 4.0))
    lineage = stage.machine.core.chains[SHARD].log_ids
    fork = msg.Head(SHARD, stage.head().version + 1, digest("fork"), 900)
    farthest = stage.machine.core.chains[SHARD].farthest(fork, tuple(lineage)[:-2])
    assert farthest == pytest.approx(6 * 4.0 * (2 + 3), rel=1e-3), "two of ours, and three of theirs"
    for scale, is_taken in ((1.0, True), (1e6, False)):
        owner = Owner()
        vectors = torch.full((ELEMENTS,), scale), owner.state.form.still(ELEMENTS)
        owner.state.stage(SHARD, later.id, [packed(*vectors)], digests.digest_list(*vectors))
        if is_taken:
            owner.state.install(SHARD, later.id, NOTHING, install.farthest)
        else:
            with pytest.raises(UnfitCommitError, match="too far"):
                owner.state.install(SHARD, later.id, NOTHING, install.farthest)
        assert bool(owner.state.theta.any()) == is_taken


def test_a_repair_brings_no_other_values() -> None:
    """V3b: at one head, too: memory that is altered here and there is mended from whatever it has become; what would be
    another state is not taken, and asked for elsewhere, eight times."""
    wide = 4096
    for altered, theirs, is_taken in ((math.nan, 0.02, True), (1e38, 0.02, True), (0.0, 1e6, False)):
        mine, momentum = torch.full((wide,), 0.02), torch.zeros(wide)
        good = mine.clone()
        mine[7] = altered or 0.02
        if not is_taken:
            good[3] = theirs  # one place, and the model is gone
        staged = Staged(digest("head"), [packed(good, momentum)], b"")
        distance = staged.distance(StateForm(), mine, momentum)
        assert (distance < 1.0) == is_taken, (altered, distance)
    stage = Stage(B, C, has_learner=False)
    stage.take(stage.commit(tokens(C, 0, 40)))
    stage.tell(ev.Failed("state", SHARD, None, "chunk 0"))
    state = stage.machine.core.chains[SHARD].state()
    [install] = only(stage.tell(ev.Fetched(B, state, ())), ef.Install)
    assert install.farthest < math.inf or not stage.config.sizes.elements
    stage.tell(ev.Failed("values", SHARD, None, "too far"))
    assert SHARD in stage.machine.replication.repairing
    assert only(stage.wait(3.0), ef.Fetch), "others are asked"
    stage.tell(ev.Failed("fetch", SHARD, B, "gone"))
    child = commit_on(stage.head(), tokens(C, 40, 80))
    assert not stage.machine.replication.refusals.is_refused(child, msg.commit_id(child)), (
        "the head is as good as before"
    )


# -- what becomes of them ----------------------------------------------------------------------------------------------


def test_what_was_not_taken_comes_back_by_no_way() -> None:
    """V2a: again, as a parent, as a state, or as what a state has behind it."""
    stage = Stage(B, C, D, has_learner=False)
    bad = stage.commit(tokens(B, 0, 400), owner=B)
    effects = unfit(stage, bad)
    assert stage.head().version == 0
    assert not only(effects, ef.Fetch)
    child = commit_on(head_of(bad), tokens(C, 0, 40), owner=C)
    for sender in (B, C):
        for header in (bad, child):
            assert not only(stage.hear(sender, msg.Commit(header)), ef.Apply)
    for head, lineage in ((head_of(bad), stage.lineage()), (head_of(child), (*stage.lineage(), head_of(bad).id))):
        effects = stage.work(stage.tell(ev.Fetched(B, ev.ShardState(head, 4, ()), lineage)))
        assert "was rejected here" in notes(effects, "fetch")[0]
    later = msg.Head(SHARD, 3, digest("later"), 900)
    stage.work(stage.tell(ev.Fetched(B, ev.ShardState(later, 4, ()), (*stage.lineage(), head_of(child).id))))
    assert stage.head().version == 0
    stage.take(stage.commit(tokens(C, 0, 40), owner=C))
    assert stage.head().version == 1, "the run goes on"


def test_what_its_header_makes_unfit_is_remembered_too() -> None:
    """V2a: a commit of another record than the chain's, say."""
    stage = Stage(B, C, has_learner=False)
    bad = stage.commit(tokens(B, 0, 400), owner=B, record=digest("another"))
    stage.take(bad)
    stage.work(stage.tell(ev.Fetched(B, ev.ShardState(head_of(bad), 4, ()), stage.lineage())))
    assert stage.head().version == 0
    stage.wait(stage.config.heartbeat_s)
    assert B not in owners(stage)


def test_whose_commit_was_not_taken_owns_nothing_and_others_merge_what_was_given() -> None:
    """V2b: at once; who built on it is not blamed."""
    stage = Stage(B, C, owners="bac", grace_share=0.0, has_learner=False)
    stage.offer(C)
    stage.announce(C, 4)
    effects = unfit(stage, stage.commit(tokens(C, 0, 40), owner=B))
    child = commit_on(stage.head(), tokens(C, 0, 40), owner=C)
    stage.hear(C, msg.Commit(msgspec.structs.replace(child, parent=digest("unknown"))))
    effects += stage.wait(stage.config.heartbeat_s)
    assert owners(stage) == {A, C}
    assert only(effects, ef.Merge), "a is the first of those who may"
    assert stage.head().version == 0


def test_what_most_go_on_from_is_taken_in_the_end() -> None:
    """V2c: it is this peer that errs, and it does not stay behind for ever."""
    stage = Stage(B, C, D, has_learner=False)
    bad = stage.commit(tokens(B, 0, 400), owner=B)
    unfit(stage, bad)
    state = ev.ShardState(head_of(bad), 4, ())
    stage.hear(B, msg.Commit(bad))
    stage.hear(C, msg.Commit(bad))
    stage.work(stage.tell(ev.Fetched(C, state, stage.lineage())))
    assert stage.head().version == 0, "two of four"
    assert [fetch.peer for fetch in only(stage.hear(D, msg.Commit(bad)), ef.Fetch)] == [D]
    stage.work(stage.tell(ev.Fetched(B, state, stage.lineage(), B)))
    assert stage.head().version == 0, "its owner may show what it signed, and not what the others have"
    stage.work(stage.tell(ev.Fetched(D, state, stage.lineage(), B)))
    assert stage.head() == head_of(bad)
    stage.take(stage.commit(tokens(C, 0, 40), owner=C), C)
    assert stage.head().version == 2


def test_what_followed_unseen_counts_as_what_most_go_on_from() -> None:
    """V2a, V2c: this peer drops commits that a barred owner sends, so it cannot know from them that the others' heads
    follow the rejected commit. Before, such a peer stayed alone and lost its last tokens (attack
    ``static+tokens+rounds+flip``, two liars of eight)."""
    stage = Stage(B, C, D, has_learner=False)
    bad = stage.commit(tokens(B, 0, 400), owner=B)
    unfit(stage, bad)
    child = commit_on(head_of(bad), tokens(B, 400, 440), owner=B)
    head = head_of(commit_on(head_of(child), tokens(C, 0, 40), owner=C))
    for peer in (B, C, D):
        stage.announce(peer, 4, head)
    state = ev.ShardState(head, 4, ())
    lineage = (*stage.lineage(), head_of(bad).id, head_of(child).id)
    stage.work(stage.tell(ev.Fetched(D, state, lineage, C)))
    assert stage.head() == head
