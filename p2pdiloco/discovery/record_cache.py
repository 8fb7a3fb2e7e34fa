"""Cache of the directory records that this peer has read or published.

Rules of this file:
1. If one publisher has two records in one place, the one that expires later wins, as in the DHT. So the expiry times of
   this peer's own records only grow.
2. The number of topics and of records per topic is bounded. Expired records are dropped when their topic is read.
"""

from __future__ import annotations

from p2pdiloco.wire.directory_records import Envelope, subkey_of

# Maximum number of records to keep and return per topic.
RECORDS_LIMIT = 4096
TOPICS_LIMIT = 512

# Where a record stands in the DHT: topic and subkey.
Place = tuple[str, str]


class RecordCache:
    """Cache of records by topic and subkey. Times are seconds since 1970."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, Envelope]] = {}
        self._own: dict[Place, Envelope] = {}
        self._last_expiry_s: dict[Place, float] = {}

    def add(self, envelope: Envelope) -> bool:
        """Keep a record that was read or published. Return whether it is new or newer than the known one."""
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
        """Remove the cached record in the place of ``envelope``, which replaces it and is not accepted."""
        self._topics.get(envelope.topic, {}).pop(subkey_of(envelope), None)

    def current(self, topic: str, now_s: float) -> list[Envelope]:
        """Return the records under ``topic`` that are neither expired nor withdrawn."""
        alive = {key: entry for key, entry in self._topics.get(topic, {}).items() if entry.expires_s > now_s}
        if topic in self._topics:
            self._topics[topic] = alive
        return [entry for entry in alive.values() if not entry.is_withdrawn]

    def next_expiry(self, place: Place, expires_s: float) -> float:
        """Return ``expires_s``, or a slightly later time if the DHT would otherwise prefer the previous record."""
        self._last_expiry_s[place] = max(expires_s, self._last_expiry_s.get(place, 0.0) + 0.001)
        return self._last_expiry_s[place]

    def publish(self, envelope: Envelope) -> None:
        """Keep a record of this peer, so that it can be published again if the DHT node restarts."""
        self.add(envelope)
        if not envelope.is_withdrawn:
            self._own[envelope.topic, subkey_of(envelope)] = envelope

    def withdraw(self, place: Place) -> Envelope | None:
        """Forget a record of this peer, and return it if there was one."""
        return self._own.pop(place, None)

    def own(self, now_s: float) -> list[Envelope]:
        """Return this peer's records that have not expired."""
        self._own = {place: entry for place, entry in self._own.items() if entry.expires_s > now_s}
        return list(self._own.values())
