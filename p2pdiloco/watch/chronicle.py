"""What a peer's events add up to: a picture and its history, the same for a peer that lives and for a recording.

Rules of this file:
1. A picture is a function of the events, in their order; time is in them, or given.
2. Events of several peers of one run may be told, each with its source: a commit counts once.
3. An event that is malformed (a torn line, an older release's) is left out.
4. Everything kept is bounded (``curves``, and the constants below).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.watch.curves import Curve, LaneBook
from p2pdiloco.watch.picture import (
    Costs,
    Course,
    Headcount,
    Headline,
    History,
    LaneRow,
    LinkUse,
    MergeRow,
    OwnWords,
    PeerRow,
    Picture,
    Sample,
    ShardRow,
    Title,
)
from p2pdiloco.watch.sentences import Line, sentence

KEPT_HEADLINES = 60
KEPT_MERGES = 24
KEPT_MARKS = 64
MOST_PEERS = 1024
MOST_SHARDS = 4096
MOST_COUNTS = 64
COMING_AND_GOING = ("came", "went")
QUIET_S = 30.0
"""A peer of a recording that has told nothing for so long is shown as gone."""


class _Given:
    """What one peer has given."""

    __slots__ = ("commits", "merged", "seen")

    def __init__(self) -> None:
        self.merged = 0.0
        self.commits = 0
        self.seen = 0.0


class Chronicle:
    """See the module. ``elements``: of each shard, in order; empty: all count alike."""

    def __init__(self, title: Title, elements: Sequence[int] = (), total_steps: int = 0) -> None:
        self.title = title
        self.mark = 0
        self.counts: Counter[str] = Counter()
        self.headlines: deque[Headline] = deque(maxlen=KEPT_HEADLINES)
        self.sample: Sample | None = None
        self._elements = tuple(elements)
        self._course = Course(total_steps=total_steps)
        self._live = 1
        self._costs = Costs()
        self._link = LinkUse()
        self._given: dict[str, _Given] = {}
        self._words: dict[str, tuple[float, OwnWords]] = {}
        self._shards: dict[int, tuple[int, float, int]] = {}
        """Version, when, tokens of the chain."""
        self._merges: deque[MergeRow] = deque(maxlen=KEPT_MERGES)
        self._past = _Past()

    # -- events --------------------------------------------------------------------------------------------------------

    def take(self, line: Line, source: str = "") -> None:
        """One event; ``source``: the peer that tells, this one if it is not said."""
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
            case "peers" if source == self.title.me:
                self._live = int(line["live"])
            case "sample":
                self.sample = Sample(at=at, step=int(line["step"]), text=str(line["text"])[:4000])
            case "fault":
                self._count(f"fault: {line['what']}")
            case "note" if line["topic"] in ("fork", "refusal"):
                self._count(line["topic"])
            case "came" | "went":
                self._word(source if source != self.title.me else str(line["peer"]), at)
            case "started" if source == self.title.me:
                self._course = msgspec.structs.replace(self._course, phase="joining" if line["is_new"] else "starting")
            case "ended":
                self._words.pop(source, None)
                if source == self.title.me:
                    self._course = msgspec.structs.replace(self._course, phase="ended", tokens_per_s=0.0)
            case _:
                pass
        told = sentence(line)
        if told is not None:
            text = told.text if source == self.title.me else f"{source[-6:]}: {told.text}"
            headline = Headline(at=at, level=told.level, text=text)
            self.headlines.append(headline)
            if line["event"] in COMING_AND_GOING and source == self.title.me:
                self._past.marks.append(headline)

    def _count(self, what: str) -> None:
        if what in self.counts or len(self.counts) < MOST_COUNTS:
            self.counts[what[:80]] += 1

    def _word(self, peer: str, at: float) -> None:
        if peer in self._given:
            self._given[peer].seen = at

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
            self._past.lanes.gave(peer, at, given)
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
            self._costs = Costs(compute_s=float(line["compute_s"]), blocked_s=words.blocked_s)

    # -- what they add up to -------------------------------------------------------------------------------------------

    def picture(self, now: float) -> Picture:
        """Of a moment, by the events alone."""
        total = self._course.total_steps
        words = {peer: told for peer, (at, told) in self._words.items() if now - at < QUIET_S}
        rows = self.rows(now, words)
        return Picture(
            at=now,
            title=self.title,
            course=msgspec.structs.replace(
                self._course,
                step=min(self._course.step, total) if total else self._course.step,  # turns go on beyond the last one
                done=min(1.0, self._course.step / total) if total else None,
                swarm_tokens_per_s=sum(told.tokens_per_s for told in words.values()),
            ),
            headcount=Headcount(
                known=max(self._live, len(words)),
                live=max(self._live, len(words)),
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
        """The peers that gave anything: this one first, then by what they gave, then by name."""
        total = sum(giver.merged for giver in self._given.values())
        rows = [
            PeerRow(
                peer=peer,
                is_me=peer == self.title.me,
                is_live=peer in words or now - giver.seen < QUIET_S,
                is_participating=peer in words or now - giver.seen < QUIET_S,
                merged=round(giver.merged),
                share=giver.merged / total if total else 0.0,
                commits=giver.commits,
                seen=giver.seen,
                words=words.get(peer),
            )
            for peer, giver in self._given.items()
        ]
        return tuple(sorted(rows, key=lambda row: (not row.is_me, -row.merged, row.peer)))

    def history(self) -> History:
        """What led here."""
        return self._past.told(self.mark)


class _Past:
    """Curves and lanes."""

    def __init__(self) -> None:
        self.merged = 0
        """Each shard's tokens times its elements, summed up."""
        self.held_out, self.train, self.rate = Curve(), Curve(), Curve()
        self.lanes = LaneBook()
        self.marks: deque[Headline] = deque(maxlen=KEPT_MARKS)

    def told(self, mark: int) -> History:
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
    """What another peer tells may be no number."""
    return value if value is not None and math.isfinite(value) else None
