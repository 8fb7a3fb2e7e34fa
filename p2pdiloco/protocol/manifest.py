"""The manifest: the immutable description of a run, and the layout of its parameters that follows from it.

Rules of this file:
1. Everything here is plain data: frozen structs that decode from TOML (a founder's configuration) and from MessagePack
   (a manifest fetched from another peer) with every field bounded. Unknown fields are errors. What several fields say
   together is checked in ``manifest_validation.py``.
2. A run is named by its manifest's digest, so whatever two peers must agree on to merge bit for bit belongs here, and
   whatever a peer may choose alone (addresses, device, budgets) does not.
3. The manifest holds the digests of version 0 of every shard. A chain that does not start there is not this run's, so a
   newcomer with fresh weights can never seed an existing run.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from p2pdiloco.protocol.data_blocks import MAX_BLOCKS
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, ShardId, digest_of

MANIFEST = "manifest.msgpack"
"""The file that holds one."""
PROTOCOL_VERSION = 4
"""Raised whenever peers of two releases could no longer merge together."""

MAX_HELD_OUT = 1 << 20
"""Bytes of held-out samples in a manifest."""

Target = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]+\Z")]
"""It names folders, too: a script's state, an export."""
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Side = Annotated[int, Meta(ge=1, le=2**16)]
Samples = Annotated[int, Meta(ge=1, le=2**20)]
Count = Annotated[int, Meta(ge=1, le=4096)]
"""What is built one by one."""
Rate = Annotated[float, Meta(gt=0.0, le=1e3)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
Codec = Literal["int4", "int8", "bf16", "int2", "e3m0"]
CodecChoice = Literal["auto", "int4", "int8", "bf16", "int2", "e3m0"]
Coarsest = Literal["bf16", "int8", "int4", "int4-coarse", "int2"]
Step = Annotated[float, Meta(ge=0.0, le=16.0)]
MergeRule = Literal["rda", "direct"]
MomentumType = Literal["float32", "bfloat16"]
Access = Literal["open", "invite", "list"]


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters of a Hugging Face model (LoRA, arXiv 2106.09685). Only they are trained, and travel; every peer
    has the weights that they are for in a folder of its own."""

    rank: Annotated[int, Meta(ge=1, le=4096)] = 8
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 16.0
    """What an adapter computes is scaled by alpha / rank."""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=64)] = ("q_proj", "v_proj")
    """Names of the linear layers that get one, in every block."""
    base_digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{40})?\Z")] = ""
    """Of the base's weights; the founder's is filled in, and a joiner's must be the same."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A byte-level decoder-only transformer (RMSNorm, RoPE, SwiGLU), a causal language model of Hugging Face's
    transformers, or a training script's own model."""

    kind: Literal["transformer", "huggingface", "external"] = "transformer"
    """``huggingface``: ``config`` or ``folder``, and ``context``. ``external``: the other fields mean nothing; learners
    are scripts (``p2pdiloco.DiLoCo``)."""
    config: dict[str, Any] = {}
    """For ``huggingface``: what its config.json would say, ``model_type`` first
    (``protocol/manifest_validation.py``)."""
    folder: Annotated[str, Meta(max_length=4096)] = ""
    """For ``huggingface``, instead of ``config``: the founder's folder with config.json, and weights as safetensors to
    begin from. Means nothing in a manifest."""
    lora: LoraConfig | None = None
    """For ``huggingface`` with a ``folder``: train adapters on its weights instead of all of them."""
    width: Side = 128
    """Residual stream; divisible by ``heads``."""
    depth: Count = 4
    """Number of blocks."""
    heads: Count = 4
    context: Samples = 128
    """Tokens a sample has."""
    vocabulary: Annotated[int, Meta(ge=2, le=2**20)] = 256
    """Byte-level models use 256."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a peer finds its corpus. Files are split by a hash of their relative path, so that peers with the same
    files agree on what is held out."""

    kind: Literal["stdlib", "files", "text", "jsonl", "parquet"] = "stdlib"
    """``stdlib``: the source of the machine's own Python standard library. ``files``: every file below a folder, as
    bytes. ``text``, ``jsonl``, ``parquet``: documents, as tokens of ``tokenizer``."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    """The founder's folder (or a single file of documents); who joins says ``--data``. Means nothing in a manifest."""
    pattern: Annotated[str, Meta(max_length=256)] = ""
    """Which files below that folder; left out: ``*.py`` for bytes, else the kind's own, such as ``*.jsonl``."""
    tokenizer: Annotated[str, Meta(max_length=4096)] = ""
    """For documents: the founder's folder with tokenizer.json; who joins has it among its data, or says
    ``--tokenizer``. Means nothing in a manifest."""
    tokenizer_digest: Annotated[str, Meta(max_length=40)] = ""
    """Of tokenizer.json; the founder's is filled in, and a joiner's must be the same."""
    column: Annotated[str, Meta(min_length=1, max_length=256)] = "text"
    """Where ``jsonl`` and ``parquet`` have a document's text."""
    separator: Annotated[str, Meta(max_length=256)] = ""
    """Token that is put after each document, such as "</s>"; empty: none."""
    held_out_share: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.05
    block: Annotated[int, Meta(ge=0, le=2**30)] = 128
    """Samples in a block of data, rounded up to whole batches; each block is trained once an epoch, by whoever takes
    it. 0: no blocks, every learner draws its samples at random."""


class InnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inner optimizer; clipping, warm-up, and a rate that falls in a line over the *global* step."""

    optimizer: Literal["adamw", "muon"] | UnsetType = UNSET
    """``muon``: for the matrices between embedding and output head (training/optimizers.py), AdamW for the rest.
    Several learners with small batches lose less by it (docs/results.md). Left out: ``muon``, for adapters
    ``adamw``."""
    steps: Positive = 1000
    """Global step at which the run is complete. With ``tokens`` only a bound, and filled in: twice as many as one
    learner alone would make."""
    tokens: Annotated[int, Meta(ge=1, le=2**50)] | UnsetType = UNSET
    """Instead of ``steps``: the run is complete when so many are merged, whoever trained them. The rate is then stable
    after the warm-up, and falls with the last ``decay_share`` of the tokens."""
    decay_share: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Of the run, at its end: the rate falls in a line, after it was stable. Left out: 0.2 where there is a budget of
    tokens, 0.95 in a run of steps (benchmarks/quality/README.md). A manifest without it is of an earlier release,
    whose runs of steps had a cosine from the warm-up on."""
    batch: Samples = 16
    """Samples per inner step of one learner."""
    learning_rate: Rate = 1e-3
    """Peak. Left out of a run's file: Muon's of a small built-in model 0.1 / sqrt(width), at most 0.016
    (``defaults.with_usual_rate``); else 0.001, which suits larger ones."""
    final_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the peak that is left at the run's end."""
    warmup: Annotated[int, Meta(ge=0, le=2**40)] = 50
    """Steps of linear warm-up; at most ``steps``."""
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    clip: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When fragments are exchanged, and how long an owner waits (Decoupled DiLoCo, arXiv 2604.21428)."""

    fragments: Side = 24
    """P. At most the number of tensors. Left out of a run's file together with H: as H."""
    sync_every: Positive = 24
    """H: each fragment has one turn every H steps. At least P, so that no two fragments are due at the same step. Left
    out of a run's file: 6 for a small model; else 24, in a short run so many fewer that there are 80 turns
    (``defaults.in_turns``)."""
    overlap: Positive = 2
    """tau: inner steps that an exchange may take before it is late; less than H."""
    min_quorum: Positive = 1
    """K: an owner never merges fewer contributions."""
    grace_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.7
    """gamma: share of the remaining overlap that the owner waits for late learners."""
    # Measured: in an exchange a shard of any size costs a peer 2 ms of processor time. 4 Mi parameters take 1.2 times
    # less in all, but leave a fragment of a model of 60 million parameters with one owner (benchmarks/notes.md).
    max_shard: Annotated[int, Meta(ge=1024, le=2**32)] = 1 << 21
    """Largest shard in parameters; a fragment is cut into equal shards no larger than this."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=60.0)] | UnsetType = UNSET
    """Between two heartbeats of a peer in a small swarm; beyond 16 peers it grows by itself. Who is silent for three is
    lost. Left out: 1 s."""
    log_length: Annotated[int, Meta(ge=4, le=1024)] | UnsetType = UNSET
    """Versions of a shard that every peer can send again, and take back: a network that was cut for longer costs the
    smaller side what it trained before. Left out: what 768 steps make, at least 32
    (``protocol/manifest_defaults.py``)."""
    needs_majority: bool | UnsetType = UNSET
    """A peer merges nothing to which not more than half have answered of all who train, those included that are missing
    since they were lost at once: of a run that was cut in two only the larger side goes on, so nobody ends with a
    second model. Left out: both go on, and one side's progress is merged again when they meet."""


class OuterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outer optimizer: SGD with Nesterov momentum, and how learners take a commit."""

    learning_rate: Rate = 0.4
    momentum: Share = 0.7
    """What RDA merges keeps its length, so rate / (1 - momentum), how far a turn goes in the end, is 1.3, not the 7 of
    DiLoCo's shrinking mean; momentum averages several turns (benchmarks/quality/README.md)."""
    bias_correction: bool | UnsetType = UNSET
    """Momentum begins at 0, so that without it the first turns go less far: the rate of a shard's version v is divided
    by 1 - momentum^(v + 1). Left out: in runs of few turns, where rate / (1 - momentum) is at most 2
    (``protocol/manifest_defaults.py``)."""
    momentum_type: MomentumType | UnsetType = UNSET
    """What momentum is kept in, on every peer: bfloat16 takes 2 of 4 bytes a parameter of memory, disk and downloads.
    Left out: bfloat16, but float32 with a momentum above 0.99."""
    merge: MergeRule = "rda"
    """Radial-directional averaging, or the direct mean. Embeddings always use the direct mean."""
    adopt: Literal["carry", "overwrite"] = "carry"
    """``carry`` keeps the steps made since the snapshot; ``overwrite`` is the paper's rule and throws them away."""


class CodecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How outer gradients travel: ``up`` from learner to owner, ``down`` from owner to everybody."""

    up: CodecChoice = "int4"
    """"auto": each sender takes the finest codec whose transfer fits the overlap on its link
    (codec/bitrate_ladder.py)."""
    down: CodecChoice = "int4"
    coarsest: Coarsest = "int4"
    """What "auto" may come down to: bytes a parameter and relative error are 1.35 and 0.002 for bf16, 0.96 and 0.006
    for int8, 0.43 and 0.12 for int4, 0.27 and 0.28 for int4-coarse (step 1.0), 0.21 and 0.40 for int2
    (downwards int4 with a step of 1.6: 0.21 and 0.46)."""
    up_step: Step | None = None
    """Distance of two neighbouring symbols, in root mean squares of a block of 256; coarser is fewer bytes and more
    error. 0: the block's largest value becomes the largest symbol. Left out: the codec's own (int4 0.4, int2 1.224,
    int8 0). bf16 and e3m0 (as in Streaming DiLoCo, always scaled by the largest value) have none. For int4, in bytes
    a parameter and relative error: 0.335 is 0.46 and 0.115, 0.4 is 0.43 and 0.12, 1.0 is 0.27 and 0.29."""
    down_step: Step | None = None


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out loss of the global model, measured by one peer for all."""

    every: Annotated[int, Meta(ge=0, le=2**40)] = 5
    """Versions of shard 0 between two evaluations; 0 switches them off."""
    samples: Side = 64
    shared: bool | UnsetType = UNSET
    """The founder's held-out samples go into the manifest, where everybody who is let in can read them, and all measure
    on these: one curve, whoever's data differ. Left out: only if they are of the standard library."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a founder writes: one TOML file a run."""

    name: Name
    access: Access = "invite"
    """Who may take part: ``invite``: whoever has an invite; ``list``: whom the founder or an admin has named; ``open``:
    everybody who reaches a peer. A run that is not open tells strangers nothing (access/members.py)."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    outer: OuterConfig = OuterConfig()
    codec: CodecConfig = CodecConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trainable tensor, in the model's own order."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**40)], ...], Meta(max_length=8)]
    merge: MergeRule
    fragment: FragmentId
    fragments: Annotated[tuple[FragmentId, ...], Meta(min_length=2, max_length=2**12)] | UnsetType = UNSET
    """Of a tensor that is too large for one fragment: its rows are cut into so many parts, alike but for one row, and
    each is in one of these; ``fragment`` is the first. Left out: all of it is in ``fragment``."""

    @property
    def elements(self) -> int:
        """Number of parameters."""
        n = 1
        for side in self.shape:
            n *= side
        return n

    def parts(self) -> list[tuple[FragmentId, int, int]]:
        """What of it is in which fragment: first element, and one past the last."""
        if self.fragments is UNSET:
            return [(self.fragment, 0, self.elements)]
        rows, number = self.shape[0], len(self.fragments)
        row, cuts = self.elements // rows, [rows * i // number for i in range(number + 1)]
        return [(f, row * cuts[i], row * cuts[i + 1]) for i, f in enumerate(self.fragments)]


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the run's training data are cut into blocks. A peer whose data differ draws its samples at random."""

    number: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    """Blocks in an epoch; 0 for none."""
    samples: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """In a block; whole batches."""
    data: Annotated[Digest, Meta(max_length=40)] = Digest("")
    """Digest of the training split."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Samples that all peers of a run measure its model on."""

    symbol: Literal[1, 4]
    """Bytes of a token; little-endian."""
    samples: Annotated[bytes, Meta(min_length=1, max_length=MAX_HELD_OUT)]
    """One after the other, ``context`` + 1 tokens each."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A founded run: the configuration, the tensors in their fragments, and the digests of version 0."""

    protocol: int = PROTOCOL_VERSION
    founder: Annotated[PeerId, Meta(min_length=1, max_length=128)]
    config: RunConfig
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=2**16)]
    genesis: Annotated[tuple[Annotated[Digest, Meta(max_length=40)], ...], Meta(min_length=1, max_length=2**16)]
    """Digest of every shard's version 0, in the order of the layout."""
    blocks: BlockSpec = BlockSpec()
    held_out: HeldOut | UnsetType = UNSET

    def encode(self) -> bytes:
        """The canonical bytes: what is hashed, stored and sent."""
        return msgspec.msgpack.encode(self)

    @property
    def run(self) -> RunId:
        """The run's id: the digest of the canonical bytes."""
        return RunId(digest_of(self.encode()))


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous piece of a fragment: the unit of merging, ownership and versioning."""

    shard: ShardId
    fragment: FragmentId
    start: int
    """First element in the flat parameter vector."""
    stop: int
    """One past the last element."""
    merge: MergeRule

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return self.stop - self.start


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How the tensors lie in one flat float32 vector, and how that is cut into fragments and shards.

    Tensors lie fragment after fragment; inside a fragment those merged by the direct mean come first, so that every
    shard has one merge rule. Tensors that are cut among fragments lie whole behind all others.
    """

    order: tuple[int, ...]
    """Indices into the manifest's tensors, in flat order."""
    starts: tuple[int, ...]
    """First element of each tensor of ``order``."""
    shards: tuple[Shard, ...]
    fragments: tuple[tuple[ShardId, ...], ...]
    """The shards of each fragment."""
    elements: int

    @staticmethod
    def of(manifest: Manifest) -> Layout:
        """The layout that every peer of the run derives from its manifest."""
        return make_layout(
            manifest.tensors,
            manifest.config.schedule.fragments,
            manifest.config.schedule.max_shard,
            manifest.config.outer.merge,
        )


def make_layout(tensors: tuple[TensorSpec, ...], fragments: int, max_shard: int, merge: MergeRule) -> Layout:
    """Place ``tensors`` in the flat vector and cut it: ``fragments`` pieces, each into shards of at most ``max_shard``
    parameters with one merge rule. With ``merge`` = "direct" no tensor uses RDA."""
    rule: list[MergeRule] = ["direct" if merge == "direct" else t.merge for t in tensors]
    order: list[int] = []
    starts: list[int] = []
    shards: list[Shard] = []
    members: list[list[ShardId]] = [[] for _ in range(fragments)]

    def cut(fragment: FragmentId, begin: int, stop: int, kind: MergeRule) -> None:
        pieces = -(-(stop - begin) // max_shard)
        marks = [begin + (stop - begin) * piece // pieces for piece in range(pieces)] + [stop]
        for first, last in itertools.pairwise(marks):
            members[fragment].append(ShardId(len(shards)))
            shards.append(Shard(shard=ShardId(len(shards)), fragment=fragment, start=first, stop=last, merge=kind))

    at = 0
    alike: dict[tuple[int, str], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.fragments is UNSET:
            alike.setdefault((tensor.fragment, rule[i]), []).append(i)
    kinds: tuple[MergeRule, ...] = ("direct", "rda")
    for fragment in range(fragments):
        for kind in kinds:
            begin = at
            for i in alike.get((fragment, kind), ()):
                order.append(i)
                starts.append(at)
                at += tensors[i].elements
            cut(FragmentId(fragment), begin, at, kind)
    for i, tensor in enumerate(tensors):
        if tensor.fragments is not UNSET:
            order.append(i)
            starts.append(at)
            for part, first, last in tensor.parts():
                cut(part, at + first, at + last, rule[i])
            at += tensor.elements
    placed = tuple(tuple(of_one) for of_one in members)
    return Layout(order=tuple(order), starts=tuple(starts), shards=tuple(shards), fragments=placed, elements=at)
