"""One moment of a run as one peer sees it, and what led to it: all that page, terminal view, metrics and alarms show.

Rules of this file:
1. Everything here is plain, finite, bounded and ready for JSON. Whoever shows it computes nothing new.
2. What a peer tells of itself stands in ``OwnWords`` and is believed by nobody; all the rest was seen here.
3. Times of day are Unix times in seconds, durations are seconds, amounts are bytes and tokens.
"""

from __future__ import annotations

import msgspec


class Title(msgspec.Struct, frozen=True, kw_only=True):
    """Which run, seen by whom."""

    run: str
    name: str
    me: str
    parameters: int = 0


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run has come, and this peer with it. None: not known."""

    phase: str = "starting"
    step: int = 0
    total_steps: int = 0
    done: float | None = None
    """Share of the steps, 0 to 1."""
    left_s: float | None = None
    my_share: float | None = None
    """Of what is merged, lately."""
    tokens_trained: int = 0
    """By this peer, in this process's life."""
    tokens_merged: int = 0
    """By all, in the model."""
    tokens_per_s: float = 0.0
    swarm_tokens_per_s: float = 0.0
    """This peer's, and those of the others that have told theirs."""
    train_loss: float | None = None
    held_out_loss: float | None = None
    held_out_step: int = 0


class Headcount(msgspec.Struct, frozen=True, kw_only=True):
    """The four numbers of the glossary, this peer included."""

    known: int = 1
    live: int = 1
    participating: int = 0
    weight_averaged: int = 0


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """What this peer sends and receives, in all and in the last seconds. A budget of None is none."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_per_s: float = 0.0
    down_per_s: float = 0.0
    up_budget: float | None = None
    down_budget: float | None = None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the learner's time goes: to its steps, to copies, to waiting for the network (which must be 0)."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    blocked_s: float = 0.0


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of the model, here."""

    shard: int
    version: int
    at: float
    """When it came; 0: before this peer looked."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer is connected to this one."""

    how: str
    """``they dialled``, ``we dialled``, ``punched`` (both did, through their routers) or ``relayed``."""
    address: str
    since: float
    lanes: int = 1
    round_trip_s: float | None = None


class OwnWords(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer tells of itself."""

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
    """Its tokens in the model, as far as this peer's events reach."""
    share: float = 0.0
    """Of all that is merged, likewise."""
    commits: int = 0
    """Versions that it has merged as their owner."""
    seen: float = 0.0
    """When it last gave or merged anything."""
    reach: Reach | None = None
    words: OwnWords | None = None


class MergeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A new version of a shard: who merged whose tokens."""

    at: float
    shard: int
    version: int
    owner: str
    contributors: int
    tokens: int


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in a sentence. ``level``: ``info``, ``good``, ``warning`` or ``error``."""

    at: float
    level: str
    text: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the model wrote."""

    at: float
    step: int
    text: str


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What this peer has given, and what that cost. ``lasts_s`` to ``cost``: in this life of its node."""

    share: float = 0.0
    """Of what is merged, as far as its events reach."""
    commits: int = 0
    """Versions that it has merged, likewise."""
    lasts_s: float = 0.0
    tokens: int = 0
    """Trained."""
    up_bytes: int = 0
    down_bytes: int = 0
    price_per_hour: float | None = None
    """What its user says; in whatever money."""
    cost: float | None = None
    cost_per_million: float | None = None
    """Tokens trained."""


class Playback(msgspec.Struct, frozen=True, kw_only=True):
    """Of a recording: from when to when it goes, and how fast it is played."""

    begins: float
    ends: float
    speed: float


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    at: float
    title: Title
    course: Course
    headcount: Headcount
    link: LinkUse
    costs: Costs
    shards: tuple[ShardRow, ...] = ()
    peers: tuple[PeerRow, ...] = ()
    """This one first, then by what they gave."""
    merges: tuple[MergeRow, ...] = ()
    """The newest, newest first."""
    headlines: tuple[Headline, ...] = ()
    """Likewise."""
    counts: dict[str, int] = {}
    """How often something happened since this peer looks: forks, refusals, faults of others by kind."""
    troubles: tuple[str, ...] = ()
    """What a person should look at now: the status's trouble, and alerts."""
    sample: Sample | None = None
    account: Bill | None = None
    """None: a recording."""
    playback: Playback | None = None


Point = tuple[float, float, float]
"""Tokens merged, time, value."""


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's life in columns of equal time: tokens of its that were merged, versions that it merged."""

    peer: str
    given: tuple[int, ...]
    owned: tuple[int, ...]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What led to a picture: curves, at most some hundred points each, and lanes."""

    mark: int
    """Another one: something was added."""
    held_out: tuple[Point, ...]
    train: tuple[Point, ...]
    rate: tuple[Point, ...]
    """This peer's tokens a second."""
    began: float
    column_s: float
    lanes: tuple[LaneRow, ...]
    marks: tuple[Headline, ...]
    """Of the headlines, those who came and went."""
