"""Every token trained stands in the parameters once: the node's global state and the learner's side of the link, both
real, over a real socket and shared memory, against a model in float64 that knows nothing of shifts.

The model: a learner's parameters are the global ones plus a *delta*, everything of its own that is not merged. A step
adds to it, a contribution that is merged leaves it, one that a fork takes back returns to it, and taking the global
parameters over ends it. What crosses the socket when, what waits in which buffer, may not matter.

All values are small multiples of powers of two, so that no sum is ever rounded and everything must be equal to the bit.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2pdiloco.codec import compression, digests, quantization
from p2pdiloco.codec.digests import packed
from p2pdiloco.codec.merge import LONGEST
from p2pdiloco.peer import learner_updates
from p2pdiloco.peer.learner_updates import Moves, Place, Shifts
from p2pdiloco.peer.model_state import ModelState, StaleBaseError
from p2pdiloco.protocol.ids import FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire import learner_ipc

ELEMENTS = 24
FRAGMENTS = 2
RATE, MOMENTUM = 0.5, 0.5
COMMITS_MOST = 10
"""Each makes the fractions two bits finer at most; float32 has room for so many."""
STORIES = 200
EXACT_MOST = 128
"""Integers up to here are exact in bf16, their halves, too."""
OTHER = LearnerId("other/1")


def as_long(values: NDArray[np.float64], value: int) -> int:
    """``value``, or what makes a contribution at most ``LONGEST`` times as long as ``values``, and ``values`` as it:
    then neither is cut short."""
    rms = float(np.sqrt(np.mean(np.square(values))))
    if not rms or rms / LONGEST <= abs(value) <= LONGEST * rms:
        return value
    nearest = round(rms)
    return int(np.copysign(nearest, value)) if value and rms / LONGEST <= nearest <= LONGEST * rms else 0


class Given(NamedTuple):
    """A contribution of this learner's."""

    payload: bytes
    values: np.ndarray
    """What it decodes to: the negative of what was trained."""


class Spied(FlatParameters):
    """Tells the model what the learner does, at the moment it does it."""

    model: Conservation

    def copy_from(self, vector, shards, at=()):  # type: ignore[no-untyped-def]
        taken = super().copy_from(vector, list(shards := list(shards)), at)
        self.model.replaced(shards)
        return taken

    def copy_to(self, vector, shards, at=()):  # type: ignore[no-untyped-def]
        taken = super().copy_to(vector, list(shards := list(shards)), at)
        self.model.copied(shards)
        return taken


class Conservation:
    """One peer; two fragments of one shard each."""

    def __init__(self) -> None:
        parameters = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(FRAGMENTS)]
        tensors = tuple(
            TensorSpec(name=str(i), shape=(ELEMENTS,), merge="direct", fragment=FragmentId(i)) for i in range(FRAGMENTS)
        )
        self.layout = make_layout(tensors, FRAGMENTS, 1024, "direct")
        self.shards = [shard.shard for shard in self.layout.shards]
        self.vectors = SharedVectors.create(self.layout.elements, ring_elements(self.layout))
        outer = OuterConfig(learning_rate=RATE, momentum=MOMENTUM)
        self.state = ModelState(self.layout, outer, CodecConfig(up="bf16", down="bf16"), self.vectors, round_steps=24)
        self.names = (digest_of(f"head {n}".encode()) for n in itertools.count())
        self.lives = (LearnerId(f"me/{n}") for n in itertools.count())
        self.theta = np.zeros((len(self.shards), ELEMENTS))
        self.momentum = np.zeros((len(self.shards), ELEMENTS))
        for shard in self.shards:
            start = torch.arange(ELEMENTS, dtype=torch.float32)
            self.theta[shard] = start.numpy()
            self.state.put(shard, next(self.names), start, torch.zeros(ELEMENTS))
        self.parameters = parameters
        self.flat = Spied([(str(i), p) for i, p in enumerate(parameters)], tensors, self.layout)
        self.flat.model = self
        self.commits = 0
        self.node: socket.socket | None = None
        self.connect()
        self.begin()

    def connect(self) -> None:
        """The link of a learner's life."""
        self.close()
        self.node, theirs = socket.socketpair()
        self.node.setblocking(False)
        self.link = NodeLink(self.flat, self.vectors, Channel(theirs), last_step=1 << 40)
        self.theirs = theirs
        self.decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        self.unread: list[learner_ipc.FromLearner] = []

    def close(self) -> None:
        if self.node is not None:
            self.node.close()
            self.theirs.close()

    def begin(self) -> None:
        """A new learner."""
        self.learner = next(self.lives)
        self.delta = np.zeros((len(self.shards), ELEMENTS))
        self.copy = np.zeros((len(self.shards), ELEMENTS))
        """The delta when the learner copied, brought up to date with what was merged since."""
        self.has_copy = dict.fromkeys(self.shards, False)
        """The node holds a snapshot that an encode must take."""
        self.is_asked = dict.fromkeys(range(FRAGMENTS), False)
        self.open: dict[ShardId, list[Given]] = {shard: [] for shard in self.shards}
        self.merged: dict[ShardId, list[Given]] = {shard: [] for shard in self.shards}
        self.eras = dict.fromkeys(self.shards, 0)
        """How often the learner was to take the global parameters over."""
        self.told: dict[ShardId, deque[int]] = {shard: deque() for shard in self.shards}
        """Of these eras its commands are, in order."""
        self.taken = dict.fromkeys(self.shards, -1)
        """Its own era."""
        self.copied_in = dict.fromkeys(self.shards, -1)
        """And when it copied: what an earlier era trained may not be given."""
        self.is_begun = False
        self.pass_on(self.state.shifts.load(self.learner))

    def tell(self, message: learner_ipc.FromNode) -> None:
        assert self.node is not None
        self.node.sendall(learner_ipc.encode(message))

    def at(self, place: Place, shards: Sequence[ShardId]) -> tuple[int, ...]:
        found = self.state.shifts.memory.starts(place, shards)
        assert found is not None
        return found

    def pass_on(self, shifts: Shifts) -> None:
        """As Supervision does."""
        if shifts.added:
            self.tell(learner_ipc.Shift(shards=shifts.added, replace=False, at=self.at("shift", shifts.added)))
        if shifts.replaced:
            for shard in shifts.replaced:
                self.told[shard].append(self.eras[shard])
            self.tell(learner_ipc.Shift(shards=shifts.replaced, replace=True, at=self.at("shift", shifts.replaced)))
        if shifts.is_last_piece:
            self.is_begun = True
            self.tell(learner_ipc.Begin(step=0))

    # -- what the learner does, told by it -----------------------------------------------------------------------------

    def replaced(self, shards: list[ShardId]) -> None:
        for shard in shards:
            self.taken[shard] = self.told[shard].popleft()
            self.delta[shard] = 0.0

    def copied(self, shards: list[ShardId]) -> None:
        for shard in shards:
            self.copy[shard] = self.delta[shard]
            self.copied_in[shard] = self.taken[shard]

    # -- what can happen -----------------------------------------------------------------------------------------------

    def step(self, value: int, at: int) -> None:
        """The learner trains."""
        change = np.full(ELEMENTS, float(value))
        change[at] += 1.0
        for shard, parameter in zip(self.shards, self.parameters, strict=True):
            with torch.no_grad():
                parameter.add_(torch.from_numpy(change).float())
            self.delta[shard] += change

    def boundary(self) -> None:
        """The learner does what it was told."""
        assert self.link.boundary()
        assert self.link.boundary()
        assert self.node is not None
        try:
            self.unread += self.decoder.feed(self.node.recv(1 << 16))
        except BlockingIOError:
            return

    def hear(self, most: int) -> None:
        """The node reads some of the answers."""
        for _ in range(min(most, len(self.unread))):
            match self.unread.pop(0):
                case learner_ipc.Shifted(shards=shards):
                    self.pass_on(self.state.shifts.acknowledge(shards))
                case learner_ipc.Snapshotted(fragment=fragment):
                    self.state.shifts.complete_snapshot(fragment)
                    self.is_asked[fragment] = False
                    for shard in self.layout.fragments[fragment]:
                        self.has_copy[shard] = True
                case _:
                    pass

    def ask(self, fragment: int) -> None:
        """A snapshot, one at a time."""
        if self.is_begun and not self.is_asked[fragment]:
            self.is_asked[fragment] = True
            self.state.shifts.begin_snapshot(FragmentId(fragment))
            shards = self.layout.fragments[fragment]
            for shard in shards:
                self.has_copy[shard] = False
            at = self.at("snapshot", shards)
            self.tell(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=0, at=at))

    def encode(self, shard: int) -> None:
        """What is given is all that was not merged when the learner copied, to the bit."""
        piece = ShardId(shard)
        head = self.state.heads[piece]
        assert head is not None
        if not self.has_copy[piece] or self.copied_in[piece] != self.eras[piece]:
            with pytest.raises(StaleBaseError):
                self.state.encode(piece, head)
            return
        if np.abs(self.copy[piece]).max() > EXACT_MOST:
            return
        payload, _ = self.state.encode(piece, head)
        values = decoded(payload)
        assert np.array_equal(values, -self.copy[piece]), "the contribution is not what was trained"
        self.has_copy[piece] = False
        self.open[piece].append(Given(payload, values))

    def give(self, shard: int, value: int, is_late: bool) -> None:
        """A round without haste; or up to the snapshot."""
        self.step(value, shard)
        self.ask(shard)
        self.boundary()
        if self.unread:
            self.hear(len(self.unread))
        if not is_late:
            self.encode(shard)

    def commit(self, shard: int, settles: int, value: int, is_reset: bool, is_own: bool, prepares: bool) -> None:
        """A version comes: merged here or elsewhere, of this learner's contributions or of others' alone."""
        piece, self.commits = ShardId(shard), self.commits + 1
        mine = self.open[piece][:settles]
        base = self.state.heads[piece]
        assert base is not None
        is_given = bool(mine) and np.abs(mine[0].values).max() <= EXACT_MOST // 2
        other = encoded(np.full(ELEMENTS, float(as_long(mine[0].values, value) if is_given else value)))
        if prepares and not is_own:  # our own merge, which another's commit forestalls
            self.state.merge(
                piece, base, self.commits, [(Contributor(OTHER, 0, 10, 0, 1), encoded(np.full(ELEMENTS, 9.0)))]
            )
        given = [(Contributor(OTHER, 0, 10, 0, 1), other)]
        if is_given:
            given = [(Contributor(self.learner, 0, 10, 0, 1), mine[0].payload), *given]
        gradient = sum((decoded(payload) for _, payload in given), np.zeros(ELEMENTS)) / len(given)
        if is_own:
            merged = self.state.merge(piece, base, self.commits, given)
            payload, listed = merged.payload, merged.digests
            assert np.array_equal(decoded(payload), gradient)
        else:
            payload, listed = encoded(gradient), b""
        self.momentum[piece] = MOMENTUM * self.momentum[piece] + gradient
        self.theta[piece] -= RATE * (gradient + MOMENTUM * self.momentum[piece])
        expected = digests.digest_list(single(self.theta[piece]), single(self.momentum[piece]))
        assert listed in (b"", expected), "the owner promises another result"
        head = next(self.names)
        header = CommitHeader(
            piece, self.commits, base, 0, PeerId("owner"), (), 0, digest_of(payload), digest_of(expected), head, 1e30
        )
        moves = Moves(self.learner, [g.payload for g in mine], (), is_reset)
        self.eras[piece] += is_reset
        self.pass_on(self.state.apply(header, head, payload, expected, moves))
        self.moved(piece, mine, [], is_reset=is_reset)

    def fetch(self, shard: int, settles: int, restores: int, value: int, is_reset: bool) -> None:
        """Another chain's state, which has merged some of what ours has not, or has not what ours has."""
        piece = ShardId(shard)
        mine, back = self.open[piece][:settles], self.merged[piece][-restores:] if restores else []
        self.theta[piece] = np.full(ELEMENTS, float(value))
        self.momentum[piece] = np.full(ELEMENTS, float(-value))
        theta, momentum, head = single(self.theta[piece]), single(self.momentum[piece]), next(self.names)
        self.state.stage(piece, head, [packed(theta, momentum)], digests.digest_list(theta, momentum))
        moves = Moves(self.learner, [g.payload for g in mine], [g.payload for g in back], is_reset)
        self.eras[piece] += is_reset
        self.pass_on(self.state.install(piece, head, moves))
        self.moved(piece, mine, back, is_reset=is_reset)

    def moved(self, shard: ShardId, settled: list[Given], restored: list[Given], *, is_reset: bool) -> None:
        """What a new head does to the delta."""
        assert np.array_equal(self.state.theta[self.span(shard)].numpy(), self.theta[shard])
        assert np.array_equal(self.state.momentum[self.span(shard)].numpy(), self.momentum[shard])
        if is_reset:
            self.open[shard].clear()
            self.merged[shard].clear()
            return
        for given in settled:
            self.open[shard].remove(given)
            self.merged[shard].append(given)
        for given in restored:
            self.merged[shard].remove(given)
            self.open[shard].append(given)
        change = sum((g.values for g in settled), np.zeros(ELEMENTS)) - sum(
            (g.values for g in restored), np.zeros(ELEMENTS)
        )
        self.delta[shard] += change
        self.copy[shard] += change

    def dies(self) -> None:
        """The learner's process ends, and another begins, over a link of its own."""
        self.state.shifts.unload()
        self.connect()
        self.begin()

    # -- at the end ----------------------------------------------------------------------------------------------------

    def span(self, shard: ShardId) -> slice:
        piece = self.layout.shards[shard]
        return slice(piece.start, piece.stop)

    def drain(self) -> None:
        """Until nothing is on its way."""
        for _ in range(8):
            self.boundary()
            self.hear(len(self.unread))

    def rest(self) -> None:
        """All shifts are taken: every token stands in the parameters once."""
        self.drain()
        for shard, parameter in zip(self.shards, self.parameters, strict=True):
            found = parameter.detach().numpy().astype(np.float64)
            assert np.array_equal(found, self.theta[shard] + self.delta[shard]), "tokens were lost or repeated"


def tell_story(seed: int) -> None:
    """Whatever may happen, in an order drawn from ``seed``; then all comes to rest."""
    random, peer = Random(seed), Conservation()
    told: list[str] = []

    def luck(one_in: int) -> bool:
        return random.randrange(one_in) == 0

    try:
        for _ in range(ACTIONS):
            shard, value = random.randrange(FRAGMENTS), random.randint(-2, 2)
            what = random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
            told.append(f"{what} {shard} {value}")
            match what:
                case "step":
                    peer.step(value, shard)
                case "boundary":
                    peer.boundary()
                case "hear":
                    peer.hear(random.randint(1, 3))
                case "ask":
                    peer.ask(shard)
                case "encode":
                    peer.encode(shard)
                case "give":
                    peer.give(shard, value, luck(2))
                case "commit" if peer.commits < COMMITS_MOST:
                    peer.commit(shard, random.randint(0, 2), value, luck(8), luck(2), luck(2))
                case "fetch":
                    peer.fetch(shard, random.randint(0, 2), random.randint(0, 2), value, luck(8))
                case "dies" if luck(3):
                    peer.dies()
        peer.rest()
    except BaseException as error:
        error.add_note(f"story {seed}: " + "; ".join(told))
        raise
    finally:
        peer.close()


ACTIONS = 60
WEIGHTS = {"step": 3, "boundary": 3, "hear": 4, "ask": 2, "encode": 3, "give": 4, "commit": 4, "fetch": 1, "dies": 1}


@pytest.mark.parametrize("first", range(0, STORIES, 50))
def test_every_token_trained_stands_in_the_parameters_once(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a learner that is given one shard after the other, while others' commits come."""
    monkeypatch.setattr(learner_updates, "PIECE", 1)
    torch.set_num_threads(1)
    for seed in range(first, first + 50):
        tell_story(seed)


def single(values: np.ndarray) -> Tensor:
    """float32, exactly."""
    found = torch.from_numpy(values).float()
    assert np.array_equal(found.numpy(), values), "the test's own values are not exact any more"
    return found


def encoded(values: np.ndarray) -> bytes:
    """A payload of somebody else's."""
    bodies = quantization.encode_vector(quantization.recipe("bf16"), single(values))
    payload = compression.join([bytes(body) for body in bodies])
    assert np.array_equal(decoded(payload), values)
    return payload


def decoded(payload: bytes) -> np.ndarray:
    """Its values."""
    bodies = compression.split(payload, 1, quantization.LARGEST_BODY)
    return quantization.decode_chunks(bodies, torch.empty(ELEMENTS)).numpy().astype(np.float64)
