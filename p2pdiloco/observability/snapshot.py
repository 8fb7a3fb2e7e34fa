"""Snapshot of a run at one moment, as one peer sees it, with its history.

The page, the terminal view, metrics and alerts show nothing else.

Rules of this file:
1. All values are plain, finite, bounded and JSON-compatible. Views compute nothing new.
2. Figures that other peers report about themselves are in ``OwnWords``. They are shown but not used. Everything else
   was observed here.
3. Times of day are Unix times in seconds, durations are seconds, amounts are bytes and tokens.
"""

from __future__ import annotations

import msgspec


class Title(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the run, and the peer that sees it."""

    run: str
    name: str
    me: str
    parameters: int = 0


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the run and of this peer. None: not known."""

    phase: str = "starting"
    step: int = 0
    total_steps: int = 0
    done: float | None = None
    """Completed share of the steps, 0 to 1."""
    left_s: float | None = None
    my_share: float | None = None
    """This peer's share of the recently merged tokens."""
    tokens_trained: int = 0
    """Tokens trained by this peer since its process started."""
    tokens_merged: int = 0
    """Tokens of all peers that are merged in the model."""
    tokens_per_s: float = 0.0
    swarm_tokens_per_s: float = 0.0
    """Rate of this peer, plus the rates that other peers report."""
    train_loss: float | None = None
    reward: float | None = None
    """Latest reward that this peer's script has reported."""
    held_out_loss: float | None = None
    held_out_step: int = 0


class Headcount(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of peers by state, including this one."""

    known: int = 1
    live: int = 1
    participating: int = 0
    weight_averaged: int = 0


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of this peer, in all and in the last seconds. A budget of None means no limit."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_per_s: float = 0.0
    down_per_s: float = 0.0
    up_budget: float | None = None
    down_budget: float | None = None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that training took and cost on this peer."""

    compute_s: float = 0.0
    """Time of the learner in steps."""
    overhead_s: float = 0.0
    """Time of the learner between steps: copies, evaluations, saves, messages, waiting."""
    blocked_s: float = 0.0
    """The part of ``overhead_s`` in which it waited for the network. Must be 0."""
    node_cpu_s: float = 0.0
    """CPU time of the node since the learner's first step."""


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of the model on this peer."""

    shard: int
    version: int
    at: float
    """When the version arrived; 0: before this peer started to look."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The connection of a peer to this one."""

    how: str
    """``they dialled``, ``we dialled``, ``punched`` (both dialled through their routers) or ``relayed``."""
    address: str
    since: float
    lanes: int = 1
    round_trip_s: float | None = None


class OwnWords(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that a peer reports about itself."""

    phase: str
    tokens_per_s: float
    tokens: int
    loss: float | None
    version_min: int
    version_max: int
    up_bytes: int
    down_bytes: int
    blocked_s: float
    trouble: str


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of the run."""

    peer: str
    is_me: bool = False
    is_live: bool = False
    is_participating: bool = False
    merged: int = 0
    """The peer's tokens in the model, as far as this peer's events show."""
    share: float = 0.0
    """The peer's share of all merged tokens, as far as this peer's events show."""
    commits: int = 0
    """Versions that the peer has merged as owner, as far as this peer's events show."""
    seen: float = 0.0
    """When the peer last contributed or merged."""
    reach: Reach | None = None
    words: OwnWords | None = None


class MergeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A new version of a shard: its owner and its contributors."""

    at: float
    shard: int
    version: int
    owner: str
    contributors: int
    tokens: int


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence about an event. ``level``: ``info``, ``good``, ``warning`` or ``error``."""

    at: float
    level: str
    text: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the model wrote."""

    at: float
    step: int
    text: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """This peer's contribution. ``lasts_s`` to ``down_bytes`` count from the start of its node."""

    share: float = 0.0
    """Share of all merged tokens, as far as this peer's events show."""
    commits: int = 0
    """Versions that it has merged, as far as this peer's events show."""
    lasts_s: float = 0.0
    tokens: int = 0
    """Tokens trained."""
    up_bytes: int = 0
    down_bytes: int = 0


class Playback(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a recording: beginning, end, and speed of playback."""

    begins: float
    ends: float
    speed: float


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, as one peer sees it."""

    at: float
    title: Title
    course: RunProgress
    headcount: Headcount
    link: LinkUse
    costs: Costs
    shards: tuple[ShardRow, ...] = ()
    peers: tuple[PeerRow, ...] = ()
    """This peer first, then by merged tokens."""
    merges: tuple[MergeRow, ...] = ()
    """The newest merges, newest first."""
    headlines: tuple[Headline, ...] = ()
    """The newest headlines, newest first."""
    counts: dict[str, int] = {}
    """Number of forks, refusals and faults of other peers since this peer started to look, by kind."""
    troubles: tuple[str, ...] = ()
    """Problems that a person should look at now: the status's trouble, and alerts."""
    sample: Sample | None = None
    account: Summary | None = None
    """None for a recording."""
    playback: Playback | None = None


# Merged tokens, time, value.
Point = tuple[float, float, float]


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of one peer in columns of equal time: its merged tokens, and the versions that it merged as owner."""

    peer: str
    given: tuple[int, ...]
    owned: tuple[int, ...]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """History of a run: curves with at most some hundred points each, and lanes."""

    mark: int
    """Changes whenever something is added."""
    held_out: tuple[Point, ...]
    train: tuple[Point, ...]
    rate: tuple[Point, ...]
    """This peer's tokens per second."""
    began: float
    column_s: float
    lanes: tuple[LaneRow, ...]
    marks: tuple[Headline, ...]
    """The headlines of peers that joined or left."""


class ChatBusyError(Exception):
    """The chat is busy with another text."""


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a chat: the text and its continuation, by the model at ``step``; or why there is none."""

    text: str = ""
    step: int = 0
    error: str = ""
