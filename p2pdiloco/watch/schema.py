"""What stands in ``metrics.jsonl``: one JSON object a line, of these kinds, with these fields (docs/watching.md).

Rules of this file:
1. Kinds and fields are only added. A reader leaves out what it does not know.
2. Each line has ``time`` (Unix time in seconds) and ``event`` (its kind).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Form = Literal["text", "whole", "number", "yes or no", "tokens by learner"]
FORMS: dict[Form, tuple[type, ...]] = {
    "text": (str,),
    "whole": (int,),
    "number": (int, float),
    "yes or no": (bool,),
    "tokens by learner": (dict,),
}


class Field(NamedTuple):
    """Of an event."""

    name: str
    form: Form
    or_null: bool = False


class Event(NamedTuple):
    """One kind."""

    name: str
    help: str
    fields: tuple[Field, ...]


def _fields(form: Form, names: str, *, or_null: bool = False) -> tuple[Field, ...]:
    return tuple(Field(name, form, or_null) for name in names.split())


_TRANSFER = (*_fields("number", "done_mb of_mb mb_per_s"), Field("left_s", "number", True))
_REASON = _fields("text", "reason")
EVENTS = (
    Event("started", "a node's life begins", (*_fields("text", "peer run"), Field("is_new", "yes or no"))),
    Event("ended", "and ends, with this exit status", (Field("status", "whole"), *_REASON)),
    Event("current", "this peer holds the whole model", _fields("whole", "step")),
    Event("joining", "a newcomer begins to download state", (*_fields("whole", "shards of"), *_TRANSFER)),
    Event("transfer", "how far the download is", _TRANSFER),
    Event("fetched", "a shard's state came", (*_fields("whole", "shard version bytes"), *_fields("text", "head"))),
    Event("downloaded", "all of it came", (*_fields("whole", "bytes"), *_fields("number", "seconds"))),
    Event("peers", "so many peers are live, this one included", _fields("whole", "live")),
    Event("came", "a peer is live", (*_fields("text", "peer"), *_fields("whole", "live"))),
    Event("went", "a peer is live no more", (*_fields("text", "peer"), *_fields("whole", "live"))),
    Event(
        "commit",
        "a new version of a shard is applied here; ``tokens`` are the chain's",
        (
            *_fields("whole", "shard version step tokens"),
            *_fields("text", "head owner"),
            Field("contributors", "tokens by learner"),
        ),
    ),
    Event(
        "merge",
        "this peer merged a version, so long; ``cosine`` is the contributions' mean, null of one",
        (
            *_fields("whole", "shard version contributors shortened"),
            Field("length", "number"),
            Field("cosine", "number", True),
        ),
    ),
    Event(
        "evaluation",
        "held-out loss of the model, the median over members",
        (*_fields("whole", "version tokens step"), Field("loss", "number")),
    ),
    Event(
        "progress",
        "this peer's learner, once a second at most; amounts are of this life of the node",
        (
            *_fields("whole", "step steps tokens sent_bytes"),
            Field("loss", "number", True),
            *_fields("number", "step_time_s compute_s blocked_s"),
        ),
    ),
    Event(
        "codec",
        "a payload was encoded; ``error`` is relative",
        (*_fields("text", "direction codec"), *_fields("whole", "shard bytes"), Field("error", "number")),
    ),
    Event("checkpoint", "a checkpoint is on the disk", (Field("is_last", "yes or no"),)),
    Event("checkpoint-failed", "none could be written", _REASON),
    Event("checkpoint-good", "the one before the newest is known to be good", (Field("loss", "number", True),)),
    Event(
        "learner-ready",
        "a learner has loaded the model",
        (*_fields("text", "learner device"), *_fields("whole", "parameters inner_steps")),
    ),
    Event("learner-adopted", "the learner of the node's last life goes on", _fields("whole", "pid")),
    Event("learner-lost", "the learner ended", (*_REASON, *_fields("whole", "status"))),
    Event(
        "learner-not-started",
        "no learner could be started; the next try is after a pause",
        (*_REASON, *_fields("number", "pause_s")),
    ),
    Event("learner-trouble", "the learner is in trouble, it goes on", _REASON),
    Event("learner-unable", "nothing of the learner can be merged", _REASON),
    Event("learner-able", "it can again", ()),
    Event("fault", "another peer broke the rules", _fields("text", "peer what")),
    Event("note", "what the protocol says of itself", _fields("text", "level topic text")),
    Event(
        "alert",
        "for a person (see above)",
        (*_fields("text", "kind text"), Field("is_over", "yes or no")),
    ),
    Event("sample", "a text that the model wrote", (*_fields("whole", "step"), *_fields("text", "text"))),
)
BY_NAME = {event.name: event for event in EVENTS}


def faults_of(line: dict[str, Any]) -> Iterable[str]:
    """What in a line is not as it stands here."""
    event = BY_NAME.get(line.get("event", ""))
    if event is None:
        yield f"unknown kind {line.get('event')!r}"
        return
    told = {name: value for name, value in line.items() if name not in ("time", "event")}
    if not isinstance(line.get("time"), int | float):
        yield f"{event.name}: no time"
    yield from (f"{event.name}: unknown field {name}" for name in told.keys() - {field.name for field in event.fields})
    for field in event.fields:
        value = told.get(field.name, ...)
        if value is ...:
            yield f"{event.name}: no field {field.name}"
        elif not (value is None and field.or_null) and not _has_form(value, field.form):
            yield f"{event.name}: {field.name} is {type(value).__name__}, not {field.form}"


def _has_form(value: object, form: Form) -> bool:
    return isinstance(value, FORMS[form]) and (form == "yes or no" or not isinstance(value, bool))


def described(field: Field) -> str:
    """As the document names it."""
    return f"`{field.name}` ({field.form}{', or null' if field.or_null else ''})"
