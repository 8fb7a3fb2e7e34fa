"""Commits, shifts and snapshots against arithmetic on whole vectors."""

import math
import random

import msgspec
import pytest
import torch
from torch import Tensor

from p2pdiloco.codec import compression, digests, quantization
from p2pdiloco.codec.digests import packed
from p2pdiloco.codec.outer_optimizer import outer_step_by_torch
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.peer.learner_updates import Moves, Shifts
from p2pdiloco.peer.model_state import (
    ContributionError,
    DigestMismatchError,
    MergeResult,
    ModelState,
    StaleBaseError,
    UnfitCommitError,
)
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, MergeRule, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors

ELEMENTS = 2 * quantization.CHUNK + 1000
SHARD = ShardId(0)
FRAGMENT = FragmentId(0)
ME = LearnerId("me/1")
ZERO = digest_of(b"version 0")
NOTHING = Moves(None, (), (), False)
CLASSIC = OuterConfig(learning_rate=0.7, momentum=0.9)


def bell(seed: int, scale: float = 1e-3) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * scale


def decoded(payload: bytes) -> Tensor:
    bodies = compression.split(payload, quantization.chunk_count(ELEMENTS), quantization.LARGEST_BODY)
    return quantization.decode_chunks(bodies, torch.empty(ELEMENTS))


class Peer:
    """One shard's global state, with a learner that answers when it is told to."""

    def __init__(self, outer: OuterConfig = CLASSIC, codec: CodecConfig | None = None, rule: MergeRule = "rda") -> None:
        tensors = (TensorSpec(name="all", shape=(ELEMENTS,), merge=rule, fragment=FRAGMENT),)
        layout = make_layout(tensors, 1, 1 << 20, rule)
        self.outer = outer
        self.vectors = SharedVectors.create(ELEMENTS)
        self.state = ModelState(layout, self.outer, codec or CodecConfig(), self.vectors, round_steps=24)
        self.state.put(SHARD, ZERO, bell(99, 0.02), bell(98).to(self.state.form.momentum))
        self.version = 0

    def copy(self, gradient: Tensor) -> None:
        """As if the learner had moved by -gradient, and is asked for a snapshot."""
        self.state.shifts.begin_snapshot(FRAGMENT)
        self.vectors.snapshot.copy_(self.state.theta - gradient)
        self.state.shifts.complete_snapshot(FRAGMENT)

    def contribute(self, gradient: Tensor) -> bytes:
        """What it gives then."""
        self.copy(gradient)
        return self.state.encode(SHARD, self.head)[0]

    @property
    def head(self) -> Digest:
        head = self.state.heads[SHARD]
        assert head is not None
        return head

    def merge(self, payloads: list[bytes], longest: float = math.inf) -> tuple[CommitHeader, MergeResult]:
        contributors = [Contributor(LearnerId(f"p{i}/1"), 0, 1000, 0, 10) for i in range(len(payloads))]
        given = list(zip(contributors, payloads, strict=True))
        merged = self.state.merge(SHARD, self.head, self.version + 1, given, longest=longest)
        return self.header(merged), merged

    def header(self, merged: MergeResult) -> CommitHeader:
        result = digest_of(merged.digests)
        version = self.version + 1
        return CommitHeader(
            SHARD, version, self.head, 0, PeerId("owner"), (), 0, merged.payload_digest, result, result, merged.length
        )

    def apply(self, header: CommitHeader, merged: MergeResult, moves: Moves = NOTHING) -> Shifts:
        head = digest_of(header.parent.encode())
        shifts = self.state.apply(header, head, merged.payload, merged.digests, moves)
        self.version = header.version
        return shifts


def travelling_of(peer: Peer) -> memoryview:
    """Room for its state."""
    return memoryview(bytearray(peer.state.form.width * ELEMENTS))


def cut(peer: Peer, data: memoryview) -> list[memoryview]:
    """The chunks of a state."""
    return [data[at : at + peer.state.form.chunk_bytes] for at in range(0, len(data), peer.state.form.chunk_bytes)]


@pytest.fixture(params=["float32", "bfloat16"])
def peers(request: pytest.FixtureRequest) -> tuple[Peer, Peer]:
    outer = OuterConfig(learning_rate=0.7, momentum=0.9, momentum_type=request.param)
    return Peer(outer), Peer(outer)


def test_a_contribution_that_most_others_disagree_with_hardly_moves_the_merge() -> None:
    owner, learner = Peer(rule="direct"), Peer(rule="direct")
    common = bell(1)
    honest = [common + bell(2 + i) for i in range(3)]
    payloads = [learner.contribute(gradient) for gradient in [*honest, -common]]
    merged = decoded(owner.merge(payloads)[1].payload)
    expected = (sum(honest, torch.zeros(ELEMENTS)) - 0.1 * common) / 3.1
    assert float((merged - expected).norm() / expected.norm()) < 0.2
    assert float(merged @ common / common.norm() ** 2) > 0.9


def test_a_peer_does_not_lose_its_past_with_a_new_learner() -> None:
    """Merged alone under a new name, its contribution still counts as a short one."""
    owner, giver = Peer(rule="direct"), Peer(rule="direct")
    common = bell(1)
    honest = [giver.contribute(common + bell(2 + i)) for i in range(3)]
    lie = giver.contribute(-common)

    def merge(payloads: list[bytes], names: list[str]) -> MergeResult:
        given = [Contributor(LearnerId(name), 0, 1000, 0, 10) for name in names]
        return owner.state.merge(SHARD, owner.head, 1, list(zip(given, payloads, strict=True)))

    for life in range(5):
        merge([*honest, lie], ["p0/1", "p1/1", "p2/1", f"p3/{life}"])
    assert merge([lie], ["p3/99"]).factors == (10,)
    assert merge([lie], ["p0/99"]).factors == ()


def test_all_peers_get_the_same_bits_and_the_owners_digests(peers: tuple[Peer, Peer]) -> None:
    owner, other = peers
    for round_ in range(3):
        payloads = [other.contribute(bell(10 * round_ + i)) for i in range(3)]
        header, merged = owner.merge(payloads)
        theta, momentum, gradient = owner.state.theta.clone(), owner.state.momentum.clone(), decoded(merged.payload)
        outer_step_by_torch(theta, momentum, gradient, 0.7, 0.9)
        for peer in peers:
            peer.apply(header, merged)
            assert torch.equal(peer.state.theta, theta)
            assert torch.equal(peer.state.momentum, momentum)
            assert peer.state.integrity.digests[SHARD] == merged.digests == digests.digest_list(theta, momentum)
            assert peer.state.digest(SHARD) == header.result


def test_a_start_needs_the_momentum_once() -> None:
    peer, momentum = Peer(), torch.full((ELEMENTS,), 0.5)
    peer.state.keep_in(momentum)
    peer.state.put(SHARD, ZERO, torch.ones(ELEMENTS), momentum)
    assert peer.state.momentum.data_ptr() == momentum.data_ptr()
    assert torch.equal(peer.state.momentum, torch.full((ELEMENTS,), 0.5))
    peer.state.keep_in(momentum.bfloat16())
    assert peer.state.momentum.dtype == torch.float32, "one of another kind is copied"


def test_a_round_goes_as_far_as_any_where_the_bias_is_corrected() -> None:
    """Merged alike each time, the parameters move alike each time: by rate / (1 - momentum) times what was merged. Who
    fetched the state on the way knows how old the momentum is by the commit."""
    outer = OuterConfig(learning_rate=0.4, momentum=0.5, bias_correction=True)
    owner, late = Peer(outer), Peer(outer)
    for peer in (owner, late):
        peer.state.put(SHARD, ZERO, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS))
    payload, moved = owner.contribute(bell(1)), []
    for version in range(1, 4):
        header, merged = owner.merge([payload])
        before = owner.state.theta.clone()
        if version == 3:
            theta, momentum = owner.state.theta.clone(), owner.state.momentum.clone()
            late.state.put(SHARD, owner.head, theta, momentum)
            late.apply(header, merged)
        owner.apply(header, merged)
        moved.append(before - owner.state.theta)
    for change in moved:
        assert torch.allclose(change, 0.8 * decoded(merged.payload), rtol=1e-4, atol=1e-8)
    assert torch.equal(owner.state.theta, late.state.theta)


def test_the_learner_keeps_what_was_not_merged(peers: tuple[Peer, Peer]) -> None:
    """A shift is the global change plus what was settled; what comes before it is taken is queued, and summed."""
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    before = mine.state.theta.clone()
    payloads = [mine.contribute(bell(1)), mine.contribute(bell(2)), mine.contribute(bell(3))]
    mine.state.shifts.begin_snapshot(FRAGMENT)
    mine.state.shifts.complete_snapshot(FRAGMENT)
    learner = mine.vectors.snapshot.clone()
    expected: list[Tensor] = []
    for payload in payloads:
        header, merged = owner.merge([payload])
        owner.apply(header, merged)
        shifts = mine.apply(header, merged, Moves(ME, (payload,), (), False))
        assert shifts == (Shifts((SHARD,), ()) if not expected else Shifts((), ()))
        expected.append(mine.state.theta - before + decoded(payload))
        before = mine.state.theta.clone()
    assert torch.equal(mine.vectors.shift, expected[0])
    assert torch.equal(mine.state.shifts.part("queued", SHARD), expected[1] + expected[2])
    moved = learner + expected[0] + expected[1] + expected[2]
    assert torch.equal(mine.vectors.snapshot, moved)
    assert mine.state.shifts.acknowledge((SHARD,)) == Shifts((SHARD,), ())
    assert torch.equal(mine.vectors.shift, expected[1] + expected[2])


def test_a_reset_replaces(peers: tuple[Peer, Peer]) -> None:
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    header, merged = owner.merge([mine.contribute(bell(1))])
    assert mine.apply(header, merged, Moves(ME, (), (), True)) == Shifts((), (SHARD,))
    assert torch.equal(mine.vectors.shift, mine.state.theta)


def test_a_reset_voids_a_snapshot_that_waits_to_be_encoded(peers: tuple[Peer, Peer]) -> None:
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    mine.copy(bell(2))
    mine.apply(*owner.merge([owner.contribute(bell(1))]), Moves(ME, (), (), True))
    with pytest.raises(StaleBaseError):
        mine.state.encode(SHARD, mine.head)


def test_a_snapshot_from_before_a_replacement_is_void(peers: tuple[Peer, Peer]) -> None:
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    mine.apply(*owner.merge([owner.contribute(bell(1))]), Moves(ME, (), (), True))
    mine.copy(bell(2))  # the learner has not taken the replacement
    with pytest.raises(StaleBaseError):
        mine.state.encode(SHARD, mine.head)
    mine.state.shifts.acknowledge((SHARD,))
    mine.copy(bell(2))
    mine.state.encode(SHARD, mine.head)


def test_a_snapshot_is_brought_up_to_date_with_what_is_in_flight_and_queued(peers: tuple[Peer, Peer]) -> None:
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    before, shifts = mine.state.theta.clone(), []
    for seed in (1, 2):
        header, merged = owner.merge([owner.contribute(bell(seed))])
        owner.apply(header, merged)
        shifts.append(mine.apply(header, merged))
    assert shifts == [Shifts((SHARD,), ()), Shifts((), ())], "the second waits until the learner has taken the first"
    mine.state.shifts.begin_snapshot(FRAGMENT)
    mine.vectors.snapshot.copy_(before - bell(3))  # it has taken neither
    mine.state.shifts.complete_snapshot(FRAGMENT)
    assert torch.equal(
        mine.vectors.snapshot, before - bell(3) + mine.vectors.shift + mine.state.shifts.part("queued", SHARD)
    )
    assert torch.allclose(mine.state.theta - mine.vectors.snapshot, bell(3), atol=1e-6)


def test_several_contributions_are_settled_and_restored_at_once(peers: tuple[Peer, Peer]) -> None:
    """A heavier chain may have merged several of what ours has not, or lack several that ours has."""
    donor, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    payloads = [mine.contribute(bell(seed)) for seed in (1, 2, 3, 4)]
    before = mine.state.theta.clone()
    donor.apply(*donor.merge([payloads[0]]))
    travelling = travelling_of(donor)
    head, listed = donor.state.copy(SHARD, travelling)
    mine.state.stage(SHARD, head, cut(donor, travelling), listed)
    mine.state.install(SHARD, head, Moves(ME, payloads[:2], payloads[2:], False))
    settled, restored = decoded(payloads[0]) + decoded(payloads[1]), decoded(payloads[2]) + decoded(payloads[3])
    assert torch.allclose(mine.vectors.shift, mine.state.theta - before + settled - restored, atol=1e-7)


def test_another_learners_contributions_do_not_move_this_one(peers: tuple[Peer, Peer]) -> None:
    """Those of the life before this one, whose commit comes late."""
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    payload, before = mine.contribute(bell(1)), mine.state.theta.clone()
    mine.apply(*owner.merge([payload]), Moves(LearnerId("me/0"), (payload,), (), False))
    assert torch.equal(mine.vectors.shift, mine.state.theta - before)


def test_a_new_learner_takes_nothing_of_what_waited_for_the_last(peers: tuple[Peer, Peer]) -> None:
    owner, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    for seed in (1, 2):
        header, merged = owner.merge([owner.contribute(bell(seed))])
        owner.apply(header, merged)
        mine.apply(header, merged)
    mine.state.shifts.unload()
    mine.state.shifts.load(LearnerId("me/2"))
    assert torch.equal(mine.vectors.shift, mine.state.theta)
    assert mine.state.shifts.acknowledge((SHARD,)) == Shifts((), ())


def test_an_owner_that_was_forestalled_takes_the_other_commit(peers: tuple[Peer, Peer]) -> None:
    """Both merge the same version; the second one's is ready when the first one's comes."""
    first, second = peers
    header, merged = first.merge([first.contribute(bell(1))])
    second.merge([second.contribute(bell(2))])
    for peer in peers:
        peer.apply(header, merged)
    assert torch.equal(second.state.theta, first.state.theta)
    assert torch.equal(second.state.momentum, first.state.momentum)
    assert second.state.digest(SHARD) == header.result


def test_what_is_put_is_what_is_there(peers: tuple[Peer, Peer]) -> None:
    """Parameters and momentum of a checkpoint, and the digests that they have."""
    state = peers[0].state
    assert torch.equal(state.theta, bell(99, 0.02))
    momentum = bell(98).to(state.form.momentum)
    assert torch.equal(state.momentum, momentum)
    assert state.integrity.digests[SHARD] == digests.digest_list(bell(99, 0.02), momentum)


def test_a_fetched_state_gives_back_what_a_fork_had_merged(peers: tuple[Peer, Peer]) -> None:
    donor, mine = peers
    mine.state.shifts.load(ME)
    mine.state.shifts.acknowledge((SHARD,))
    payload = mine.contribute(bell(1))
    before = mine.state.theta.clone()
    donor.apply(*donor.merge([mine.contribute(bell(2))]))
    travelling = travelling_of(donor)
    head, listed = donor.state.copy(SHARD, travelling)
    assert travelling == packed(donor.state.theta, donor.state.momentum)
    chunks = cut(donor, travelling)
    assert b"".join(bytes.fromhex(digest_of(chunk)) for chunk in chunks) == listed
    mine.state.stage(SHARD, head, chunks, listed)
    assert mine.state.install(SHARD, head, Moves(ME, (), (payload,), False)) == Shifts((SHARD,), ())
    assert torch.equal(mine.state.theta, donor.state.theta)
    assert torch.equal(mine.state.momentum, donor.state.momentum)
    assert mine.state.integrity.digests == donor.state.integrity.digests
    assert torch.equal(mine.vectors.shift, mine.state.theta - before - decoded(payload))


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_difference_is_found_once_its_chunk_is_looked_at(
    peers: tuple[Peer, Peer], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = peers
    other.state.theta[chunk * quantization.CHUNK + 7] += 1.0
    refused, drawn = [], list[int]()

    def sample(elements: int, draw: random.Random) -> list[int]:
        drawn[:] = draw.sample(range(3), 1)
        return drawn

    monkeypatch.setattr(digests, "sample", sample)
    for _ in range(100):
        header, merged = owner.merge([owner.contribute(bell(5))])
        owner.apply(header, merged)
        before = other.state.theta.clone()
        try:
            other.apply(header, merged)
        except SpoiltStateError:
            refused.append(header.version)
            assert torch.equal(other.state.theta, before)
            break
        assert not torch.equal(other.state.theta, before)
    assert refused
    assert drawn == [chunk]
    with pytest.raises(StaleBaseError):
        other.contribute(bell(6))  # nothing is given from a spoilt state


def test_a_commit_that_promises_another_result_is_the_owners_fault(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = peers
    header, merged = owner.merge([owner.contribute(bell(5))])
    looked_at = 1
    monkeypatch.setattr(digests, "sample", lambda *_: [looked_at])
    wrong = bytearray(merged.digests)
    wrong[20 * looked_at] ^= 1
    with pytest.raises(DigestMismatchError):
        other.apply(header, merged._replace(digests=bytes(wrong)))


def test_an_owner_does_not_sign_what_follows_from_a_spoilt_state(peers: tuple[Peer, Peer]) -> None:
    owner, _ = peers
    given = owner.contribute(bell(5))
    owner.state.momentum[quantization.CHUNK + 3] += 1.0
    with pytest.raises(SpoiltStateError, match="chunk 1 of shard 0"):
        owner.merge([given])


@pytest.mark.parametrize("was_verified", [True, False])
def test_a_repair_moves_the_learner_only_if_it_may_have_seen_the_difference(
    peers: tuple[Peer, Peer], was_verified: bool
) -> None:
    spoilt, donor = peers
    shard, head = SHARD, spoilt.state.heads[SHARD]
    assert head is not None
    spoilt.state.shifts.load(ME)
    spoilt.state.shifts.acknowledge((shard,))
    if was_verified:
        for chunk in spoilt.state.integrity.unverified(shard):
            spoilt.state.verify(shard, chunk)
    spoilt.state.theta[3] += 1.0
    if not was_verified:
        spoilt.state.integrity.invalidate()
    with pytest.raises(SpoiltStateError):
        spoilt.state.verify(shard, 0)
    with pytest.raises(StaleBaseError):
        spoilt.state.copy(shard, travelling_of(spoilt))  # nobody is served from it
    out = travelling_of(donor)
    _, listed = donor.state.copy(shard, out)
    spoilt.state.stage(shard, head, cut(donor, out), listed)
    shifts = spoilt.state.install(shard, head, Moves(ME, (), (), is_reset=False))
    assert torch.equal(spoilt.state.theta, donor.state.theta)
    assert shifts == (Shifts((), ()) if was_verified else Shifts((), (shard,)))
    spoilt.state.verify(shard, 0)


def test_a_spoilt_state_that_is_accepted_is_handed_on_with_its_next_version(peers: tuple[Peer, Peer]) -> None:
    """Until then its digests are not those that were signed: whoever got it would take this peer for a liar."""
    alone, _ = peers
    out = travelling_of(alone)
    alone.state.theta[3] += 1.0
    with pytest.raises(SpoiltStateError):
        alone.state.copy(SHARD, out)
    alone.state.accept(SHARD)
    with pytest.raises(StaleBaseError, match="cannot be proven before its next version"):
        alone.state.copy(SHARD, out)
    header, merged = alone.merge([alone.contribute(bell(5))])
    alone.apply(header, merged)
    _, listed = alone.state.copy(SHARD, out)
    assert digest_of(listed) == header.result


def test_malformed_payloads_change_nothing(peers: tuple[Peer, Peer]) -> None:
    owner, other = peers
    header, merged = owner.merge([owner.contribute(bell(5))])
    before = other.state.theta.clone()
    for payload in (b"", merged.payload[:-1], merged.payload[:-2] + b"\xff\xff"):
        with pytest.raises(DigestMismatchError, match="malformed"):
            other.apply(header, merged._replace(payload=payload))
        with pytest.raises(ContributionError, match="p1/1"):
            other.merge([merged.payload, payload])
    with pytest.raises(StaleBaseError):
        other.state.merge(SHARD, digest_of(b"another head"), 1, [])
    assert torch.equal(other.state.theta, before)


def constant(high: int, low: int) -> bytes:
    """A bf16 payload that an honest learner may not be able to make: each value has these bytes."""
    bodies = []
    for body in map(bytes, quantization.encode_vector(quantization.recipe("bf16"), torch.zeros(ELEMENTS))):
        half = (len(body) - 8) // 2
        bodies.append(body[:8] + bytes([high]) * half + bytes([low]) * half)
    return bytes(compression.join(bodies))


@pytest.mark.parametrize("rule", ["rda", "direct"])
def test_who_gives_what_no_merge_can_hold_is_named_and_the_others_are_merged(rule: MergeRule) -> None:
    """Finite all the same. Before, nobody was named, and everybody's contributions were dropped with it."""
    owner, honest = Peer(rule=rule), Peer().contribute(bell(5))
    for given in ([honest, constant(0x7E, 0x96)], [honest, constant(0x7A, 0)]):  # 1e38; 1.7e35, 1.2e38 long
        with pytest.raises(ContributionError, match=r"p1/1: its norm is \S+; the maximum is"):
            owner.merge(given)
    largest = constant(0x75, 0x80)  # 3.2e32, 2.3e35 long
    for given in ([honest], [largest], [honest, largest]):
        _, merged = owner.merge(given, longest=10.0)
        assert 0.0 < merged.length <= 10.0


def test_parameters_that_are_not_finite_are_not_contributed(peers: tuple[Peer, Peer]) -> None:
    with pytest.raises(ValueError, match="not finite"):
        peers[0].contribute(torch.full((ELEMENTS,), math.nan))


def test_only_the_state_that_was_fetched_last_is_installed(peers: tuple[Peer, Peer]) -> None:
    donor, mine = peers
    travelling = travelling_of(donor)
    head, listed = donor.state.copy(SHARD, travelling)
    before = mine.state.theta.clone()
    for staged, wanted in ((head, digest_of(b"another")), (None, head)):
        if staged is not None:
            mine.state.stage(SHARD, staged, cut(donor, travelling), listed)
        with pytest.raises(StaleBaseError, match="not staged any more"):
            mine.state.install(SHARD, wanted, NOTHING)
    assert torch.equal(mine.state.theta, before)


def test_a_merge_made_before_a_repair_is_checked_as_anybodys(peers: tuple[Peer, Peer]) -> None:
    """What this peer has merged itself is applied unchecked, unless its memory was altered meanwhile."""
    spoilt, donor = peers
    head = spoilt.head
    header, merged = spoilt.merge([donor.contribute(bell(5))])
    header = msgspec.structs.replace(header, length=header.length / 2)
    spoilt.state.theta[3] += 1.0
    spoilt.state.integrity.invalidate()
    with pytest.raises(SpoiltStateError):
        spoilt.state.verify(SHARD, 0)
    out = travelling_of(donor)
    _, listed = donor.state.copy(SHARD, out)
    spoilt.state.stage(SHARD, head, cut(donor, out), listed)
    spoilt.state.install(SHARD, head, NOTHING)
    with pytest.raises(UnfitCommitError, match="has norm"):
        spoilt.apply(header, merged)
    assert spoilt.head == head
