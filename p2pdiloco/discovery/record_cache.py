"""Cache of directory records: those that this peer has read, and those that it has published.

Rules of this file:
1. Of two records of one publisher in one place, the one that expires later counts, as in the DHT. So the expiries of
   this peer's own records only grow.
2. Topics and records per topic are bounded. Expired records are dropped when their topic is read.
"""

from __future__ import annotations

from p2pdiloco.wire.directory_records import Envelope, subkey_of

RECORDS_LIMIT = 4096
"""Records that are kept and returned, per topic."""
TOPICS_LIMIT = 64

Place = tuple[str, str]
"""Topic and subkey."""


class RecordCache:
    """See the module's rules. Times are seconds since 1970."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, Envelope]] = {}
        self._own: dict[Place, Envelope] = {}
        self._last_expiry_s: dict[Place, float] = {}

    def add(self, envelope: Envelope) -> bool:
        """Keep a record that was read or published; whether it is news."""
        if envelope.topic not in self._topics and len(self._topics) >= TOPICS_LIMIT:
            del self._topics[next(iter(self._topics))]
        known = self._topics.setdefault(envelope.topic, {})
        old = known.get(subkey_of(envelope))
        if old is None and len(known) >= RECORDS_LIMIT:
            return False
        if old is not None and old.expires_s >= envelope.expires_s:
            return False
        known[subkey_of(envelope)] = envelope
        return True

    def drop(self, envelope: Envelope) -> None:
        """Remove the record of that publisher in that place: the new one is not accepted."""
        self._topics.get(envelope.topic, {}).pop(subkey_of(envelope), None)

    def current(self, topic: str, now_s: float) -> list[Envelope]:
        """Records under ``topic`` that are neither expired nor withdrawn."""
        alive = {key: entry for key, entry in self._topics.get(topic, {}).items() if entry.expires_s > now_s}
        if topic in self._topics:
            self._topics[topic] = alive
        return [entry for entry in alive.values() if not entry.is_withdrawn]

    def next_expiry(self, place: Place, expires_s: float) -> float:
        """``expires_s``, or slightly later if the DHT would prefer the last record otherwise."""
        self._last_expiry_s[place] = max(expires_s, self._last_expiry_s.get(place, 0.0) + 0.001)
        return self._last_expiry_s[place]

    def publish(self, envelope: Envelope) -> None:
        """Keep a record of this peer, to be published again if the DHT node restarts."""
        self.add(envelope)
        if not envelope.is_withdrawn:
            self._own[envelope.topic, subkey_of(envelope)] = envelope

    def withdraw(self, place: Place) -> Envelope | None:
        """Forget a record of this peer, and return it if there was one."""
        return self._own.pop(place, None)

    def own(self, now_s: float) -> list[Envelope]:
        """Records of this peer that have not expired."""
        self._own = {place: entry for place, entry in self._own.items() if entry.expires_s > now_s}
        return list(self._own.values())
