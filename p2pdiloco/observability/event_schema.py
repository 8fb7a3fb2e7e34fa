"""Event schema: the kinds of logged events, and a sentence for each that needs no knowledge of the code. Pure.

Rule of this file: a sentence is one line of at most ``LONGEST`` characters, whatever text of other peers it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from p2pdiloco.observability import formatting
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.util.logs import printable, short

LONGEST = 300
_ID = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{36,}\b")

# One line of the event log.
Line = dict[str, Any]


class Sentence(NamedTuple):
    """A sentence about an event. ``level`` as in ``snapshot.Headline``."""

    level: str
    text: str


def plain(text: object) -> str:
    """Return ``text`` as one printable line of limited length, with short names of peers."""
    named = _ID.sub(lambda found: short(found[0]), str(text)[: 4 * LONGEST])
    return printable(named)[:LONGEST]


def sentence(line: Line) -> Sentence | None:
    """Describe an event in a sentence; None if it is no news for people.

    Raises:
        KeyError: the event lacks a field.
    """
    write = _WRITERS.get(line["event"])
    found = None if write is None else write(line)
    return None if found is None else Sentence(found.level, plain(found.text))


def detail(line: Line) -> str | None:
    """Describe an event that is no news but is in the log; None if its kind is unknown.

    Raises:
        KeyError: the event lacks a field.
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
    left = "" if line["left_s"] is None else f", {formatting.duration(line['left_s'])} left"
    return f"{line['done_mb']:,.1f} of {line['of_mb']:,.1f} MB of state, {line['mb_per_s']:.1f} MB/s{left}"


def _commit(line: Line) -> str:
    tokens = {short(peer_of(LearnerId(learner))): n for learner, n in line["contributors"].items()}
    given = " and ".join(f"{peer} ({formatting.amount(n)})" for peer, n in tokens.items())
    where = f"shard {line['shard']} is at version {line['version']}, step {line['step']:,}"
    return f"{where}, merged by {short(line['owner'])}; tokens of {given or 'nobody'}"


def _merge(line: Line) -> str:
    cosine = "" if line["cosine"] is None else f", their mean cosine {line['cosine']:.2f}"
    given = "1 contribution" if line["contributors"] == 1 else f"{line['contributors']} contributions"
    return f"this peer merged version {line['version']} of shard {line['shard']} from {given}{cosine}"


def _progress(line: Line) -> str:
    loss = "" if line["loss"] is None else f", loss {formatting.loss(line['loss'])}"
    steps = "1 step" if line["steps"] == 1 else f"{line['steps']:,} steps"
    took = f"{line['step_time_s']:.2f} s a step, sent {formatting.volume(line['sent_bytes'])}"
    return f"step {line['step']:,}{loss}; {steps} and {formatting.amount(line['tokens'])} tokens in this life, {took}"


def _codec(line: Line) -> str:
    what = f"{line['direction']} of shard {line['shard']} in {line['codec']}"
    return f"{what}: {formatting.volume(line['bytes'])}, relative error {line['error']:.3f}"


_GOOD = {"join": "good", "finish": "good"}
_TOPICS = {
    "peers": "peers",
    "fork": "a fork healed",
    "repair": "corrupted state is fetched again",
    "join": "the whole state is here",
    "stall": "a standstill",
    "takeover": "an owner was lost, another one takes over",
    "commit": "a commit was rejected",
    "alone": "this peer merges alone",
    "stuck": "no new versions",
    "poisoned": "the learner's values cannot be used",
    "silent": "the learner does not answer",
    "finish": "the run is complete",
    "leave": "leaving",
    "merge": "a merge failed",
    "learner": "the learner",
    "fetch": "a state is fetched",
    "agreement": "contributions disagree",
    "equivocation": "an owner made two commits of one version",
    "wrong-merge": "an owner merged what nobody contributed",
    "audit": "an owner cannot be audited",
    "end": "the end of the run has moved",
    "going-back": "the model was ruined",
}
_WRITERS: dict[str, Callable[[Line], Sentence | None]] = {
    "started": lambda line: Sentence("info", "this peer starts" + ("" if line["is_new"] else " with its saved state")),
    "current": lambda line: Sentence("good", f"this peer has the whole model, at step {line['step']:,}"),
    "downloaded": lambda line: Sentence(
        "info", f"this peer downloaded {line['bytes'] / 1e6:,.1f} MB of state in {line['seconds']:.1f} s"
    ),
    "learner-ready": lambda line: Sentence("info", f"the learner is ready, on {line['device']}"),
    "learner-adopted": lambda line: Sentence("good", "this peer took over the learner of its previous process"),
    "learner-lost": lambda line: Sentence("error", f"the learner ended: {line['reason']}"),
    "learner-hung": lambda line: Sentence("error", line["reason"]),
    "learner-not-started": lambda line: Sentence("error", f"the learner cannot be started: {line['reason']}"),
    "learner-trouble": lambda line: Sentence("warning", f"the learner has a problem and continues: {line['reason']}"),
    "learner-unable": lambda line: Sentence("error", f"the learner's progress is not merged: {line['reason']}"),
    "learner-able": lambda line: Sentence("good", "the learner's progress is merged again"),
    "checkpoint-failed": lambda line: Sentence("error", f"the checkpoint could not be written: {line['reason']}"),
    "checkpoint-good": lambda line: Sentence(
        "info", "the previous checkpoint is marked as good: training continued normally after it"
    ),
    "fault": lambda line: Sentence("warning", f"{short(line['peer'])} sent a {line['what']} that breaks the rules"),
    "joined": lambda line: Sentence("good", f"{short(line['peer'])} joined; {_live(line)}"),
    "left": lambda line: Sentence("warning", f"{short(line['peer'])} left; {_live(line)}"),
    "alert": lambda line: Sentence("good" if line["is_over"] else "error", line["text"]),
    "note": _note,
    "ended": _ended,
}
_DETAILS: dict[str, Callable[[Line], str]] = {
    "joining": lambda line: f"{line['shards']} of {line['of']} shards are to be downloaded: {_transfer(line)}",
    "transfer": _transfer,
    "fetched": lambda line: (
        f"downloaded shard {line['shard']}, version {line['version']}: {formatting.volume(line['bytes'])}"
    ),
    "peers": _live,
    "commit": _commit,
    "merge": _merge,
    "evaluation": lambda line: f"held-out loss {formatting.loss(line['loss'])}, step {line['step']:,}",
    "progress": _progress,
    "codec": _codec,
    "end": lambda line: f"the run ends at step {line['last_step']:,}",
    "checkpoint": lambda line: "the last checkpoint is written" if line["is_last"] else "a checkpoint is written",
    "sample": lambda line: f"step {line['step']:,}, the model writes: {line['text']}",
}


# -- Event schema ------------------------------------------------------------------------------------------------------
# Contents of ``metrics.jsonl``: one JSON object a line, with these kinds and fields (docs/watching.md).
# Rules of this section:
# 1. Kinds and fields are only added. A reader skips what it does not know.
# 2. Each line has ``time`` (Unix time in seconds) and ``event`` (its kind).


Form = Literal["text", "integer", "number", "boolean", "tokens by learner"]


class Field(NamedTuple):
    """A field of an event: its name and form."""

    name: str
    form: Form
    or_null: bool = False


class Event(NamedTuple):
    """One kind of event."""

    name: str
    help: str
    fields: tuple[Field, ...]


def _fields(form: Form, names: str) -> tuple[Field, ...]:
    return tuple(Field(name, form) for name in names.split())


_TRANSFER = (*_fields("number", "done_mb of_mb mb_per_s"), Field("left_s", "number", True))
_REASON = _fields("text", "reason")
EVENTS = (
    Event("started", "a node starts", (*_fields("text", "peer run"), Field("is_new", "boolean"))),
    Event("ended", "a node ends, with this exit status", (Field("status", "integer"), *_REASON)),
    Event("current", "this peer holds the whole model", _fields("integer", "step")),
    Event("joining", "the download of the state begins", (*_fields("integer", "shards of"), *_TRANSFER)),
    Event("transfer", "progress of the download", _TRANSFER),
    Event("fetched", "a shard was downloaded", (*_fields("integer", "shard version bytes"), *_fields("text", "head"))),
    Event(
        "downloaded", "the whole state was downloaded", (*_fields("integer", "bytes"), *_fields("number", "seconds"))
    ),
    Event("peers", "number of live peers, with this one", _fields("integer", "live")),
    Event("joined", "a peer became live", (*_fields("text", "peer"), *_fields("integer", "live"))),
    Event("left", "a peer is no longer live", (*_fields("text", "peer"), *_fields("integer", "live"))),
    Event(
        "commit",
        "a shard version was applied; `tokens` is the total of the chain",
        (
            *_fields("integer", "shard version step tokens"),
            *_fields("text", "head owner"),
            Field("contributors", "tokens by learner"),
        ),
    ),
    Event(
        "merge",
        "this peer merged a version; `length` is its norm, `cosine` the mean between contributions",
        (
            *_fields("integer", "shard version contributors shortened"),
            Field("length", "number"),
            Field("cosine", "number", True),
        ),
    ),
    Event(
        "evaluation",
        "held-out loss that this peer shows: the newest that others support ([rule S3b](protocol.md#evaluation))",
        (*_fields("integer", "version tokens step"), Field("loss", "number")),
    ),
    Event(
        "progress",
        "the local learner, at most once a second; counts since the node started",
        (
            *_fields("integer", "step steps tokens sent_bytes"),
            Field("loss", "number", True),
            *_fields("number", "step_time_s compute_s overhead_s blocked_s node_cpu_s"),
        ),
    ),
    Event(
        "codec",
        "a payload was encoded; `error` is relative",
        (*_fields("text", "direction codec"), *_fields("integer", "shard bytes"), Field("error", "number")),
    ),
    Event("checkpoint", "a checkpoint was written", (Field("is_last", "boolean"),)),
    Event("checkpoint-failed", "a checkpoint could not be written", _REASON),
    Event("checkpoint-good", "the previous checkpoint is known to be good", (Field("loss", "number", True),)),
    Event(
        "learner-ready",
        "the learner has loaded the model",
        (*_fields("text", "learner device"), *_fields("integer", "parameters inner_steps")),
    ),
    Event("learner-adopted", "the learner of the previous node was taken over", _fields("integer", "pid")),
    Event("learner-hung", "the learner makes no steps; a node ends its own, and not a script", _REASON),
    Event("learner-lost", "the learner ended", (*_REASON, *_fields("integer", "status"))),
    Event(
        "learner-not-started",
        "the learner could not be started; retry after `pause_s`",
        (*_REASON, *_fields("number", "pause_s")),
    ),
    Event("learner-trouble", "the learner has a problem and continues", _REASON),
    Event("learner-unable", "the learner's progress cannot be merged", _REASON),
    Event("learner-able", "it can be merged again", ()),
    Event("fault", "another peer broke a rule", _fields("text", "peer what")),
    Event("end", "the run was prolonged", _fields("integer", "last_step")),
    Event("note", "a message of the protocol", _fields("text", "level topic text")),
    Event(
        "alert",
        "an alert began or ended",
        (*_fields("text", "kind text"), Field("is_over", "boolean")),
    ),
    Event("sample", "text that the model generated", (*_fields("integer", "step"), *_fields("text", "text"))),
)
BY_NAME = {event.name: event for event in EVENTS}
