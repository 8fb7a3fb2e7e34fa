"""Settings of one cell: every number that its result depends on.

A cell is named by its settings alone; the same settings give the same bits on one machine. Omitted fields have the
values below: those of the sweeps' small model and of the schedule that shipped when the sweeps were written.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from p2pdiloco.protocol.manifest import InnerConfig, MergeRule, ModelConfig
from p2pdiloco.training import optimizers


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the laboratory."""

    seed: int = 1
    """Initial weights and the order of the data."""
    method: Literal["diloco", "parallel", "gossip"] = "diloco"
    """``parallel``: one model trained with the whole global batch, what data parallel computes. ``gossip``: learners
    have no global model; at each round each takes the mean with another, drawn anew, in float32."""

    width: int = 48
    depth: int = 2
    heads: int = 3
    context: int = 32
    vocabulary: int = 256
    """256: bytes. More: byte pairs of the text (``data.byte_pairs``)."""

    base: Literal["", "whole", "lora"] = ""
    """Base of a fine-tuning (``hf_learners``), of which all parameters are trained, or adapters. Empty: the built-in
    model is trained from scratch."""

    learners: int = 4
    batch: int = 16
    """Samples a step of all learners together: each takes batch / learners."""
    steps: int = 1920
    """The token budget in whole steps: the run ends when steps * batch * context tokens are trained."""
    learning_rate: float = 2e-3
    """The inner optimizer's peak."""
    final_share: float = 0.1
    decay_share: float = 0.0
    """Share of the budget at its end in which the rate falls, stable before; 0: it falls all the time (cosine)."""
    warmup: int = 96
    inner: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 0.1

    inner_momentum: float = 0.0
    """Of Muon, or AdamW's beta1; 0: what ships (0.95, 0.9)."""
    rest_rate: float = 1.0
    """With Muon: the rate of what AdamW moves beside it (embeddings, head, norms), relative to Muon's (shipped: 1)."""
    pools: Literal["", "gradients", "matrices", "rest", "momentum", "moments"] = ""
    """What learners average among themselves at every step, in float32 and for nothing, to find the gap's cause: the
    gradients, those of Muon's matrices only, or of all other parameters; the first moments of all optimizers before
    they are used (Muon's: before normalization), or AdamW's second moments."""
    pools_from: float = 0.0
    pools_until: float = 1.0
    """Shares of the budget between which ``pools`` holds."""

    sends_momentum: bool = False
    """Muon's momentum is exchanged as parameters are: as often, as late, and by the same codecs."""

    fragments: int = 12
    sync_every: int = 24
    overlap: int = 2
    max_shard: int = 1 << 20

    outer_rate: float = 0.4
    outer_momentum: float = 0.7
    bounded: bool = False
    """No contribution weighs more than the median of the others, or counts as more than 1.5 times as long (shipped);
    see ``correction``."""
    agreement: bool = False
    """Contributions that most others disagree with weigh less (shipped, with ``bounded``); see ``correction``."""
    correction: bool = False
    """The outer momentum's bias is corrected (shipped); what was measured before it had no such field."""
    outer: Literal["nesterov", "primal"] = "nesterov"
    """``primal``: learners train from between a sequence of plain steps and its running average, which is measured in
    the end (generalized primal averaging); ``outer_momentum`` is the average's share of both."""
    penalty: bool = False
    """Longer contributions weigh less, by exp(-norm) (EDiT, arXiv 2412.07210)."""
    momentum_type: Literal["float32", "bfloat16"] = "float32"
    spectrum: float = 1.0
    """The power that the singular values of the blocks' matrices are taken to in a merged step, which stays as long as
    it is; 0: all become equal, as in Muon's step."""
    merge: MergeRule = "rda"
    groups: int = 1
    """Learners are in so many groups of equal size. Each group's contributions are merged, and quantized as a
    contribution is; then the groups' merges are merged by the same rule, and quantized as a commit. 1: one merge of all
    contributions (shipped)."""
    heading: str = ""
    """How contributions that differ in direction from the outer momentum are turned, as "heloco@0.3"
    (``headings.py``); empty: not at all (shipped)."""
    adopt: Literal["carry", "overwrite"] = "carry"

    predicts: float = 0.0
    """While an exchange is under way, a learner replaces this share of the progress that it sent by the change that the
    last exchange of that shard brought, which it takes for what this one will bring (a whole round's)."""

    up: str = "int4"
    """A codec of ``codec/``, as "int4" or "int4@1.0" (its step), "fp32", or "top@0.03" (its share; ``sparse``)."""
    down: str = "int4"
    feedback: bool = True
    """What leaves the learner's delta is what was sent (the shipped rule); without it, what was meant."""

    kept: float = 0.0
    """Share of what the uplink's codec took off that a learner's node adds to its next contribution, while the learner
    goes on without it (SparseLoCo: 0.95); needs ``feedback`` = False. With ``feedback`` it stays with the learner."""

    owed: float = 0.0
    """Share of what the downlink's rounding took off that an owner adds to its shard's next merge, if it makes it."""

    owners: Literal["one", "drawn"] = "one"
    """Who makes a shard's steps: "one" all of them; "drawn": one of the learners, anew for each, as in a run, and what
    the last one rounded off is lost if the next is another."""

    quorum: int = 1
    grace: float = 0.7
    waits: bool = False
    """Owners wait half of a round, at least three steps, for learners that usually answer until then (shipped). It
    matters only where ``speeds`` differ."""
    speeds: tuple[float, ...] = ()
    """Relative to each other; empty: all alike and in step."""
    absent: float = 0.0
    """Share of the time that each learner is away, in spells of about 48 steps."""
    alone_until: int = 0
    """Steps in which only the first learner trains, with its own part of a batch; the others begin after them with its
    weights. All have fresh inner optimizers then, as newcomers have."""
    join_at: float = 0.0
    """Share of the budget at which the last learner joins, with a fresh optimizer; 0: from the start."""
    cut: tuple[float, ...] = ()
    """Two shares of the budget, between which the last learner trains on alone, cut off; empty: never."""
    data: Literal["same", "parts", "mixture", "languages", "packages", "english", "c++"] = "same"
    """``parts``: each learner draws from a part of the corpus of its own (other packages of the library).
    ``languages``: the same of four languages (``data.languages``), ``mixture``: all draw from all four.
    ``packages``: all draw from the installed packages (``data.packages``). ``english``, ``c++``: from one language."""

    def __post_init__(self) -> None:
        if self.batch % self.learners:
            raise ValueError(f"batch = {self.batch} cannot be shared by {self.learners} learners")
        if self.learners % self.groups:
            raise ValueError(f"{self.learners} learners cannot be in {self.groups} groups of equal size")
        if self.base and self.inner != "adamw":
            raise ValueError("fine-tuning is by AdamW")
        if self.rest_rate != 1.0 and self.inner != "muon":
            raise ValueError("embeddings, head and norms have a rate of their own with Muon")
        if self.sends_momentum and (self.inner != "muon" or self.base or self.outer_momentum or self.outer_rate != 1.0):
            raise ValueError("Muon's momentum is sent where a merge is the plain mean")
        if self.predicts and not (self.method == "diloco" and self.adopt == "carry" and self.is_in_step):
            raise ValueError("learners in step predict what they will carry")
        if self.kept and self.feedback:
            raise ValueError("what is not sent stays with the learner (feedback) or with its node (kept)")
        if self.method == "gossip" and (self.feedback or not self.is_in_step):
            raise ValueError("gossip is without codecs (feedback = False) and among learners in step")
        if self.alone_until and (not self.is_in_step or self.sends_momentum):
            raise ValueError("learners that begin with one's weights are in step, and send no momentum")
        if self.speeds and len(self.speeds) != self.learners:
            raise ValueError(f"{len(self.speeds)} speeds for {self.learners} learners")

    @property
    def model_config(self) -> ModelConfig:
        """The model."""
        return ModelConfig(
            width=self.width, depth=self.depth, heads=self.heads, context=self.context, vocabulary=self.vocabulary
        )

    @property
    def inner_config(self) -> InnerConfig:
        """The inner optimizer of one learner."""
        return InnerConfig(
            optimizer=self.inner,
            steps=self.steps,
            batch=self.batch // self.learners,
            learning_rate=self.learning_rate,
            final_share=self.final_share,
            tokens=self.steps * self.step_tokens if self.decay_share else UNSET,
            decay_share=self.decay_share or UNSET,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            beta1=(self.inner == "adamw" and self.inner_momentum) or 0.9,
            beta2=0.95,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of all learners."""
        return self.batch * self.context

    @property
    def is_in_step(self) -> bool:
        """Whether all learners do the same at the same time, so that they are computed as one batch."""
        return not (self.speeds or self.absent or self.join_at or self.cut)


def to_row(setting: Setting) -> dict[str, Any]:
    """All fields, for a row of results."""
    return msgspec.structs.asdict(setting)


DECIDED: dict[str, object] = {
    "memory": 1.0,
    "shares_moments": False,
    "inner_heading": 0.0,
    "averages": False,
    "curve": 0,
    "curve_samples": 0,
    "noise": 0.0,
    "restart_every": 0,
    "momentum_unit": "turn",
    "outer_end": [],
    "scope": "shard",
    "largest": 0.0,
    "embedding": "direct",
}
"""Fields that rows have of questions that are decided, with what they are where that was not asked."""
DECIDED_VALUES = (("adopt", "blend"), ("outer", "delayed"), ("momentum_type", "nearest"), ("owners", "kept"))
"""The same, of fields that settings still have."""


def from_row(settings: dict[str, Any]) -> Setting | None:
    """The setting of a row; fields that it does not know yet have their defaults. None: it is of a question that is
    decided, and the laboratory can no longer run it."""
    is_decided = any(settings.get(name, usual) != usual for name, usual in DECIDED.items())
    if is_decided or any(settings.get(name) == value for name, value in DECIDED_VALUES):
        return None
    return msgspec.convert(settings, Setting)


def learning_rate(inner: InnerConfig, global_step: int, own_steps: int, merged_tokens: int = 0) -> float:
    """``optimizers.learning_rate``, but without ``decay_share`` a cosine to ``final_share``: that of the sweeps."""
    if inner.decay_share is not UNSET:
        progress = None if inner.tokens is UNSET else merged_tokens / inner.tokens
        return optimizers.learning_rate(inner, global_step, own_steps, progress)
    warm = msgspec.structs.replace(inner, decay_share=1.0, final_share=1.0)
    done = (global_step - inner.warmup) / max(1, inner.steps - inner.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, done))))
    share = inner.final_share + (1.0 - inner.final_share) * cosine
    return optimizers.learning_rate(warm, global_step, own_steps) * share
