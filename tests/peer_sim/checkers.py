"""What must hold of whole peers, judged from tensors, bytes and what learners did, by none of the program's counters.

1. A head is a value: one head means the same parameters, momentum, marks and step, bit for bit, wherever it is; and
   they are what its parent's and its payload give (an outer step of our own). Where its owner's memory was damaged, and
   nobody else had the state that it merged on, they are what it signed (A6c), and until a peer finds out, nearly that.
2. A contribution holds, in its learner's lane and nowhere else, the steps of the range that it names. A learner loses
   nothing of what it holds, but where a fork goes deeper than the log, or a fault took what was needed.
3. A commit's payload is the merge of the contributions that it names, which were given for its parent.
4. A learner that lived to the run's end has every step of its in the model once, and nothing else of its own.
5. Nothing ends by itself: no task fails, no peer ends but for a reason that a fault gave it.
6. After the faults every peer comes to the run's end, with the same heads, and leaves no file over.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from p2pdiloco.codec import compression, quantization
from p2pdiloco.codec.digests import StateForm, state_digest
from p2pdiloco.peer.ending import APART, Ending
from p2pdiloco.peer.signatures import FalseContributionError, check_commit
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.messages import CommitHeader, Contribution, Proof, WrongMerge
from p2pdiloco.transport.identity import verify
from tests.peer_sim import reference_math
from tests.peer_sim.tuning import CHUNK

if TYPE_CHECKING:
    from p2pdiloco.peer.learner_updates import Payload
    from p2pdiloco.peer.payload_store import Held
    from p2pdiloco.peer.peer import Peer
    from tests.peer_sim.learner import SimulatedLearner
    from tests.peer_sim.world import World

Vector = NDArray[np.float32]
CALM_S = 15.0
"""After a fault, or a peer's coming: heads are equal by then."""
NOT_WRITTEN = "the last checkpoint was not written"
TOGETHER_S = 1.0
"""Between the ends of two peers that end together."""
MOST_UNCAUGHT = 250
"""Wrong commits until their owner must have been found: each is audited with a probability of a tenth."""
NEARLY = 2e-2
"""Steps in a lane are whole numbers; bf16 and float32 sums may be off by little."""


class Value(NamedTuple):
    """What a head stands for."""

    theta: Vector
    momentum: Vector
    marks: dict[LearnerId, int]
    """Tokens, of all learners that were ever merged."""
    step: int
    version: int
    owner: PeerId = PeerId("")
    result: Digest = Digest("")
    """As its owner signed it."""


class Given(NamedTuple):
    """A contribution as it left."""

    base: Digest
    vector: Vector
    tokens: int
    steps: int


class Checks:
    """What was seen so far, and what was wrong with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._form = StateForm.of(world.manifest.config.outer)
        self.violations: list[str] = []
        self.values: dict[tuple[ShardId, Digest], Value] = {}
        self.given: dict[tuple[ShardId, LearnerId, int, int, Digest], Given] = {}
        self.counted: Counter[str] = Counter()
        """Commits, contributions and forks that were seen, and lives."""
        self._forged: dict[tuple[ShardId, Digest], str] = {}
        """Commits that bear a signature which is none, and why; nobody takes them but who was made to."""
        self._children: set[tuple[ShardId, Digest]] = set()
        self._unread: set[tuple[ShardId, Digest]] = set()
        """Commits of which nobody can tell what they made: of bad memory, or their payload is lost."""
        self.endings: dict[PeerId, Ending] = {}
        self._together: list[tuple[PeerId, PeerId]] = []
        """Who was live for whom when it ended, long after the last fault."""
        self._ended_at: dict[PeerId, float] = {}
        self.spoilt: set[PeerId] = set()
        """Peers whose memory or disk was damaged."""
        self.damaged: set[PeerId] = set()
        """Of them, those whose disk was."""
        self.forgetful: set[PeerId] = set()
        """Peers that have dropped payloads which they needed."""
        self.unwritten: set[PeerId] = set()
        """Peers whose disk refused something when they ended."""

    def violated(self, number: int, sentence: str) -> None:
        """Note a violation, and end the world."""
        self.violations.append(f"{number}, at {self.world.now:.3f} s: {sentence}")
        self.world.end()

    def failed(self, sentence: str, error: BaseException) -> None:
        """Something ended that should not have."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in where)
        self.violated(5, sentence + at)

    # -- 1: a head is a value ------------------------------------------------------------------------------------------

    def founded(self, peer: Peer) -> None:
        """Version 0."""
        for shard, chain in enumerate(peer.machine.core.chains):
            assert chain.head is not None
            theta, momentum = self._tensors(peer, ShardId(shard))
            self.values[ShardId(shard), chain.head.id] = Value(theta.copy(), momentum.copy(), {}, 0, 0)

    def observed(self, peer: Peer, event: ev.Event) -> None:
        """An event was handled."""
        if isinstance(event, ev.Applied):
            self._applied(peer, event.shard, event.head)
        elif isinstance(event, ev.Encoded):
            self._encoded(peer, event)
        elif isinstance(event, ev.Audited):
            self.counted["audits"] += 1
            self.counted["undelivered"] += not event.has_delivered
        elif isinstance(event, ev.Merged):
            self.world.durability.merged(peer, event.shard, event.base)
        elif isinstance(event, ev.Contradicted):
            self._contradicted(event.proof)

    def _contradicted(self, proof: Proof) -> None:
        """Rule E1: honest owners are killed at any moment and make no two commits of one parent. Rule V5: nobody finds
        that an honest owner merges wrongly."""
        owner, lying = proof.owner, self.world.lying_owners
        if isinstance(proof, WrongMerge):
            self.world.happened["wrong-merge"] += 1
            lying.caught.setdefault(owner, lying.wrong[owner])
            part = proof.header.parts[proof.part].payload.hex() if proof.part >= 0 else proof.header.payload
            if not lying.is_wrong(Digest(part)) and not self._is_false(proof):
                self.violated(3, f"{owner[-6:]} is said to have merged wrongly, which is not so")
            return
        self.world.happened["equivocation"] += 1
        disk = self.world.computers[owner].disk
        if owner not in self.spoilt | self.damaged | self.forgetful and not disk.is_unreliable:
            self.violated(1, f"{owner[-6:]} has made two commits of one version")

    def _is_false(self, proof: WrongMerge) -> bool:
        """Whether a commit names a contribution that was not made."""
        try:
            check_commit(self.world.manifest.run, proof.header, proof.signature)
        except FalseContributionError:
            return True
        return False

    def _tensors(self, peer: Peer, shard: ShardId) -> tuple[Vector, Vector]:
        piece = self.world.layout.shards[shard]
        span = slice(piece.start, piece.stop)
        return peer.state.theta[span].numpy(), peer.state.momentum[span].float().numpy()

    def _digest(self, theta: Vector, momentum: Vector) -> Digest:
        return state_digest(torch.from_numpy(theta), torch.from_numpy(momentum).to(self._form.momentum))

    def _applied(self, peer: Peer, shard: ShardId, head: Digest) -> None:
        chain = peer.machine.core.chains[shard]
        if chain.log and chain.log_ids[-1] == head:
            self.world.lying_owners.applied(peer.config.peer, chain.log[-1])
        if peer.state.heads[shard] != head or chain.head is None or chain.head.id != head:
            return  # it has moved on
        known = self.values.get((shard, head))
        if known is None:
            header = chain.log[-1] if chain.log and chain.log_ids[-1] == head else None
            if header is None:
                if (shard, head) in self._unread:
                    return
                self.violated(1, f"{peer.config.peer[-6:]} is at {head[:8]} of shard {shard}, made by nobody")
                return
            known = self._committed(peer, shard, head, header)
            if known is None:
                return
        if known.version:
            self.is_proved(peer, shard, head)
        if (problem := self._forged.get((shard, head))) and peer.config.peer not in self.spoilt:
            self.violated(3, f"commit {head[:8]} of shard {shard}: {problem}")
        theta, momentum = self._tensors(peer, shard)
        who = f"{peer.config.peer[-6:]} at version {known.version} ({head[:8]}) of shard {shard}"
        if not (np.array_equal(theta, known.theta) and np.array_equal(momentum, known.momentum)):
            if peer.config.peer in self.spoilt:
                return
            if known.owner in self.spoilt and self._digest(theta, momentum) == known.result:
                self.values[shard, head] = known._replace(theta=theta.copy(), momentum=momentum.copy())
            elif known.owner not in self.spoilt or not self._is_near(known, theta, momentum):
                self.violated(1, f"{who} has other parameters or momentum than this head stands for")
            return
        marks = {learner: mark.tokens for learner, mark in chain.marks.items()}
        if any(known.marks.get(learner) != tokens for learner, tokens in marks.items()):
            self.violated(1, f"{who} has other marks than its chain")
        if chain.step != known.step:
            self.violated(1, f"{who} is at step {chain.step}, its chain at {known.step}")

    def proof(self, peer: Peer, shard: ShardId, head: Digest) -> tuple[CommitHeader | None, bytes]:
        """A commit with its owner's signature, as this peer has it."""
        return peer.driver.payload_cache.shards[shard].proofs.get(head, (None, b""))

    def is_proved(self, peer: Peer, shard: ShardId, head: Digest) -> None:
        """What a peer shows of its head, to newcomers and in its checkpoints, bears the owner's signature."""
        header, signature = self.proof(peer, shard, head)
        if header is None or not verify(header.owner, messages.signed_commit_bytes(head), signature):
            how = "cannot be shown" if header is None else "its owner has not signed"
            self.violated(1, f"{peer.config.peer[-6:]} is at {head[:8]}, which {how}")

    def _committed(self, peer: Peer, shard: ShardId, head: Digest, header: CommitHeader) -> Value | None:
        """A commit that nobody has applied before."""
        parent = self.values.get((shard, header.parent))
        held = peer.driver.payload_cache.shards[header.shard].payloads.get(header.payload)
        payload = None if held is None else self._bytes_of(peer, held)
        is_lost = parent is not None and held is not None and payload is None
        if is_lost or (parent is None and (shard, header.parent) in self._unread):
            self._unread.add((shard, head))
            return None
        is_forgotten = held is None and peer.config.peer in self.forgetful  # while it was being applied
        if parent is None or (payload is None and not is_forgotten):
            self.violated(1, f"{peer.config.peer[-6:]} commits {head[:8]} of shard {shard} on nothing")
            return None
        self.counted["commits"] += 1
        self.world.durability.committed(header)
        self.counted["forks"] += (shard, header.parent) in self._children
        self._children.add((shard, header.parent))
        marks = dict(parent.marks)
        try:
            check_commit(self.world.manifest.run, header, self.proof(peer, shard, head)[1])
        except ValueError as error:
            self._forged[shard, head] = str(error)
        for c in header.contributors:
            if c.tokens_from < marks.get(c.learner, 0):
                self.violated(3, f"commit {head[:8]} of shard {shard} merges tokens of {c.learner[-12:]} again")
            marks[c.learner] = c.tokens_to
        actual_theta, actual_momentum = self._tensors(peer, shard)
        actual = actual_theta.copy(), actual_momentum.copy()
        value = Value(*actual, marks, header.step, header.version, header.owner, header.result)
        if payload is not None and not self._is_step(parent, value, shard, header, payload):
            if peer.config.peer not in self.spoilt:
                self.violated(1, f"commit {head[:8]} of shard {shard} does not give what its payload says")
            elif self._digest(*actual) != header.result:
                self._unread.add((shard, head))
                return None  # else it stands for what its owner's bad memory has signed
        self.values[shard, head] = value
        return value

    def _is_step(self, parent: Value, value: Value, shard: ShardId, header: CommitHeader, payload: Payload) -> bool:
        """Whether ``value`` is the outer step of this commit's payload on its parent."""
        self._is_merged(shard, header, change := self.decoded(shard, payload))
        outer, is_short = self.world.manifest.config.outer, self._form.momentum == torch.bfloat16
        expected = reference_math.outer_step(
            parent.theta, parent.momentum, change, outer, header.version, is_short=is_short
        )
        return self._is_near(value, *expected)

    def _is_near(self, value: Value, theta: NDArray[Any], momentum: NDArray[Any]) -> bool:
        return np.allclose(theta, value.theta, atol=1e-4) and np.allclose(momentum, value.momentum, atol=1e-4)

    def _bytes_of(self, peer: Peer, held: Held) -> Payload | None:
        """A payload's, wherever it lies, unless the disk has altered them; looking is no operation of the disk."""
        disk = self.world.computers[peer.config.peer].disk
        found = held.data or disk.files.get(str(held.path), b"")[held.at : held.at + held.size]
        return found if digest_of(found) == held.digest else None

    def decoded(self, shard: ShardId, payload: Payload) -> Vector:
        """What a payload stands for, float32 [elements of the shard]."""
        elements = self.world.layout.shards[shard].elements
        out = torch.empty(elements)
        bodies = compression.split(payload, quantization.chunk_count(elements), quantization.LARGEST_BODY)
        for body, start in zip(bodies, range(0, elements, CHUNK), strict=True):
            quantization.decode_chunk(body, out[start : start + CHUNK])
        return out.numpy()

    # -- 2: a contribution holds its steps -----------------------------------------------------------------------------

    def _encoded(self, peer: Peer, event: ev.Encoded) -> None:
        pending = peer.machine.contributions.pending.get(event.shard)
        if pending is None or pending.contribution.contributor != event.contributor:
            return
        self.counted["contributions"] += 1
        contribution: Contribution = pending.contribution
        c, shard = contribution.contributor, event.shard
        self.world.durability.given(contribution.payload, event.base)
        payload = self._bytes_of(peer, peer.driver.payload_cache.shards[shard].payloads[contribution.payload])
        if payload is None:  # it was made before, and the disk has lost it
            return
        vector = self.decoded(shard, payload)
        key = (shard, c.learner, c.tokens_from, c.tokens_to, event.base)
        self.given[key] = Given(event.base, vector, c.tokens, c.steps)
        learner, truth = self.world.learners.by_name.get(c.learner), self.world.learners.truths.get(c.learner)
        if learner is None or truth is None or learner.is_poisoned or not self.world.setting.is_exact:
            return
        lanes = vector.reshape(-1, CHUNK)
        steps = truth.steps_in(shard, c.tokens_from, c.tokens_to)
        found = lanes[:, learner.model.lane]
        rest = np.abs(np.delete(lanes, learner.model.lane, axis=1)).max()
        if peer.config.peer in self.spoilt:
            return
        if np.abs(found - steps).max() > NEARLY * max(1, steps) or rest > NEARLY * max(1, steps):
            self.violated(
                2,
                f"the contribution of {c.learner[-12:]} to shard {shard} names tokens {c.tokens_from} to "
                f"{c.tokens_to}, {steps} steps, and holds {found.min():.3f} to {found.max():.3f}, "
                f"beside its lane {rest:.3f}",
            )

    def threw_away(self, learner: SimulatedLearner, shards: tuple[ShardId, ...]) -> None:
        """A learner takes the global parameters in the place of its own."""
        host = self.world.hosts.get(learner.peer)
        is_meant = self.world.manifest.config.outer.adopt != "carry" or learner.peer in self.spoilt
        if is_meant or host is None or not learner.truth.tokens or learner.peer in self.forgetful:
            return
        chains = host.peer.machine.core.chains
        heads = [(shard, chains[shard].head) for shard in shards]
        if any(self.world.durability.is_altered(chains[shard].log) for shard in shards):
            return  # what its owner's bad memory has signed looks like a fault of one's own
        versions = [head.version for _, head in heads if head is not None]
        if max(versions) <= host.peer.config.log_length:
            self.violated(2, f"{learner.peer[-6:]}'s learner loses what it has trained of shards {[*shards]}")

    # -- 3: a commit is the merge that it says -------------------------------------------------------------------------

    def _is_merged(self, shard: ShardId, header: CommitHeader, change: Vector) -> None:
        made = (Digest(header.payload), *(Digest(part.payload.hex()) for part in header.parts))
        if any(map(self.world.lying_owners.is_wrong, made)):
            return
        vectors, weights = [], []
        for c in header.contributors:
            given = self.given.get((shard, c.learner, c.tokens_from, c.tokens_to, header.parent))
            if given is None:
                what = f"a contribution of {c.learner[-12:]} that it never gave"
                self.violated(3, f"commit {header.version} of shard {shard} names {what}")
                return
            vectors.append(given.vector.astype(np.float64))
            weights.append(given.tokens * given.tokens / given.steps)
        if not self.world.setting.is_exact:
            return
        schedule, how = self.world.manifest.config.schedule, self.world.layout.shards[shard].merge
        steps = [c.steps for c in header.contributors]
        if header.parts:
            vectors = [
                reference_math.merged(
                    [vectors[place] for place in part.members],
                    [weights[place] for place in part.members],
                    [steps[place] for place in part.members],
                    schedule.sync_every,
                    how,
                    [header.factors[place] for place in part.members] if header.factors else (),
                )
                for part in header.parts
            ]
            weights = [c.tokens * c.tokens / c.steps for c in header.merged]
            steps = [c.steps for c in header.merged]
        members = [len(part.members) for part in header.parts]
        # What is longer than ``longest`` when encoded becomes a tenth shorter: nearly equal lengths go either way.
        for longest in (header.longest * one for one in (1.0, 1.0 - 1e-3, 1.0 + 1e-3)):
            rules = (schedule.sync_every, how, header.merged_factors, longest, members)
            expected = reference_math.merged(vectors, weights, steps, *rules)
            if float(np.abs(expected - change).max()) <= 1e-2 * float(np.abs(expected).max()) + 1e-4:
                return
        self.violated(3, f"commit {header.version} of shard {shard} is not the merge of what it names")

    # -- 4 and 6: the end ----------------------------------------------------------------------------------------------

    def ended(self, peer: Peer, ending: Ending) -> None:
        """A peer has ended by itself."""
        name = peer.config.peer
        self.endings[name] = ending
        is_promised = peer.machine.core.departure == "finished" and not peer.machine.shutdown.is_overdue  # C5a
        if is_promised:
            self._ended_at[name] = self.world.now
        if self.world.now - self.world.harmed_at > CALM_S and is_promised:
            live = peer.machine.core.membership.live
            self._together += [(name, other) for other in live if self._is_waited_for(other)]
        is_sound = ending.status in (0, APART)
        if self.world.computers[name].is_full:
            self.unwritten.add(name)
        if NOT_WRITTEN in ending.reason:
            if name not in self.unwritten | self.spoilt | self.damaged and not self.world.computers[name].is_excused:
                self.violated(5, f"{name[-6:]} ended with status {ending.status}: {ending.reason}")
            return
        if ending.status == APART and not self.world.happened:
            self.violated(5, f"{name[-6:]} says that it is apart where nobody was: {ending.reason}")
            return
        is_excused = self.world.computers[name].is_excused or self._stands_still(name)
        if not is_sound and (not is_excused or ending.reason.startswith("internal error")):
            self.violated(5, f"{name[-6:]} ended with status {ending.status}: {ending.reason}")
            return
        learner = self.world.learners.by_name.get(peer.supervision.learner or LearnerId(""))
        if not is_sound or learner is None or name in self.spoilt or self.world.manifest.config.outer.adopt != "carry":
            return
        # The last commits, which nobody needs any more, its learner may not have taken.
        late = set[int]() if peer.state.shifts.is_empty else self.world.durability.late(name, learner)
        if not peer.machine.core.is_current:
            return  # it has left before it had joined
        if learner.is_dead and not learner.has_ended:
            return  # what a learner that dies has not given is gone
        truth = self.world.learners.truths[peer.supervision.learner]  # type: ignore[index]
        trained = truth.tokens[-1] if truth.tokens else 0
        delta = (learner.model.vector() - peer.state.theta).numpy()
        for shard, piece in enumerate(self.world.layout.shards):
            chain = peer.machine.core.chains[shard]
            assert chain.head is not None
            known = self.values.get((ShardId(shard), chain.head.id))
            merged = 0 if known is None else known.marks.get(peer.supervision.learner or LearnerId(""), 0)
            if shard not in late and merged != trained:
                self.violated(4, f"{name[-6:]} ended in order with {merged} of {trained} tokens in shard {shard}")
                return
            left = float(np.abs(delta[piece.start : piece.stop]).max())
            has_all = learner.has_ended and trained and self.world.setting.is_exact
            if shard not in late and has_all and left > NEARLY * max(1, len(truth.tokens)):
                self.violated(4, f"{name[-6:]} ended in order, its learner differs by {left:.3f} in shard {shard}")
                return

    def _is_waited_for(self, name: PeerId) -> bool:
        """Whether nobody should end before this peer has merged everything. Not promised of one whose learner gives
        nothing that can be used, or does not answer (rules N1a, N3a): it may begin again when the others are gone."""
        host = self.world.hosts.get(name)
        learner = None if host is None else host.peer.machine.core.learner
        return learner is None or learner.is_able

    def _stands_still(self, name: PeerId) -> bool:
        """Whether this peer's learner does nothing while its peer ends. Not promised of one that stands still until
        ``finish_s`` or ``leave_s`` has passed: what it has not given is lost."""
        learner = self.world.learners.newest.get(name)
        return learner is not None and learner.is_paused

    def finished(self) -> None:
        """Everybody has ended."""
        for owner, count in self.world.lying_owners.wrong.items():
            if count > MOST_UNCAUGHT and owner not in self.world.lying_owners.caught:
                self.violated(3, f"{owner[-6:]} has merged wrongly {count} times, and nobody has found out")
        heads = {
            name: self.world.computers[name].last_heads
            for name, ending in self.endings.items()
            if ending.status == 0 and name not in self.spoilt
        }
        for one, other in self._together:
            is_one_end = other in self._ended_at and self._ended_at[other] - self._ended_at[one] < TOGETHER_S
            if is_one_end and one in heads and other in heads and heads[one] != heads[other]:
                self.violated(6, f"{one[-6:]} and {other[-6:]} ended together, in order, with different models")
                return
        for name, computer in self.world.computers.items():
            files = computer.disk.files
            known = {path.removesuffix("json") + "safetensors" for path in files if path.endswith(".json")}
            left = [path for path in files if path.endswith((".part", ".safetensors")) and path not in known]
            if left and name in self.endings and not computer.is_full and name not in self.unwritten:
                self.violated(6, f"{name[-6:]} leaves {', '.join(left)}")
