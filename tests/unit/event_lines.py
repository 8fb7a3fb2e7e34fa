"""Whether a line of an event log is as the schema says, and how docs/watching.md describes an event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2pdiloco.observability.event_schema import BY_NAME, Event, Form

FORMS: dict[Form, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "tokens by learner": (dict,),
}


def faults_of(line: dict[str, Any]) -> Iterable[str]:
    """Yield the ways in which a line differs from this schema."""
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
    return isinstance(value, FORMS[form]) and (form == "boolean" or not isinstance(value, bool))


def described(event: Event) -> str:
    """Return the field as the documentation describes it."""
    groups: dict[str, list[str]] = {}
    for field in event.fields:
        groups.setdefault(f"{field.form}{' or null' if field.or_null else ''}", []).append(f"`{field.name}`")
    return "; ".join(f"{form}: {', '.join(names)}" for form, names in groups.items()) or "-"
