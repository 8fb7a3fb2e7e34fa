"""What happened, in a sentence that needs no knowledge of the code. Pure.

Rule of this file: a sentence is one line of at most ``LONGEST`` characters, whatever others have put into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.util.logs import printable, short
from p2pdiloco.watch import words

LONGEST = 300
_ID = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{36,}\b")

Line = dict[str, Any]
"""One of the event log."""


class Sentence(NamedTuple):
    """``level`` as in ``picture.Headline``."""

    level: str
    text: str


def plain(text: object) -> str:
    """One line, printable, bounded, with short names of peers."""
    named = _ID.sub(lambda found: short(found[0]), str(text)[: 4 * LONGEST])
    return printable(named)[:LONGEST]


def sentence(line: Line) -> Sentence | None:
    """Of an event; None: it is no news for people.

    Raises:
        KeyError: the event lacks what belongs to it.
    """
    write = _WRITERS.get(line["event"])
    found = None if write is None else write(line)
    return None if found is None else Sentence(found.level, plain(found.text))


def detail(line: Line) -> str | None:
    """Of an event that is no news, but stands in the log; None: of a kind that is not known.

    Raises:
        KeyError: the event lacks what belongs to it.
    """
    write = _DETAILS.get(line["event"])
    return None if write is None else plain(write(line))


def _note(line: Line) -> Sentence:
    topic = line["topic"]
    level = "warning" if line["level"] == "warning" else _GOOD.get(topic, "info")
    return Sentence(level, f"{_TOPICS.get(topic, topic)}: {line['text']}")


def _live(line: Line) -> str:
    return "1 peer is live" if line["live"] == 1 else f"{line['live']} peers are live"


def _ended(line: Line) -> Sentence:
    return Sentence("error" if line["status"] else "good", f"this peer ended: {line['reason']}")


def _transfer(line: Line) -> str:
    left = "" if line["left_s"] is None else f", {words.duration(line['left_s'])} left"
    return f"{line['done_mb']:,.1f} of {line['of_mb']:,.1f} MB of state, {line['mb_per_s']:.1f} MB/s{left}"


def _commit(line: Line) -> str:
    tokens = {short(peer_of(LearnerId(learner))): n for learner, n in line["contributors"].items()}
    given = " and ".join(f"{peer} ({words.amount(n)})" for peer, n in tokens.items())
    where = f"shard {line['shard']} is at version {line['version']}, step {line['step']:,}"
    return f"{where}, merged by {short(line['owner'])}; tokens of {given or 'nobody'}"


def _merge(line: Line) -> str:
    cosine = "" if line["cosine"] is None else f", their mean cosine {line['cosine']:.2f}"
    given = "1 contribution" if line["contributors"] == 1 else f"{line['contributors']} contributions"
    return f"this peer merged version {line['version']} of shard {line['shard']} from {given}{cosine}"


def _progress(line: Line) -> str:
    loss = "" if line["loss"] is None else f", loss {words.loss(line['loss'])}"
    steps = "1 step" if line["steps"] == 1 else f"{line['steps']:,} steps"
    took = f"{line['step_time_s']:.2f} s a step, sent {words.volume(line['sent_bytes'])}"
    return f"step {line['step']:,}{loss}; {steps} and {words.amount(line['tokens'])} tokens in this life, {took}"


def _codec(line: Line) -> str:
    what = f"{line['direction']} of shard {line['shard']} in {line['codec']}"
    return f"{what}: {words.volume(line['bytes'])}, relative error {line['error']:.3f}"


def _fetched(line: Line) -> str:
    return f"shard {line['shard']} came, of version {line['version']}: {words.volume(line['bytes'])}"


_GOOD = {"join": "good", "finish": "good"}
_TOPICS = {
    "peers": "peers",
    "fork": "a fork healed",
    "repair": "the state here was altered, and is fetched again",
    "join": "the whole state is here",
    "stall": "a standstill",
    "takeover": "an owner is gone, another one takes its place",
    "commit": "a commit was not taken",
    "alone": "this peer merges alone",
    "stuck": "no new versions",
    "poisoned": "the learner gives nothing that can be used",
    "silent": "the learner does not answer",
    "finish": "the run is complete",
    "leave": "leaving",
    "merge": "a merge failed",
    "learner": "the learner",
    "fetch": "a state is fetched",
}
_WRITERS: dict[str, Callable[[Line], Sentence | None]] = {
    "started": lambda line: Sentence("info", "this peer starts" + (" anew" if line["is_new"] else " with its state")),
    "current": lambda line: Sentence("good", f"it has the whole model, at step {line['step']:,}"),
    "downloaded": lambda line: Sentence(
        "info", f"it downloaded {line['bytes'] / 1e6:,.1f} MB of state in {line['seconds']:.1f} s"
    ),
    "learner-ready": lambda line: Sentence("info", f"the learner is ready, on {line['device']}"),
    "learner-adopted": lambda line: Sentence("good", "the learner of this peer's last life goes on"),
    "learner-lost": lambda line: Sentence("error", f"the learner ended: {line['reason']}"),
    "learner-not-started": lambda line: Sentence("error", f"the learner cannot be started: {line['reason']}"),
    "learner-trouble": lambda line: Sentence("warning", f"the learner is in trouble, it goes on: {line['reason']}"),
    "learner-unable": lambda line: Sentence("error", f"nothing of the learner can be merged: {line['reason']}"),
    "learner-able": lambda line: Sentence("good", "what the learner trains can be merged again"),
    "checkpoint-failed": lambda line: Sentence("error", f"the checkpoint could not be written: {line['reason']}"),
    "checkpoint-good": lambda line: Sentence("info", "training goes on as before: the checkpoint before this is good"),
    "fault": lambda line: Sentence("warning", f"{short(line['peer'])} sent a {line['what']} against the rules"),
    "came": lambda line: Sentence("good", f"{short(line['peer'])} has come; {_live(line)}"),
    "went": lambda line: Sentence("warning", f"{short(line['peer'])} has gone; {_live(line)}"),
    "alert": lambda line: Sentence("good" if line["is_over"] else "error", line["text"]),
    "note": _note,
    "ended": _ended,
}
_DETAILS: dict[str, Callable[[Line], str]] = {
    "joining": lambda line: f"{line['shards']} of {line['of']} shards are to be downloaded: {_transfer(line)}",
    "transfer": _transfer,
    "fetched": _fetched,
    "peers": _live,
    "commit": _commit,
    "merge": _merge,
    "evaluation": lambda line: f"held-out loss {words.loss(line['loss'])}, step {line['step']:,}",
    "progress": _progress,
    "codec": _codec,
    "checkpoint": lambda line: (
        "the last checkpoint is on the disk" if line["is_last"] else "a checkpoint is on the disk"
    ),
    "sample": lambda line: f"step {line['step']:,}, the model writes: {line['text']}",
}
