"""Run history: aggregates a peer's events into a snapshot and its history, live or from a recording.

Rules of this file:
1. A snapshot depends only on the events and their order. Time comes from the events or is a parameter.
2. Events of several peers of one run can be fed, each with its source. A commit counts once.
3. A malformed event (a torn line, or one of another release) is ignored.
4. All memory is bounded (``Curve``, ``LaneBook``, and the constants below).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import msgspec

from p2pdiloco.observability.event_schema import Line, sentence
from p2pdiloco.observability.formatting import duration, percent, volume
from p2pdiloco.observability.snapshot import (
    Costs,
    Headcount,
    Headline,
    History,
    LaneRow,
    LinkUse,
    MergeRow,
    OwnWords,
    PeerRow,
    RunProgress,
    RunSnapshot,
    Sample,
    ShardRow,
    Summary,
    Title,
)
from p2pdiloco.protocol.ids import LearnerId, peer_of

# -- Downsampled series ------------------------------------------------------------------------------------------------
# Bounded memory of an unbounded run: curves are thinned out, and the columns of lanes widen.


MOST_POINTS = 400
MOST_COLUMNS = 160
FIRST_COLUMN_S = 1.0
# Maximum number of peers with a lane. If a run has more, those that came first are shown.
MOST_LANES = 256

Point = tuple[float, float, float]


class Curve:
    """Points in order of time. When there are too many, every second one is dropped, and later only every second one is
    added, and so on."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._points: list[Point] = []
        self._last: Point | None = None
        self._most = most
        self._stride = 1
        self._seen = 0

    def add(self, tokens: float, at: float, value: float) -> None:
        """Add a point, unless it is not finite."""
        if not (math.isfinite(tokens) and math.isfinite(at) and math.isfinite(value)):
            return
        self._last = (tokens, at, value)
        if self._seen % self._stride == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) >= self._most:
            self._points = self._points[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[Point]:
        yield from self._points
        if self._last is not None and self._points[-1] is not self._last:
            yield self._last

    def __len__(self) -> int:
        return len(self._points)


class LaneBook:
    """Contributions and merges of each peer, in columns of equal time. When the columns are used up, pairs are
    joined."""

    def __init__(self) -> None:
        self.began = 0.0
        self.column_s = FIRST_COLUMN_S
        self.lanes: dict[str, tuple[list[int], list[int]]] = {}

    def column(self, at: float) -> int:
        """Return the column of a time, after widening the columns if needed."""
        if not self.began:
            self.began = at
        while at - self.began >= self.column_s * MOST_COLUMNS:
            self.column_s *= 2
            for lanes in self.lanes.values():
                for lane in lanes:
                    lane[:] = [sum(lane[i : i + 2]) for i in range(0, len(lane), 2)]
        return max(0, int((at - self.began) / self.column_s))

    def add_tokens(self, peer: str, at: float, tokens: int) -> None:
        """Record tokens of a peer that were merged."""
        self._add(peer, 0, at, tokens)

    def merged(self, peer: str, at: float) -> None:
        """Record a version that a peer has merged."""
        self._add(peer, 1, at, 1)

    def _add(self, peer: str, which: int, at: float, amount: int) -> None:
        column = self.column(at)
        if peer not in self.lanes:
            if len(self.lanes) >= MOST_LANES:
                return
            self.lanes[peer] = ([], [])
        lane = self.lanes[peer][which]
        lane.extend([0] * (column + 1 - len(lane)))
        lane[column] += amount


# -- History of a run --------------------------------------------------------------------------------------------------


KEPT_HEADLINES = 60
KEPT_MERGES = 24
KEPT_MARKS = 64
MOST_PEERS = 1024
MOST_SHARDS = 4096
MOST_COUNTS = 64
MEMBERSHIP_EVENTS = ("joined", "left")
# A peer of a recording without an event for this long does not train. Unless another event says that it is live, it is
# shown as gone.
QUIET_S = 30.0


class _Given(msgspec.Struct):
    """Contributions of one peer."""

    merged: float = 0.0
    commits: int = 0
    seen: float = 0.0


class RunHistory:
    """Aggregates the events of a run.

    ``elements``: parameters of each shard, in order; empty: all shards count alike.
    """

    def __init__(self, title: Title, elements: Sequence[int] = (), total_steps: int = 0) -> None:
        self.title = title
        self.mark = 0
        self.counts: Counter[str] = Counter()
        self.headlines: deque[Headline] = deque(maxlen=KEPT_HEADLINES)
        self.sample: Sample | None = None
        self._elements = tuple(elements)
        self._course = RunProgress(total_steps=total_steps)
        self._costs = Costs()
        self._link = LinkUse()
        self._given: dict[str, _Given] = {}
        self._words: dict[str, tuple[float, OwnWords]] = {}
        # Whether a peer is live, as the events say; a peer that they do not name is live while it is heard of.
        self._presence: dict[str, bool] = {}
        # Version, time, and tokens of the chain, by shard.
        self._shards: dict[int, tuple[int, float, int]] = {}
        self._merges: deque[MergeRow] = deque(maxlen=KEPT_MERGES)
        self._past = _Past()

    # -- events --------------------------------------------------------------------------------------------------------

    def take(self, line: Line, source: str = "") -> None:
        """Add one event. ``source``: the peer that logged it; empty: this one."""
        try:
            self._take(line, source or self.title.me)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return
        self.mark += 1

    def _take(self, line: Line, source: str) -> None:
        at = float(line["time"])
        match line["event"]:
            case "commit":
                self._commit(line, at)
            case "evaluation":
                self._evaluation(line, at)
            case "progress":
                self._progress(line, at, source)
            case "sample":
                self.sample = Sample(at=at, step=int(line["step"]), text=str(line["text"])[:4000])
            case "end":
                self._course = msgspec.structs.replace(self._course, total_steps=int(line["last_step"]))
            case "fault":
                self._count(f"fault: {line['what']}")
            case "note" if line["topic"] in ("fork", "refusal"):
                self._count(line["topic"])
            case "joined" | "left":
                self._membership(source, str(line["peer"]), at, is_live=line["event"] == "joined")
            case "started":
                if source == self.title.me:
                    phase = "joining" if line["is_new"] else "starting"
                    self._course = msgspec.structs.replace(self._course, phase=phase)
                    self._presence.clear()
                self._set_presence(source, is_live=True)
            case "ended":
                self._words.pop(source, None)
                self._set_presence(source, is_live=False)
                if source == self.title.me:
                    self._course = msgspec.structs.replace(self._course, phase="ended", tokens_per_s=0.0)
                    self._link = msgspec.structs.replace(self._link, up_per_s=0.0)
            case _:
                pass
        told = sentence(line)
        if told is not None:
            text = told.text if source == self.title.me else f"{source[-6:]}: {told.text}"
            headline = Headline(at=at, level=told.level, text=text)
            self.headlines.append(headline)
            if line["event"] in MEMBERSHIP_EVENTS and source == self.title.me:
                self._past.marks.append(headline)

    def _count(self, what: str) -> None:
        if what in self.counts or len(self.counts) < MOST_COUNTS:
            self.counts[what[:80]] += 1

    def _word(self, peer: str, at: float) -> None:
        if peer in self._given:
            self._given[peer].seen = at

    def _membership(self, source: str, peer: str, at: float, *, is_live: bool) -> None:
        """Record that ``source`` saw ``peer`` join or leave. Other peers' word counts about this peer, and after its
        end."""
        me = self.title.me
        self._word(peer if source == me else source, at)
        if me in (source, peer) or not self._presence.get(me, True):
            self._set_presence(peer, is_live=is_live)

    def _set_presence(self, peer: str, *, is_live: bool) -> None:
        if not is_live and peer not in self._given:
            self._presence.pop(peer, None)
        elif peer in self._presence or len(self._presence) < MOST_PEERS:
            self._presence[peer] = is_live

    def _giver(self, peer: str) -> _Given | None:
        if peer not in self._given and len(self._given) < MOST_PEERS:
            self._given[peer] = _Given()
        return self._given.get(peer)

    def _commit(self, line: Line, at: float) -> None:
        shard, version, owner = int(line["shard"]), int(line["version"]), str(line["owner"])
        if not 0 <= shard < MOST_SHARDS or version <= self._shards.get(shard, (0, 0.0, 0))[0]:
            return
        contributors = {peer_of(LearnerId(learner)): int(n) for learner, n in line["contributors"].items()}
        step, tokens = max(self._course.step, int(line["step"])), int(line["tokens"])
        tokens_before = self._shards.get(shard, (0, 0.0, 0))[2]
        self._shards[shard] = (version, at, tokens)
        size = self._elements[shard] if shard < len(self._elements) else 1
        self._past.merged += size * (tokens - tokens_before)
        whole = sum(self._elements) or len(self._shards)
        for peer, given in contributors.items():
            giver = self._giver(peer)
            if giver is not None:
                giver.merged += size / whole * given
                giver.seen = at
            self._past.lanes.add_tokens(peer, at, given)
        giver = self._giver(owner)
        if giver is not None:
            giver.commits += 1
            giver.seen = at
        self._past.lanes.merged(owner, at)
        total = sum(contributors.values())
        self._merges.append(
            MergeRow(at=at, shard=shard, version=version, owner=owner, contributors=len(contributors), tokens=total)
        )
        self._course = msgspec.structs.replace(self._course, step=step, tokens_merged=round(self._past.merged / whole))

    def _evaluation(self, line: Line, at: float) -> None:
        if int(line["step"]) <= self._course.held_out_step and self._course.held_out_loss is not None:
            return
        loss = float(line["loss"])
        self._past.held_out.add(float(line["tokens"]), at, loss)
        self._course = msgspec.structs.replace(self._course, held_out_loss=loss, held_out_step=int(line["step"]))

    def _progress(self, line: Line, at: float, source: str) -> None:
        tokens, step_s = int(line["tokens"]), float(line["step_time_s"])
        loss = None if line["loss"] is None else float(line["loss"])
        was = self._words.get(source)
        rate = was[1].tokens_per_s if was is not None else 0.0
        if was is not None and at > was[0]:
            made = max(0, tokens - was[1].tokens) / (at - was[0])
            rate = made if not rate else rate + 0.2 * (made - rate)
        words = OwnWords(
            phase="training",
            tokens_per_s=rate if step_s >= 0.0 else 0.0,
            tokens=tokens,
            loss=loss,
            version_min=min((v for v, _, _ in self._shards.values()), default=0),
            version_max=max((v for v, _, _ in self._shards.values()), default=0),
            up_bytes=int(line["sent_bytes"]),
            down_bytes=0,
            blocked_s=float(line["blocked_s"]),
            trouble="",
        )
        if source in self._words or len(self._words) < MOST_PEERS:
            self._words[source] = (at, words)
        self._giver(source)
        self._word(source, at)
        self._set_presence(source, is_live=True)
        if source == self.title.me:
            if loss is not None:
                self._past.train.add(self._course.tokens_merged, at, loss)
            if was is not None:
                self._past.rate.add(self._course.tokens_merged, at, rate)
            self._course = msgspec.structs.replace(
                self._course,
                phase="training",
                step=max(self._course.step, int(line["step"])),
                tokens_trained=tokens,
                tokens_per_s=rate,
                train_loss=loss,
            )
            sent, since = words.up_bytes, at - was[0] if was is not None else 0.0
            self._link = LinkUse(up_bytes=sent, up_per_s=max(0, sent - self._link.up_bytes) / since if since else 0.0)
            self._costs = Costs(
                compute_s=float(line["compute_s"]),
                overhead_s=float(line.get("overhead_s", 0.0)),
                blocked_s=words.blocked_s,
                node_cpu_s=float(line.get("node_cpu_s", 0.0)),
            )

    # -- results -------------------------------------------------------------------------------------------------------

    def picture(self, now: float) -> RunSnapshot:
        """Return the snapshot of time ``now``, from the events alone."""
        total = self._course.total_steps
        words = {
            peer: told
            for peer, (at, told) in self._words.items()
            if now - at < QUIET_S and self._presence.get(peer, True)
        }
        rows = self.rows(now, words)
        return RunSnapshot(
            at=now,
            title=self.title,
            course=msgspec.structs.replace(
                self._course,
                step=min(self._course.step, total) if total else self._course.step,  # merges follow the last step
                done=min(1.0, self._course.step / total) if total else None,
                swarm_tokens_per_s=sum(told.tokens_per_s for told in words.values()),
            ),
            headcount=Headcount(
                known=len(rows) or 1,
                live=sum(row.is_live for row in rows) if rows else 1,
                participating=sum(row.is_participating for row in rows),
                weight_averaged=self._merges[-1].contributors if self._merges else 0,
            ),
            link=self._link,
            costs=self._costs,
            shards=tuple(ShardRow(shard=s, version=v, at=at) for s, (v, at, _) in sorted(self._shards.items())),
            peers=rows,
            merges=tuple(reversed(self._merges)),
            headlines=tuple(reversed(self.headlines)),
            counts=dict(self.counts),
            sample=self.sample,
        )

    def rows(self, now: float, words: dict[str, OwnWords]) -> tuple[PeerRow, ...]:
        """Return the live peers and those that contributed or merged: this one first, then by merged tokens, then by
        ID."""
        total = sum(giver.merged for giver in self._given.values())
        rows = []
        for peer in dict.fromkeys((*self._given, *(peer for peer, is_live in self._presence.items() if is_live))):
            giver = self._given.get(peer) or _Given()
            is_heard = peer in words or now - giver.seen < QUIET_S
            is_live = self._presence.get(peer, is_heard)
            rows.append(
                PeerRow(
                    peer=peer,
                    is_me=peer == self.title.me,
                    is_live=is_live,
                    is_participating=is_live and is_heard,
                    merged=round(giver.merged),
                    share=giver.merged / total if total else 0.0,
                    commits=giver.commits,
                    seen=giver.seen,
                    words=words.get(peer),
                )
            )
        return tuple(sorted(rows, key=lambda row: (not row.is_me, -row.merged, row.peer)))

    def history(self) -> History:
        """Return the curves and lanes."""
        return self._past.as_history(self.mark)


class _Past:
    """Curves and lanes of a run."""

    def __init__(self) -> None:
        # Sum over the shards of tokens times elements.
        self.merged = 0
        self.held_out, self.train, self.rate = Curve(), Curve(), Curve()
        self.lanes = LaneBook()
        self.marks: deque[Headline] = deque(maxlen=KEPT_MARKS)

    def as_history(self, mark: int) -> History:
        book = self.lanes
        return History(
            mark=mark,
            held_out=tuple(self.held_out),
            train=tuple(self.train),
            rate=tuple(self.rate),
            began=book.began,
            column_s=book.column_s,
            lanes=tuple(
                LaneRow(peer=peer, given=tuple(given), owned=tuple(owned))
                for peer, (given, owned) in book.lanes.items()
            ),
            marks=tuple(self.marks),
        )


def finite(value: float | None) -> float | None:
    """Return ``value`` if it is finite, else None. Values reported by other peers may be NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


# -- Summary at the end ------------------------------------------------------------------------------------------------


def account(picture: RunSnapshot, lasts_s: float) -> Summary:
    """Return the contribution of the peer with this snapshot, after ``lasts_s`` seconds of its node's life."""
    mine = next((row for row in picture.peers if row.is_me), None)
    return Summary(
        share=0.0 if mine is None else mine.share,
        commits=0 if mine is None else mine.commits,
        lasts_s=lasts_s,
        tokens=picture.course.tokens_trained,
        up_bytes=picture.link.up_bytes,
        down_bytes=picture.link.down_bytes,
    )


def closing(told: Summary | None) -> str:
    """Return a summary for the user at the end; empty if the peer trained nothing."""
    if told is None or not told.tokens:
        return ""
    return (
        f"this machine gave {told.tokens:,} tokens in {duration(told.lasts_s)}: {told.commits:,} shard "
        f"version{'s' * (told.commits != 1)} merged, "
        f"{volume(told.up_bytes)} sent, {volume(told.down_bytes)} received; {percent(told.share)} of all tokens merged "
        "since it first joined are its own"
    )
