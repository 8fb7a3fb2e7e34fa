"""The manifest: the immutable description of a run, and the layout of its parameters that follows from it.

Rules of this file:
1. Everything here is plain data: frozen structs that decode from TOML (a founder's file) and from MessagePack (a
   manifest fetched from another peer). Every field has bounds, and unknown fields are errors. Constraints between
   fields are checked in ``manifest_validation.py``.
2. A run is named by the digest of its manifest. Everything that two peers must agree on to merge bit for bit belongs
   here; everything that a peer may choose alone (addresses, device, budgets) does not.
3. The manifest holds the digests of version 0 of every shard. A chain that starts elsewhere belongs to another run, so
   a newcomer with fresh weights can never seed an existing run.
4. docs/configuration.md is generated from the docstrings of the configuration structs
   (``tests/golden/configuration_page.py``). A sentence that begins with ``Unit:`` or ``Default:`` goes into a column of
   its own. ``Default:`` is written where the founder's program fills in a value (``manifest_defaults.py``).
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from p2pdiloco.protocol.data_blocks import MAX_BLOCKS
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, ShardId, digest_of

MANIFEST = "manifest.msgpack"
"""Name of the file that holds a manifest."""
PROTOCOL_VERSION = 15
"""Raised whenever peers of two releases could no longer merge together."""

MAX_HELD_OUT = 1 << 20
"""Maximum size of the held-out samples in a manifest, in bytes."""

Target = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]+\Z")]
"""Also used as the name of a folder: a script's state, an export."""
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Side = Annotated[int, Meta(ge=1, le=2**16)]
Samples = Annotated[int, Meta(ge=1, le=2**20)]
Count = Annotated[int, Meta(ge=1, le=4096)]
"""Number of modules that are built one by one."""
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
    """Low-rank adapters (LoRA, arXiv 2106.09685) on a Hugging Face model: only these are trained and sent. Every peer
    has the base weights in a folder of its own (``--model``)."""

    rank: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Rank of each adapter. A larger one trains and sends more parameters."""
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 16.0
    """Scale of the adapters: their output is multiplied by ``alpha / rank``. Twice the rank is usual."""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=64)] = ("q_proj", "v_proj")
    """Names of the linear layers that get an adapter, in every block."""
    base_digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{40})?\Z")] = ""
    """Digest of the base weights. A joiner with other weights is refused. Default: filled in."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model: the built-in decoder-only transformer on bytes (RMSNorm, RoPE, SwiGLU), or a causal language model of
    Hugging Face transformers. ``width``, ``depth``, ``heads`` and ``vocabulary`` apply to the built-in one alone."""

    kind: Literal["transformer", "huggingface", "external"] = "transformer"
    """Kind of model. ``transformer``: built in. ``huggingface``: set ``config`` or ``folder``, and ``context``.
    ``external``: a training script's own model (``p2pdiloco.DiLoCo``); a TOML file cannot use it."""
    config: dict[str, Any] = {}
    """For ``huggingface``: the content of config.json, with ``model_type``. The weights begin at random. Keys that
    could fetch code or weights are refused. A training script's run records its transformers model here."""
    folder: Annotated[str, Meta(max_length=4096)] = ""
    """For ``huggingface``, instead of ``config``: the founder's folder with config.json and the safetensors to begin
    with. It stays on the founder's machine."""
    lora: LoraConfig | None = None
    """For ``huggingface`` with ``folder``: train adapters instead of all weights. See the table below."""
    frozen_digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")] | UnsetType = UNSET
    """For ``external``: fingerprint of the parameters that the founder's script keeps frozen. A script with others is
    warned. Default: filled in."""
    frozen_norms: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")] | UnsetType = UNSET
    """For ``external``: fingerprint of the frozen norms, which no quantization changes. Default: filled in."""
    frozen_name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._/-]{1,128}\Z")] | UnsetType = UNSET
    """For ``external``: the founder's name of that model. Default: filled in."""
    width: Side = 128
    """Size of the residual stream. A multiple of ``2 * heads``."""
    depth: Count = 4
    """Number of blocks."""
    heads: Count = 4
    """Number of attention heads."""
    context: Samples = 128
    """Length of a sample. ``inner.batch`` times ``context`` may be at most 67,108,864. Unit: tokens."""
    vocabulary: Annotated[int, Meta(ge=2, le=2**20)] = 256
    """Number of tokens. Bytes need 256; for documents, use at least the size of the tokenizer."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training data. The run describes them, and each peer supplies them: paths never travel. Files are held out by
    a hash of their relative path, so peers with the same files hold out the same ones."""

    kind: Literal["stdlib", "files", "text", "jsonl", "parquet"] = "stdlib"
    """Kind of data. ``stdlib``: the source of the machine's own Python standard library, as bytes. ``files``: files of
    a folder, as bytes. ``text``, ``jsonl`` (JSON lines, or a JSON array), ``parquet``: documents, as tokens of
    ``tokenizer``. Other files of the folder are left out. gzip and zstandard are decompressed. Data larger than 1 GiB
    are mapped; several or compressed files, and tokens, are copied to ``~/.cache/p2pdiloco`` for that."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    """The founder's folder, or a single file of documents. Joiners pass ``--data``."""
    pattern: Annotated[str, Meta(max_length=256)] = ""
    """Glob pattern of the files below the folder. Default: ``*.py`` for ``files``; ``*.txt``; ``*.jsonl`` and, if they
    are arrays, ``*.json``; or ``*.parquet``. All but Parquet also with ``.gz`` or ``.zst``."""
    tokenizer: Annotated[str, Meta(max_length=4096)] = ""
    """For documents: the founder's folder with tokenizer.json. Joiners keep a copy in their data folder or pass
    ``--tokenizer``."""
    tokenizer_digest: Annotated[str, Meta(max_length=40)] = ""
    """Digest of tokenizer.json. A joiner with another tokenizer is refused. Default: filled in."""
    column: Annotated[str, Meta(min_length=1, max_length=256)] = "text"
    """For ``jsonl`` and ``parquet``: the column that holds the text, or chat messages, which the chat template beside
    tokenizer.json turns into a text. Rows where it is null or blank are skipped. Without a column ``text``, the columns
    ``messages``, ``conversations``, or ``instruction``, ``input`` and ``output``, are read."""
    separator: Annotated[str, Meta(max_length=256)] = ""
    """For documents: a token to append to each one, such as ``</s>``. Empty: no separator."""
    held_out_share: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.05
    """Share of the files or documents that are held out for evaluation. Each one goes to one split as a whole."""
    block: Annotated[int, Meta(ge=0, le=2**30)] = 128
    """Size of a data block. Peers with the same data share an epoch's blocks, so each one is trained once. It is
    rounded up to whole batches, and adjusted to the size of the data. 0, or data of more than 2^25 samples: no blocks;
    every learner draws its samples at random. Unit: samples."""


class InnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inner optimizer of each learner, and the length of the run. Training scripts bring an optimizer of their own
    and use ``steps`` alone."""

    optimizer: Literal["adamw", "muon"] | UnsetType = UNSET
    """``muon`` is for the matrices between embedding and output head, with AdamW for the rest. Several learners with
    small batches lose less quality with it. Default: ``muon``; ``adamw`` for adapters."""
    steps: Positive = 1000
    """Global step at which the run is complete. With ``tokens`` it is filled in, and is only an upper bound. Unit:
    steps."""
    tokens: Annotated[int, Meta(ge=1, le=2**50)] | UnsetType = UNSET
    """Token budget, instead of ``steps``: the run is complete when this many tokens are merged. Use it if the number
    of learners is not known. Unit: tokens. Default: none."""
    decay_share: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Share of the run, at its end, over which the learning rate falls linearly. Before it, the rate is constant.
    Default: 0.95, or 0.2 with ``tokens``."""
    batch: Samples = 16
    """Batch size of one learner. Unit: samples."""
    learning_rate: Rate = 1e-3
    """Peak learning rate. 0.001 suits larger models. Default: 0.001; with ``muon`` and a built-in model of at most
    8 million parameters ``0.1 / sqrt(width)``, at most 0.016."""
    final_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the peak learning rate that is left at the end of the run."""
    warmup: Annotated[int, Meta(ge=0, le=2**40)] = 50
    """Length of the linear warm-up; at most ``steps``. Unit: steps. Default: 50; three tenths of the run with ``adamw``
    from scratch, where several learners need it."""
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.1
    """Decoupled weight decay, for matrices only."""
    beta1: Share = 0.9
    """AdamW's beta1."""
    beta2: Share = 0.95
    """AdamW's beta2."""
    clip: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    """Maximum norm of the gradient over all parameters. 0: no clipping."""


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of exchanges, and the patience of owners (Decoupled DiLoCo, arXiv 2604.21428). The model is cut
    into fragments; each fragment has one exchange, or round, every ``sync_every`` steps."""

    fragments: Side = 24
    """Number of fragments (P). At most the number of tensors. ``sync_every`` must be a multiple of it. Default: 24;
    equal to ``sync_every`` if both are left out."""
    sync_every: Positive = 24
    """Steps between two exchanges of a fragment (H). A smaller H sends more and learns better. Unit: steps. Default:
    between 3 and 24. 3 for adapters and for up to 4 million parameters, 1 more for each further 1.4 million; fewer in a
    run that would have less than 160 rounds (80 with AdamW, which has 24 instead of 12 to 23)."""
    overlap: Positive = 2
    """Steps that an exchange may take before it is late (tau). Less than ``sync_every``. On slow links use a larger
    one: ``p2pdiloco plan`` recommends a value. Unit: steps."""
    min_quorum: Positive = 1
    """Minimum number of contributions in a merge (K). If fewer learners take part, all of them. Keep 1 unless learners
    are equally fast: an owner waits for the K-th."""
    grace_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.7
    """Share of the remaining overlap for which the owner waits for late learners (gamma). 0: it does not wait."""
    # Measured: in an exchange a shard of any size costs a peer 2 ms of processor time. 4 Mi parameters take 1.2 times
    # less in all, but leave a fragment of a model of 60 million parameters with one owner (benchmarks/notes.md).
    max_shard: Annotated[int, Meta(ge=1024, le=2**32)] = 1 << 21
    """Maximum size of a shard. A fragment is cut into equal shards, and each version of a shard is merged by another
    peer. Small shards take more CPU time, and with hundreds of learners more bytes. Unit: parameters."""
    together: Annotated[int, Meta(ge=2, le=4096)] = MOST_TOGETHER
    """Maximum number of learners whose contributions are merged together. More are divided into groups, whose merges
    are merged. Unit: learners."""
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=60.0)] = 1.0
    """Time between two heartbeats of a peer. Beyond 24 peers it grows by itself. A peer that misses three is lost.
    Unit: seconds."""
    log_length: Annotated[int, Meta(ge=4, le=1024)] | UnsetType = UNSET
    """Versions of a shard that every peer keeps and can take back. After a longer network cut, the smaller side loses
    the work that it did before these versions. Unit: versions. Default: what 768 steps make, at least 32."""
    needs_majority: bool | UnsetType = UNSET
    """``true``: a peer merges only while more than half of the learners answer. Then a run that is cut in two cannot
    end with two models, and the smaller side stops. ``false``: both sides continue. When they meet again, the heavier
    model wins and the other side's recent progress is merged into it. Default: ``false``."""


class OuterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outer optimizer: SGD with Nesterov momentum on the merged updates. If this table and ``sync_every`` are left
    out and H comes out below 24, the run uses ``merge = "direct"`` with ``learning_rate = 1.0`` and ``momentum = 0.0``,
    or with ``muon`` above 8 with 0.7 and 0.6."""

    learning_rate: Rate = 0.4
    """Outer learning rate. With ``merge = "rda"``, keep ``learning_rate / (1 - momentum)`` near 1.3. DiLoCo's usual
    quotient of 7 is for a plain mean, which shrinks the updates."""
    momentum: Share = 0.7
    """Outer momentum: it averages several rounds."""
    bias_correction: bool | UnsetType = UNSET
    """Divide the rate of version v by ``1 - momentum^(v + 1)``, so that the first rounds go as far as later ones.
    Default: ``true`` in runs of fewer than 40 rounds with ``learning_rate / (1 - momentum)`` of at most 2."""
    momentum_type: MomentumType | UnsetType = UNSET
    """Type in which peers keep the momentum. ``bfloat16`` halves its memory, disk space and download. Default:
    ``bfloat16``; ``float32`` if ``momentum`` is above 0.99."""
    merge: MergeRule = "rda"
    """Merge rule. ``rda``: radial-directional averaging, which keeps the length of the updates. ``direct``: the plain
    mean. Embeddings always use the plain mean."""
    adopt: Literal["carry", "overwrite"] = "carry"
    """How learners take a merged fragment. ``carry`` keeps the steps that they made during the exchange; ``overwrite``,
    the rule of the paper, discards them."""


class CodecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compression of updates: ``up`` from learner to owner, ``down`` from owner to all peers."""

    up: CodecChoice = "int4"
    """Codec of contributions. ``auto``: each sender takes the finest codec whose transfer fits into the overlap on its
    link."""
    down: CodecChoice = "int4"
    """Codec of merged updates."""
    coarsest: Coarsest = "int4"
    """Coarsest codec that ``auto`` may choose. The table below has their sizes and errors."""
    up_step: Step | None = None
    """Quantization step of ``up``: the distance of two levels, as a multiple of the root mean square of a block of 256
    values. A larger step gives fewer bytes and more error. 0: scale by the largest value of the block. ``bf16`` and
    ``e3m0`` have none. Default: the codec's own (int4 0.4, int2 1.224, int8 0)."""
    down_step: Step | None = None
    """Quantization step of ``down``. Default: the codec's own."""


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out loss of the global model. Peers take turns in measuring it."""

    every: Annotated[int, Meta(ge=0, le=2**40)] = 5
    """Interval between two measurements, in rounds of ``sync_every`` steps. 0: no evaluation. Unit: rounds."""
    samples: Side = 64
    """Number of held-out samples in a measurement. Unit: samples."""
    shared: bool | UnsetType = UNSET
    """``true``: put held-out samples of the founder (at most 1 MiB) into the manifest, so that all peers measure on the
    same ones. Everybody who is admitted can read them. Use it where peers' data differ. Default: ``true`` for
    ``stdlib``, else ``false``."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys above the first table."""

    name: Name
    """Name of the run, as people see it. The run itself is identified by the digest of its manifest."""
    access: Access = "invite"
    """Who may join. ``invite``: holders of an invite. ``list``: only peers that the founder or an admin has named.
    ``open``: everybody who reaches a peer. Only an open run is visible to strangers."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights."""
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
    """For a tensor that is too large for one fragment: the fragments of its parts. Its rows are cut evenly, and
    ``fragment`` is the first of these. Left out: the whole tensor is in ``fragment``."""

    @property
    def elements(self) -> int:
        """Number of parameters."""
        n = 1
        for side in self.shape:
            n *= side
        return n

    def parts(self) -> list[tuple[FragmentId, int, int]]:
        """Return the parts of the tensor: fragment, first element, one past the last element."""
        if self.fragments is UNSET:
            return [(self.fragment, 0, self.elements)]
        rows, number = self.shape[0], len(self.fragments)
        row, cuts = self.elements // rows, [rows * i // number for i in range(number + 1)]
        return [(f, row * cuts[i], row * cuts[i + 1]) for i, f in enumerate(self.fragments)]


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Division of the run's training data into blocks. A peer whose data differ draws its samples at random."""

    number: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    """Number of blocks in an epoch; 0: no blocks."""
    samples: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """Samples in a block; a multiple of the batch."""
    data: Annotated[Digest, Meta(max_length=40)] = Digest("")
    """Digest of the training split."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out samples on which all peers of a run measure its model."""

    symbol: Literal[1, 4]
    """Bytes per token, little-endian."""
    samples: Annotated[bytes, Meta(min_length=1, max_length=MAX_HELD_OUT)]
    """The samples in sequence, ``context`` + 1 tokens each."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as created: its configuration, the fragment of each tensor, and the digests of version 0."""

    protocol: int = PROTOCOL_VERSION
    founder: Annotated[PeerId, Meta(min_length=1, max_length=128)]
    config: RunConfig
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=2**16)]
    genesis: Annotated[tuple[Annotated[Digest, Meta(max_length=40)], ...], Meta(min_length=1, max_length=2**16)]
    """Digest of version 0 of every shard, in the order of the layout."""
    blocks: BlockSpec = BlockSpec()
    held_out: HeldOut | UnsetType = UNSET

    def encode(self) -> bytes:
        """Return the canonical bytes, which are hashed, stored and sent."""
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
    """Positions of the tensors in one flat float32 vector, and its division into fragments and shards.

    Tensors are ordered by fragment. Inside a fragment, tensors merged by the plain mean come first, so that every shard
    has one merge rule. Tensors that are split among fragments stay whole and come after all others.
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
        """Derive the layout from the manifest; every peer of the run gets the same one."""
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
