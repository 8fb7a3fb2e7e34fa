"""Whether a chaos run kept the promises: pure, from the evidence to verdicts, each with a sentence.

Rules of this file:
1. A promise that was not put to the test is not kept: no evidence fails the verdict.
2. The state's equality is judged in the quiet time at the end, from its middle on: every version that two peers took
   must have one name (the digest of its header, which holds the digest of the state), and the states with which the
   peers ended must be those that the last one had at these versions.
3. Tokens: whoever left in order left nothing unmerged, and in the state of the one that left last each of their
   learners' marks stands, in every shard, at all that it had trained. In the middle of a run a peer may leave tokens
   unmerged only if it tried for as long as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from p2pdiloco.protocol.ids import LearnerId, peer_of
from tests.chaos.evidence import Evidence, Struck
from tests.chaos.schedule import COUNTED, DURATIONS_S, LEAVE_S, MEET_S, SHORT_KINDS

BLOCKED_SHARE = 0.01
"""Allowed share of a learner's training time: the kernel may suspend a thread in a call that waits for nobody."""
MIN_COMPARED = 3
"""Versions that several peers must have taken in the quiet time."""

LEARNER_S = 60.0
"""Time for a node to start a learner again after what kept it from that is over: a pause, and the start."""
TWIN_S = 50.0
"""Time for a copy to start, to detect the original, and to end."""
TWIN_STATUS = 2
TWIN_SENTENCE = "another process takes part with this peer's identity"
CLOCK_S = 10.0
"""From then on a clock is wrong."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One promise."""

    name: str
    is_kept: bool
    sentence: str


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A time without faults, how many versions all shards together went on in it, and their longest pause."""

    began: float
    ended: float
    versions: int
    pause_s: float


def judge(evidence: Evidence) -> list[Verdict]:
    """The verdicts on all promises."""
    return [
        _faults_happened(evidence),
        _one_model(evidence),
        _tokens(evidence),
        _versions(evidence),
        _never_blocked(evidence),
        _orderly(evidence),
        _all_take_part(evidence),
        _meetings(evidence),
        _shortages(evidence),
        _twins(evidence),
        _clocks(evidence),
        _liars(evidence),
        _replay(evidence),
        _no_leftovers(evidence),
        _goodput(evidence),
    ]


def _verdict(name: str, problems: list[str], kept: str) -> Verdict:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Verdict(name=name, is_kept=not problems, sentence=problems[0] + more if problems else kept)


def _faults_happened(evidence: Evidence) -> Verdict:
    drawn, done = len(evidence.schedule.faults), len(evidence.faults)
    kinds = len({fault.kind for fault in evidence.faults})
    problems = [f"none of {drawn} faults could be done"] if drawn and not done else []
    return _verdict("faults done", problems, f"{done} of {drawn}, {kinds} kinds; {evidence.skipped} had no target")


def _one_model(evidence: Evidence) -> Verdict:
    since = (evidence.settling + evidence.settled) / 2
    names: dict[tuple[int, int], dict[str, str]] = {}
    for peer in evidence.peers:
        for commit in peer.commits:
            if since <= commit.time < evidence.settled:
                names.setdefault((commit.shard, commit.version), {})[peer.name] = commit.head
    compared = {key: heads for key, heads in names.items() if len(heads) > 1}
    problems = [
        f"shard {shard} version {version} has {len(set(heads.values()))} states ({', '.join(sorted(heads))})"
        for (shard, version), heads in sorted(compared.items())
        if len(set(heads.values())) > 1
    ]
    if len(compared) < MIN_COMPARED:
        problems.append(f"only {len(compared)} versions were seen by two peers in the quiet time")
    ended, equal = list(_last_states(evidence)), 0
    problems += [problem for problem in ended if problem]
    equal = sum(not problem for problem in ended)
    kept = f"{len(compared)} versions in the quiet time and {equal} final states of shards: one digest each"
    return _verdict("one model", problems, kept)


def _last_states(evidence: Evidence) -> Iterator[str]:
    """For every shard with which a peer ended: what is wrong with it, or nothing."""
    last = next(peer for peer in evidence.peers if peer.name == evidence.last)
    if last.left is None or not last.chains:
        yield f"{last.name}, the last to leave, left no report or no journal"
        return
    digests: dict[str, str | None] = {}
    for peer in evidence.peers:
        if peer.left is None:
            yield f"{peer.name} left no report"
            continue
        for shard, (version, head) in enumerate(zip(peer.left.versions, peer.left.heads, strict=True)):
            digest = peer.left.digests[shard]
            if head not in last.chains[shard]:
                yield f"{peer.name} ended shard {shard} with version {version} on another chain than {last.name}"
            elif digest is None or digests.setdefault(head, digest) != digest:
                yield f"{peer.name} ended shard {shard}, version {version}, with another digest"
            else:
                yield ""


def _tokens(evidence: Evidence) -> Verdict:
    marks = next(peer.marks for peer in evidence.peers if peer.name == evidence.last)
    problems, tokens = [], 0
    for peer in evidence.peers:
        problems += [
            f"{peer.name}, asked to leave, lost {life.lost_tokens:,} tokens after {life.leave_s:.0f} s of {LEAVE_S:.0f}"
            for life in peer.lives
            if life.lost_tokens and life.leave_s is not None and life.leave_s < LEAVE_S
        ]
        left = peer.left
        if left is None or left.learner is None:
            problems.append(f"nothing is known of what {peer.name} had trained at its end")
            continue
        tokens += left.learner_tokens
        merged = marks.get(left.learner, ())
        if left.tokens_unmerged:
            problems.append(f"{peer.name} left {left.tokens_unmerged:,} tokens unmerged")
        elif left.learner_tokens and set(merged) != {left.learner_tokens}:
            found = f"{min(merged):,} to {max(merged):,}" if merged else "none"
            problems.append(f"{peer.name} trained {left.learner_tokens:,} tokens, merged are {found}")
    if not tokens:
        problems.append("no learner that was there at the end had trained anything")
    return _verdict("tokens conserved", problems, f"{tokens:,} of learners alive at the end, all merged in every shard")


def _versions(evidence: Evidence) -> Verdict:
    windows = quiet_windows(evidence)
    problems = [
        f"no version for {w.pause_s:.1f} s, without any fault, between {w.began - evidence.began:.0f} s "
        f"and {w.ended - evidence.began:.0f} s"
        for w in windows
        if not w.versions or w.pause_s > evidence.schedule.plan.calm_s
    ]
    if not windows:
        problems.append("there was no quiet time")
    total = max((commit.version for peer in evidence.peers for commit in peer.commits), default=0)
    pause_s = max((w.pause_s for w in windows), default=0.0)
    kept = f"to {total}; in all {len(windows)} quiet times, with a pause of {pause_s:.1f} s at most"
    return _verdict("versions advanced", problems, kept)


def quiet_windows(evidence: Evidence) -> list[Window]:
    """Times of at least the plan's ``calm_s`` that begin as long after the last fault's end."""
    calm_s = evidence.schedule.plan.calm_s
    first: dict[tuple[int, int, str], float] = {}
    for peer in evidence.peers:
        for commit in peer.commits:
            key = (commit.shard, commit.version, commit.head)
            first[key] = min(commit.time, first.get(key, commit.time))
    found, since = [], evidence.began
    stop = Struck(number=0, kind="break", peers=(), began=evidence.settled, ended=evidence.settled)
    for fault in [*sorted(evidence.faults, key=lambda fault: fault.began), stop]:
        if fault.began - since >= calm_s:
            inside = sorted(time for time in first.values() if since <= time <= fault.began)
            pauses = (b - a for a, b in pairwise([since, *inside, fault.began]))
            found.append(Window(began=since, ended=fault.began, versions=len(inside), pause_s=max(pauses)))
        since = max(since, fault.ended + calm_s)
    return found


def _never_blocked(evidence: Evidence) -> Verdict:
    problems, worst, total = [], 0.0, 0.0
    for peer in evidence.peers:
        for life in peer.lives:
            stopped_s = sum(
                fault.ended - fault.began
                for fault in evidence.faults
                if fault.kind == "stop-learner"
                and peer.name in fault.peers
                and fault.began < life.ended
                and fault.ended > life.began
            )
            total += life.trained_s
            worst = max(worst, life.blocked_s)
            if life.blocked_s > BLOCKED_SHARE * life.trained_s + stopped_s:
                problems.append(f"a learner of {peer.name} waited {life.blocked_s:.2f} s of {life.trained_s:.0f} s")
    if not total:
        problems.append("no learner trained")
    return _verdict(
        "learners never blocked", problems, f"at most {worst:.3f} s in any life, of {total:,.0f} s together"
    )


def _orderly(evidence: Evidence) -> Verdict:
    problems = [
        f"{peer.name} ended by itself with status {life.status} after {life.ended - life.began:.0f} s"
        for peer in evidence.peers
        for life in peer.lives
        if not life.is_expected
    ]
    problems += [
        f"{peer.name} left with status {peer.lives[-1].status} at the end"
        for peer in evidence.peers
        if peer.lives and peer.lives[-1].status != 0
    ]
    lives = sum(len(peer.lives) for peer in evidence.peers)
    return _verdict("nobody ended by itself", problems, f"{lives} lives of {len(evidence.peers)} peers, all as asked")


def _all_take_part(evidence: Evidence) -> Verdict:
    """By the versions that each took in the quiet time, and by its learner's marks."""
    marks = next(peer.marks for peer in evidence.peers if peer.name == evidence.last)
    problems = []
    for peer in evidence.peers:
        since = evidence.settling
        if not any(since <= commit.time <= evidence.settled for commit in peer.commits):
            problems.append(f"{peer.name} took no version in the quiet time")
        elif peer.left is not None and not any(marks.get(peer.left.learner or "", ())):
            problems.append(f"nothing of {peer.name}'s last learner was merged")
    return _verdict("everybody came back", problems, f"all {len(evidence.peers)} peers train and merge at the end")


def _meetings(evidence: Evidence) -> Verdict:
    """After a power cut, MEET_S from when the last peer was started again, versions that all took have merged learners
    of all."""
    problems, slowest_s = [], 0.0
    cuts = [fault for fault in evidence.faults if fault.kind == "power-cut"]
    for cut in cuts:
        starts = [[life.began for life in peer.lives if life.began > cut.began] for peer in evidence.peers]
        if not all(starts):
            problems.append(f"after the power cut at {cut.began - evidence.began:.0f} s not all were started again")
            continue
        last = max(min(began) for began in starts)
        met_s = _met(evidence, last) - last
        slowest_s = max(slowest_s, met_s)
        if met_s > MEET_S:
            at_s = cut.began - evidence.began
            told = "never" if met_s == float("inf") else f"only {met_s:.0f} s after the last start"
            problems.append(f"after the power cut at {at_s:.0f} s all peers merged together {told}")
    kept = f"{len(cuts)} power cuts without a bootstrap; all merged together within {slowest_s:.0f} s of the last start"
    return _verdict("met again", problems, kept)


def _met(evidence: Evidence, since: float) -> float:
    """When, after ``since``, all peers had taken versions that merge learners of all of them; infinite: never."""
    taken: dict[str, set[str]] = {}
    merged: set[str] = set()
    lines = sorted(
        ((commit.time, peer.name, commit) for peer in evidence.peers for commit in peer.commits),
        key=lambda line: line[:2],
    )
    for time, name, commit in lines:
        if time < since:
            continue
        takers = taken.setdefault(commit.head, set())
        takers.add(name)
        if len(takers) == len(evidence.peers):
            merged |= {peer_of(LearnerId(learner)) for learner in commit.contributors}
            if len(merged) >= len(evidence.peers):
                return time
    return float("inf")


def _shortages(evidence: Evidence) -> Verdict:
    """A peer that can start no learner says so, and starts one once it can again, unless it has ended before."""
    by_name, problems, count = {peer.name: peer for peer in evidence.peers}, [], 0
    for fault in evidence.faults:
        peer = by_name.get(fault.peers[0])
        if fault.kind not in SHORT_KINDS or fault.ended - fault.began < DURATIONS_S[fault.kind][0] or peer is None:
            continue
        count += 1
        at_s = fault.began - evidence.began
        if not any(fault.began <= time <= fault.ended for time in peer.absences):
            problems.append(f"{peer.name} did not tell that it could start no learner ({fault.kind} at {at_s:.0f} s)")
        until = next((life.ended for life in peer.lives if life.began < fault.began < life.ended), fault.ended)
        patience_s = LEARNER_S + _stopped_s(evidence, peer.name)
        if until - fault.ended > patience_s and not any(
            0.0 < time - fault.began < fault.ended - fault.began + patience_s for time in peer.starts
        ):
            problems.append(f"{peer.name} had no learner any more after {at_s:.0f} s ({fault.kind})")
    kept = f"{count} times no learner could be started; each was told, and the learner came back"
    return _verdict("shortages survived", problems, kept)


def _stopped_s(evidence: Evidence, name: str) -> float:
    """Return for how long a peer's processes were stopped."""
    kinds = ("stop", "freeze", "stop-learner")
    return sum(f.ended - f.began for f in evidence.faults if f.kind in kinds and name in f.peers)


def _twins(evidence: Evidence) -> Verdict:
    """Of a peer and the copy of its folder that was started beside it, the copy ends and says why; a copy that was
    ended before it had time to is not judged."""
    judged = [twin for twin in evidence.twins if twin.status is not None or twin.given_s >= TWIN_S]
    problems = [
        f"a copy of {twin.peer} that was started beside it "
        + (f"went on for {twin.given_s:.0f} s" if twin.status is None else f"ended with {twin.status}: {twin.said!r}")
        for twin in judged
        if twin.status != TWIN_STATUS or TWIN_SENTENCE not in twin.said
    ]
    return _verdict(
        "twins ended", problems, f"{len(judged)} copies started beside their originals, all ended, and said why"
    )


def _clocks(evidence: Evidence) -> Verdict:
    """Whoever's clock is wrong hears of it; all else is judged as for everybody."""
    plan = evidence.schedule.plan
    wrong = [peer for peer in evidence.peers if abs(plan.clock_off_s(peer.name)) > CLOCK_S]
    problems = [f"{peer.name} was never told that its clock is wrong" for peer in wrong if not peer.told_of_clock]
    return _verdict("wrong clocks told", problems, f"{len(wrong)} peers with a wrong clock, each told")


def _liars(evidence: Evidence) -> Verdict:
    """Peers with changed code took part, each of their lies was sent, and what differs from honest things was counted,
    but of no honest one."""
    plan = evidence.schedule.plan
    problems = [
        f"{one.name}, which is honest, was charged with a wrong merge or accusation {one.charged} times"
        for one in evidence.peers
        if one.charged
    ]
    for one in evidence.hostile:
        lies = plan.lies(one.name).split("+")
        if not one.peer:
            problems.append(f"{one.name}, which is hostile, never took part")
            continue
        problems += [f"{one.name} never sent its lie {lie!r}" for lie in lies if lie not in one.sent]
        if not one.faults and not COUNTED.isdisjoint(lies):
            problems.append(f"what {one.name} sent ({plan.lies(one.name)}) was never counted")
    told = ", ".join(f"{one.name} ({plan.lies(one.name)}) {one.faults} times" for one in evidence.hostile)
    return _verdict("liars counted", problems, told or "everybody's code is ours")


def _replay(evidence: Evidence) -> Verdict:
    problems = [peer.journal_problem for peer in evidence.peers if peer.journal_problem]
    events = sum(peer.journal_events for peer in evidence.peers)
    if not events:
        problems.append("there is no journal")
    return _verdict("journals replay", problems, f"{events:,} events to the same decisions")


def _no_leftovers(evidence: Evidence) -> Verdict:
    left = ", ".join(evidence.leftovers)
    return _verdict("no leftovers", [f"still there: {left}"] if left else [], "no process outlived the run")


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The learners' time and tokens, and how much of them was merged."""

    of_living: float
    """Share of the time in which their peers' processes were there and not stopped, from each peer's first step to its
    last, that ended in merged tokens. Starting, catching up and waiting for a node are in that time."""
    of_all: float
    """The same for all time, alive or not."""
    tokens_merged: float
    """Share of all tokens trained, by living and dead learners, that the last state has merged. Of a learner that was
    killed the last second's are not counted."""


def goodput(evidence: Evidence) -> Goodput:
    """Merged is what the last state's chains have merged: tokens of the dead are in it, those of
    forks that lost and of versions that a blackout took are not. Time used is that share of the time that the learners'
    steps took."""
    used = available = living = trained = 0.0
    for peer in evidence.peers:
        steps = [(life.trained, life.trained + life.trained_s) for life in peer.lives if life.trained is not None]
        if steps:
            first, last = steps[0][0], max(evidence.settled, steps[-1][1])
            available += last - first
            living += sum(max(0.0, min(life.ended, last) - max(life.began, first)) for life in peer.lives)
            living -= sum(_stopped(evidence, peer.name))
        trained += sum(life.tokens for life in peer.learners)
        used += sum(life.compute_s for life in peer.learners)
    left = next(peer.left for peer in evidence.peers if peer.name == evidence.last)
    merged = left.tokens_merged / trained if left is not None and trained else 0.0
    return Goodput(
        of_living=min(1.0, merged * used / living) if living > 0.0 else 0.0,
        of_all=min(1.0, merged * used / available) if available else 0.0,
        tokens_merged=min(1.0, merged),
    )


def _stopped(evidence: Evidence, name: str) -> Iterator[float]:
    """How long a peer's learner was stopped, each time."""
    for fault in evidence.faults:
        if fault.kind == "stop-learner" and name in fault.peers:
            yield fault.ended - fault.began


def _goodput(evidence: Evidence) -> Verdict:
    found, plan = goodput(evidence), evidence.schedule.plan
    time = f"{found.of_living:.1%} of the learners' time alive ({found.of_all:.1%} of all) ended in merged tokens"
    tokens = f"{found.tokens_merged:.1%} of all tokens trained were merged"
    problems = [f"{time}, less than {plan.least.goodput:.1%}"] if found.of_living < plan.least.goodput else []
    problems += [f"{tokens}, less than {plan.least.merged:.1%}"] if found.tokens_merged < plan.least.merged else []
    return _verdict("goodput", problems, f"{time}, {tokens}")
