"""Outer half of the laboratory: encoding, merging and the outer step.

The shipped path is ``p2pdiloco.codec`` itself (quantizers, merge rules, outer step), in the order in which the peer
calls it; a test compares the two. Payloads are compressed to count their bytes. What the product does not have (fp32
payloads, sparse ones, primal averaging, penalties) is implemented here for comparison.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.plain_gradient import Vector
from benchmarks.quality import sparse
from benchmarks.quality.headings import turned
from benchmarks.quality.settings import Setting
from p2pdiloco.codec import compression, merge, outer_optimizer, quantization
from p2pdiloco.codec.agreement import AgreementHistory
from p2pdiloco.codec.formats import CHUNK, FORMATS
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Codec, Layout, MergeRule, TensorSpec


class Parcel(NamedTuple):
    """What one message carries."""

    gradient: merge.Gradient
    values: Tensor
    """What it decodes to, float32 [elements]."""
    bytes: float


class Contributions(NamedTuple):
    """Contributions to one merge, as lists of equal length."""

    givers: list[int]
    """Learners, in increasing order, or groups."""
    gradients: list[merge.Gradient]
    weights: list[float]
    steps: list[int]

    def add(self, giver: int, gradient: merge.Gradient, weight: float, steps: int) -> None:
        """Append one."""
        self.givers.append(giver)
        self.gradients.append(gradient)
        self.weights.append(weight)
        self.steps.append(steps)

    def by_group(self, size: int) -> Iterator[tuple[int, Contributions]]:
        """Yield each group of ``size`` successive learners with its contributions."""
        every = zip(*self, strict=True)
        for group, rows in itertools.groupby(every, lambda row: row[0] // size):
            yield group, Contributions(*map(list, zip(*rows, strict=True)))


def pack(codec: str, x: Tensor) -> Parcel:
    """Encode ``x``, float32 [elements], and decode it again; see ``Setting.up`` for the codecs' names.

    Raises:
        ValueError: there is no such codec.
    """
    name, _, number = codec.partition("@")
    if name == "fp32":
        values = x.clone()
        return Parcel(Vector(values), values, 4.0 * x.numel())
    if name == "top":
        chunks, values = sparse.encode(float(number), x)
        return Parcel(Vector(values), values, float(sum(map(len, chunks))))
    how = quantization.recipe(_codec(name), float(number) if number else None)
    bodies = [bytes(body) for body in quantization.encode_vector(how, x)]
    values = quantization.decode_chunks(bodies, torch.empty_like(x))
    return Parcel(merge.EncodedGradient(bodies, x.numel()), values, float(len(compression.join(bodies))))


def _codec(name: str) -> Codec:
    for known in FORMATS:
        if known == name:
            return known
    raise ValueError(f"there is no codec {name!r}: fp32, top@SHARE, or one of {', '.join(FORMATS)}")


class Exchange:
    """The global parameters and what commits do to them. All peers have the same, so one is enough."""

    def __init__(self, setting: Setting, layout: Layout, theta: Tensor, tensors: Sequence[TensorSpec] = ()) -> None:
        """``tensors``: in the model's own order; needed where ``setting.spectrum`` is not 1."""
        self.layout = layout
        sizes = [tensors[i].elements for i in layout.order] if tensors else []
        pieces = [slice(start, start + size) for start, size in zip(layout.starts, sizes, strict=False)]
        self._matrices = [
            (piece, tensors[i].shape)
            for i, piece in zip(layout.order, pieces, strict=False)
            if len(tensors[i].shape) == 2 and "blocks" in tensors[i].name
        ]
        self.theta = theta
        is_narrow = setting.momentum_type == "bfloat16"
        self.momentum = torch.zeros(theta.shape, dtype=torch.bfloat16 if is_narrow else torch.float32)
        self._owed = torch.zeros(setting.learners, *theta.shape)
        """What the downlink's rounding took off, by owner, where a setting has owners make up for it."""
        self._kept = torch.zeros(setting.learners if setting.kept else 0, *theta.shape)
        """Remainders of the uplink's codec, by learner, that its node keeps for the next contribution."""
        self._owners: dict[ShardId, int] = {}
        """Who made each shard's last step."""
        self._draws = random.Random(f"owners {setting.seed}")
        self._agreements = [AgreementHistory() for _ in range(1 + setting.groups)]
        """By level (``_merge``), as if one peer owned all shards, and one collected all of a group's contributions."""
        self.lowered = 0
        """Contributions that weighed less because most others disagreed."""
        self.given = 0
        self.shortened = 0
        """Contributions, and how many of them did not count as long as they were."""
        self.up_bytes = 0.0
        self.up_parameters = 0
        self.down_bytes = 0.0
        self.down_parameters = 0
        self._setting = setting
        self._rounds = [0] * len(layout.shards)
        is_primal = setting.outer == "primal"
        self._plain = theta.clone() if is_primal else torch.empty(0)
        """Where plain outer steps alone would lead."""
        self.average = theta.clone() if is_primal else theta
        """Parameters that are measured in the end: the global ones, or a running average."""

    def span(self, shard: ShardId) -> slice:
        """The shard's place in flat vectors."""
        piece = self.layout.shards[shard]
        return slice(piece.start, piece.stop)

    def contribute(self, shard: ShardId, snapshot: Tensor, learner: int = 0) -> Parcel:
        """A learner's outer gradient: global parameters minus its own, ``snapshot`` float32 [all elements]."""
        span = self.span(shard)
        meant = self.theta[span] - snapshot[span]
        if self._setting.kept:
            meant += self._kept[learner, span]
        parcel = pack(self._setting.up, meant)
        if self._setting.kept:
            self._kept[learner, span] = (meant - parcel.values).mul_(self._setting.kept)
        self.up_bytes += parcel.bytes
        self.up_parameters += parcel.values.numel()
        return parcel

    def commit(
        self,
        shard: ShardId,
        learners: Sequence[int],
        gradients: Sequence[merge.Gradient],
        weights: Sequence[float],
        steps: Sequence[int],
    ) -> Tensor:
        """Merge, and make the outer step; returns new - old global parameters, float32 [elements]."""
        span, rule = self.span(shard), self.layout.shards[shard].merge
        merged = torch.empty_like(self.theta[span])
        kind, _, strength = self._setting.heading.partition("@")
        if kind:
            values = turned(kind, float(strength or 0), [_decoded(v) for v in gradients], self.momentum[span])
            gradients = [Vector(v) for v in values]
        if self._setting.penalty:
            norms = [v.norm() for v in gradients]
            weights = [weight * math.exp(min(norms) - norm) for weight, norm in zip(weights, norms, strict=True)]
        given = Contributions(list(learners), list(gradients), list(weights), list(steps))
        self._merge(rule, shard, self._by_group(rule, shard, given) if self._setting.groups > 1 else given, merged)
        if self._setting.spectrum != 1.0:
            self._flatten(span, merged)
        owner = 0 if self._setting.owners == "one" else self._draws.randrange(self._setting.learners)
        if self._owners.setdefault(shard, owner) != owner:
            self._owed[owner, span] = 0.0  # another made the last step
        self._owners[shard] = owner
        merged += self._owed[owner, span]
        parcel = pack(self._setting.down, merged)
        if self._setting.owed:
            self._owed[owner, span] = (merged - parcel.values).mul_(self._setting.owed)
        self.down_bytes += parcel.bytes
        self.down_parameters += merged.numel()
        self._rounds[shard] += 1
        change = parcel.values.clone()
        if self._setting.outer == "primal":
            return self._primal_step(span, change)
        rate, factor = self._setting.outer_rate, self._setting.outer_momentum
        if self._setting.correction:
            rate = outer_optimizer.rate_at(self._rounds[shard], rate, factor)
        outer_optimizer.outer_step(
            self.theta[span], self.momentum[span], change, learning_rate=rate, momentum_factor=factor
        )
        return change

    def _merge(self, rule: MergeRule, shard: ShardId, given: Contributions, out: Tensor, level: int = 0) -> None:
        """Merge into ``out``. ``level``: 0 for the merge that is committed, else the group's number from 1."""
        gradients, weights, steps = given.gradients, given.weights, given.steps
        if self._setting.bounded:
            factors = self._factors(given.givers, gradients, shard, level) if self._setting.agreement else None
            merge.merge(rule, gradients, weights, steps, self._setting.sync_every, out, factors)
            norms = [v.norm() for v in gradients]
            counted = merge.counted_lengths(norms, steps, self._setting.sync_every)
            self.given += len(norms)
            self.shortened += sum(c < n for c, n in zip(counted, norms, strict=True))
        elif rule == "rda":
            merge.radial_directional(gradients, weights, out)
        else:
            merge.direct_mean(gradients, weights, out)

    def _by_group(self, rule: MergeRule, shard: ShardId, given: Contributions) -> Contributions:
        """Merge each group's contributions, and return what the groups send: each with the sum of its members' weights
        and the most steps of a member."""
        size = self._setting.learners // self._setting.groups
        found = Contributions([], [], [], [])
        for group, mine in given.by_group(size):
            merged = torch.empty(mine.gradients[0].elements)
            self._merge(rule, shard, mine, merged, 1 + group)
            sent = pack(self._setting.up, merged).gradient
            found.add(group, sent, sum(mine.weights), max(mine.steps))
        return found

    def _factors(
        self, learners: Sequence[int], gradients: Sequence[merge.Gradient], shard: int, level: int
    ) -> list[float] | None:
        found = self._agreements[level].judge(list(map(str, learners)), gradients, shard).factors
        self.lowered += sum(per_cent < 100 for per_cent in found)
        return [per_cent / 100 for per_cent in found] or None

    def _flatten(self, span: slice, merged: Tensor) -> None:
        """The singular values of a shard's whole matrices become more alike; ``merged``, in place."""
        for piece, shape in self._matrices:
            if span.start <= piece.start and piece.stop <= span.stop:
                matrix = merged[piece.start - span.start : piece.stop - span.start].view(shape)
                length = matrix.norm()
                u, s, v = torch.linalg.svd(matrix, full_matrices=False)
                new = (u * s.clamp(min=1e-30).pow(self._setting.spectrum)) @ v
                matrix.copy_(new.mul_(length / new.norm().clamp(min=1e-30)))

    def _primal_step(self, span: slice, gradient: Tensor) -> Tensor:
        plain, average, share = self._plain[span], self.average[span], self._setting.outer_momentum
        plain.sub_(gradient, alpha=self._setting.outer_rate)
        average.lerp_(plain, 1.0 - share)
        change = torch.lerp(plain, average, share) - self.theta[span]
        self.theta[span] += change
        return change


def _decoded(gradient: merge.Gradient) -> Tensor:
    values = torch.zeros(gradient.elements)
    for chunk, start in enumerate(range(0, gradient.elements, CHUNK)):
        gradient.add_to(values[start : start + CHUNK], chunk, 1.0)
    return values
