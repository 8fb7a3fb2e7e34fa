"""Outer half of the laboratory: encoding, merging and the outer step.

The shipped path is ``p2pdiloco.codec`` itself (quantizers, merge rules, outer step), in the order in which the peer
calls it; a test compares the two. Payloads are compressed to count their bytes. What the product does not have (fp32
and top-k payloads, Delayed Nesterov, restarts, other roundings) is implemented here for comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.quality.headings import agreed, turned
from benchmarks.quality.settings import Setting
from p2pdiloco.codec import compression, merge, outer_optimizer, quantization
from p2pdiloco.codec.agreement import AgreementHistory
from p2pdiloco.codec.formats import BLOCK, CHUNK, FORMATS
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Codec, Layout, TensorSpec


class Parcel(NamedTuple):
    """What one message carries."""

    gradient: merge.Gradient
    values: Tensor
    """What it decodes to, float32 [elements]."""
    bytes: float


def pack(codec: str, x: Tensor) -> Parcel:
    """Encode ``x``, float32 [elements], and decode it again; see ``Setting.up`` for the codecs' names.

    Raises:
        ValueError: there is no such codec.
    """
    name, _, number = codec.partition("@")
    if name == "fp32":
        values = x.clone()
        return Parcel(merge.Vector(values), values, 4.0 * x.numel())
    if name == "topk":
        return _top(float(number), x)
    if name in ("dither", "stochastic"):
        return _dithered(float(number), x, is_moved_back=name == "dither")
    how = quantization.recipe(_codec(name), float(number) if number else None)
    bodies = [bytes(body) for body in quantization.encode_vector(how, x)]
    values = quantization.decode_chunks(bodies, torch.empty_like(x))
    return Parcel(merge.EncodedGradient(bodies, x.numel()), values, float(len(compression.join(bodies))))


def _codec(name: str) -> Codec:
    for known in FORMATS:
        if known == name:
            return known
    raise ValueError(
        f"there is no codec {name!r}: fp32, topk@SHARE, dither@STEP, stochastic@STEP, or one of {', '.join(FORMATS)}"
    )


def _top(share: float, x: Tensor) -> Parcel:
    """The largest elements in bf16; their places take the entropy of choosing them, computed, not coded."""
    count = max(1, round(share * x.numel()))
    where = x.abs().topk(count).indices
    values = torch.zeros_like(x)
    values[where] = x[where].bfloat16().float()
    p = count / x.numel()
    place_bits = -math.log2(p) - (1 - p) / p * math.log2(1 - p) if p < 1.0 else 0.0
    return Parcel(merge.Vector(values), values, count * (2.0 + place_bits / 8.0))


def _dithered(step: float, x: Tensor, *, is_moved_back: bool) -> Parcel:
    """As int4 with such a step, but that what is rounded is moved by a random number first, and moved back after (all
    peers would draw it alike, from shard and version), or not (stochastic rounding, which only the sender need know).
    Either way what is lost is nothing on average, and small values are not always lost; moved back it has nothing to do
    with the values at all, and is half as large a square. Symbols take their entropy, computed, not coded, and a block
    its scale."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    width = step * blocks.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
    seed = int(x[:64].view(torch.int32).to(torch.int64).sum()) & 0x7FFFFFFF
    moved = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    symbols = (blocks / width + moved).round()
    values = ((symbols - moved if is_moved_back else symbols) * width).flatten()[: x.numel()]
    counts = torch.unique(symbols, return_counts=True)[1].double()
    shares = counts / counts.sum()
    bits = float(-(shares * shares.log2()).sum())
    return Parcel(merge.Vector(values), values, x.numel() * bits / 8.0 + len(blocks))


class Exchange:
    """The global parameters and what commits do to them. All peers have the same, so one is enough."""

    def __init__(self, setting: Setting, layout: Layout, theta: Tensor, tensors: Sequence[TensorSpec] = ()) -> None:
        """``tensors``: in the model's own order; needed where ``setting.scope`` is "tensor"."""
        self.layout = layout
        sizes = [tensors[i].elements for i in layout.order] if tensors else []
        self._pieces = [slice(start, start + size) for start, size in zip(layout.starts, sizes, strict=False)]
        self._matrices = [
            (piece, tensors[i].shape)
            for i, piece in zip(layout.order, self._pieces, strict=False)
            if len(tensors[i].shape) == 2 and "blocks" in tensors[i].name
        ]
        self.inner_share = 1.0
        """Of its peak: the inner rate that the round at hand was trained with."""
        self._shares: dict[ShardId, float] = {}
        self.theta = theta
        is_narrow = setting.momentum_type == "bfloat16"
        self.momentum = torch.zeros(theta.shape, dtype=torch.bfloat16 if is_narrow else torch.float32)
        self._draw = torch.Generator().manual_seed(setting.seed)
        self._owed = torch.zeros(setting.learners, *theta.shape)
        """What the downlink's rounding took off, by owner, where a setting has owners make up for it."""
        self._owners: dict[ShardId, int] = {}
        """Who made each shard's last step."""
        self._draws = random.Random(f"owners {setting.seed}")
        self._agreement = AgreementHistory()
        """As if one peer owned all shards."""
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
        self._noise = torch.Generator().manual_seed(setting.seed)
        self._usual: dict[ShardId, float] = {}
        """How long the last honest contribution was."""
        self._rounds = [0] * len(layout.shards)
        self._delayed = torch.zeros_like(theta) if setting.outer == "delayed" else torch.empty(0)
        is_primal = setting.outer == "primal"
        self._plain = theta.clone() if is_primal else torch.empty(0)
        """Where plain outer steps alone would lead."""
        self.average = theta.clone() if is_primal else theta
        """Parameters that are measured in the end: the global ones, or a running average."""

    def span(self, shard: ShardId) -> slice:
        """The shard's place in flat vectors."""
        piece = self.layout.shards[shard]
        return slice(piece.start, piece.stop)

    def contribute(self, shard: ShardId, snapshot: Tensor, noise: float = 0.0) -> Parcel:
        """A learner's outer gradient: global parameters minus its own, ``snapshot`` float32 [all elements]. ``noise``:
        instead a random vector so many times as long as the last honest one."""
        span = self.span(shard)
        gradient = self.theta[span] - snapshot[span]
        if noise:
            gradient = self._drawn(gradient, noise * self._usual.get(shard, 0.0))
        else:
            self._usual[shard] = float(gradient.norm())
        parcel = pack(self._codec_at(self._setting.up, shard), gradient)
        self.up_bytes += parcel.bytes
        self.up_parameters += parcel.values.numel()
        return parcel

    def _codec_at(self, codec: str, shard: ShardId) -> str:
        """The codec with the step that it has at the shard's round, where that goes from one to another ("2.0>1.0")."""
        first, _, last = codec.partition(">")
        if not last:
            return codec
        name, _, step = first.partition("@")
        share = min(1.0, self._rounds[shard] * self._setting.sync_every / self._setting.steps)
        return f"{name}@{float(step) + (float(last) - float(step)) * share:.4f}"

    def _drawn(self, like: Tensor, length: float) -> Tensor:
        drawn = torch.randn(like.shape, generator=self._noise)
        return drawn.mul_(length / float(drawn.norm()))

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
            gradients = [merge.Vector(v) for v in values]
        if self._setting.penalty:
            norms = [v.norm() for v in gradients]
            weights = [weight * math.exp(min(norms) - norm) for weight, norm in zip(weights, norms, strict=True)]
        if self._setting.scope == "tensor":
            for cut in self._tensors(span):
                parts = [merge.Vector(_decoded(v)[cut]) for v in gradients]
                merge.merge(rule, parts, weights, steps, self._setting.sync_every, merged[cut])
        elif self._setting.bounded:
            factors = self._factors(learners, gradients, shard) if self._setting.agreement else None
            merge.merge(rule, gradients, weights, steps, self._setting.sync_every, merged, factors)
            norms = [v.norm() for v in gradients]
            counted = merge.counted_lengths(norms, steps, self._setting.sync_every)
            self.given += len(norms)
            self.shortened += sum(c < n for c, n in zip(counted, norms, strict=True))
        elif rule == "rda":
            merge.radial_directional(gradients, weights, merged)
        else:
            merge.direct_mean(gradients, weights, merged)
        if kind == "agree":
            agreed([_decoded(v) for v in gradients], merged, float(strength))
        if self._setting.spectrum != 1.0:
            self._flatten(span, merged)
        owner = self._owner_of(shard)
        if self._owners.setdefault(shard, owner) != owner and self._setting.owners.startswith("drawn"):
            self._owed[owner, span] = 0.0  # another made the last step
        self._owners[shard] = owner
        merged += self._owed[owner, span]
        parcel = pack(self._codec_at(self._setting.down, shard), merged)
        if self._setting.owed:
            self._owed[owner, span] = (merged - parcel.values).mul_(self._setting.owed)
        self.down_bytes += parcel.bytes
        self.down_parameters += merged.numel()
        self._rounds[shard] += 1
        restart = self._setting.restart_every
        if restart and self._rounds[shard] % restart == 0:
            self.momentum[span].zero_()
        change = parcel.values.clone()
        if self._setting.outer == "delayed":
            return self._delayed_step(span, change, self._rounds[shard])
        if self._setting.outer == "primal":
            return self._primal_step(span, change)
        rate, factor = self._setting.outer_rate, self._setting.outer_momentum
        if self._setting.outer_end:
            left = self.inner_share
            end = self._setting.outer_end
            rate, factor = (left * now + (1.0 - left) * last for now, last in zip((rate, factor), end, strict=True))
        if self._setting.momentum_unit == "inner":
            self.momentum[span] *= min(1.0, self.inner_share / self._shares.get(shard, self.inner_share))
            self._shares[shard] = self.inner_share
        if self._setting.correction:
            rate = outer_optimizer.rate_at(self._rounds[shard], rate, factor)
        outer_optimizer.outer_step(
            self.theta[span], self.momentum[span], change, learning_rate=rate, momentum_factor=factor
        )
        self._round(self.momentum[span])
        return change

    def _factors(self, learners: Sequence[int], gradients: Sequence[merge.Gradient], shard: int) -> list[float] | None:
        found = self._agreement.judge(list(map(str, learners)), gradients, shard).factors
        self.lowered += sum(per_cent < 100 for per_cent in found)
        return [per_cent / 100 for per_cent in found] or None

    def _owner_of(self, shard: ShardId) -> int:
        kind, _, spell = self._setting.owners.partition("@")
        if kind == "one":
            return 0
        if spell and self._rounds[shard] % int(spell) and shard in self._owners:
            return self._owners[shard]
        return self._draws.randrange(self._setting.learners)

    def _flatten(self, span: slice, merged: Tensor) -> None:
        """The singular values of a shard's whole matrices become more alike; ``merged``, in place."""
        for piece, shape in self._matrices:
            if span.start <= piece.start and piece.stop <= span.stop:
                matrix = merged[piece.start - span.start : piece.stop - span.start].view(shape)
                length = matrix.norm()
                u, s, v = torch.linalg.svd(matrix, full_matrices=False)
                new = (u * s.clamp(min=1e-30).pow(self._setting.spectrum)) @ v
                matrix.copy_(new.mul_(length / new.norm().clamp(min=1e-30)))

    def matrices(self, shard: ShardId) -> list[slice]:
        """Where the blocks' whole matrices of a shard are in flat vectors."""
        span = self.span(shard)
        return [piece for piece, _ in self._matrices if span.start <= piece.start and piece.stop <= span.stop]

    def _tensors(self, span: slice) -> list[slice]:
        """What of them is in a shard, by its place there."""
        cuts = (slice(max(p.start, span.start), min(p.stop, span.stop)) for p in self._pieces)
        return [slice(c.start - span.start, c.stop - span.start) for c in cuts if c.start < c.stop]

    def _round(self, momentum: Tensor) -> None:
        """As bfloat16 would have it."""
        bits = momentum.view(torch.int32)
        match self._setting.momentum_type:
            case "nearest":
                momentum.copy_(momentum.bfloat16())
            case "stochastic":
                bits.add_(torch.randint(1 << 16, bits.shape, generator=self._draw, dtype=torch.int32)).bitwise_and_(
                    -65536
                )

    def _delayed_step(self, span: slice, gradient: Tensor, sync_round: int) -> Tensor:
        """Delayed Nesterov with N = 2 and c = 0: momentum takes the mean of two rounds' gradients, every second
        round."""
        rate, mu = self._setting.outer_rate, self._setting.outer_momentum
        self._delayed[span] += gradient
        step = gradient.clone()
        if sync_round % 2 == 0:
            self.momentum[span].mul_(mu).add_(self._delayed[span], alpha=0.5)
            self._delayed[span] = 0.0
            step += 2.0 * mu * self.momentum[span]
        self.theta[span] -= rate * step
        return step.mul_(-rate)

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
