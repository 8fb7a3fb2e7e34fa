"""The record book: the later expiry counts, and everything is bounded."""

from __future__ import annotations

from p2pdiloco.discovery.record_cache import RECORDS_LIMIT, TOPICS_LIMIT, RecordCache
from p2pdiloco.wire.directory_records import Envelope


def envelope(
    body: bytes = b"", *, expires_s: float, topic: str = "t", peer: str = "ann", is_withdrawn: bool = False
) -> Envelope:
    return Envelope(
        topic=topic, name="", peer=peer, expires_s=expires_s, addresses=(), is_withdrawn=is_withdrawn, body=body
    )


def bodies(book: RecordCache, now_s: float = 0.0, topic: str = "t") -> list[bytes]:
    return [entry.body for entry in book.current(topic, now_s)]


def test_the_later_expiry_counts_in_any_order() -> None:
    book = RecordCache()
    assert book.add(envelope(b"new", expires_s=20.0))
    assert not book.add(envelope(b"old", expires_s=10.0))
    assert bodies(book) == [b"new"]
    assert bodies(book, now_s=20.0) == []


def test_a_withdrawn_record_is_not_shown_and_hides_the_older_one() -> None:
    book = RecordCache()
    book.add(envelope(expires_s=20.0, is_withdrawn=True))
    book.add(envelope(b"old", expires_s=10.0))
    assert bodies(book) == []


def test_our_own_expiries_only_grow() -> None:
    book = RecordCache()
    assert book.next_expiry(("t", ""), 10.0) == 10.0
    assert book.next_expiry(("t", ""), 5.0) > 10.0


def test_our_own_are_published_again_until_they_expire_or_are_withdrawn() -> None:
    book = RecordCache()
    book.publish(envelope(b"mine", expires_s=10.0))
    assert [entry.body for entry in book.own(5.0)] == [b"mine"]
    assert book.own(10.0) == []
    book.publish(envelope(b"mine", expires_s=20.0))
    assert book.withdraw(("t", "/ann")) is not None
    assert book.withdraw(("t", "/ann")) is None
    assert book.own(0.0) == []


def test_the_book_is_bounded() -> None:
    book = RecordCache()
    for index in range(RECORDS_LIMIT + 5):
        book.add(envelope(expires_s=10.0, peer=f"peer{index}"))
    assert len(bodies(book)) == RECORDS_LIMIT
    for index in range(TOPICS_LIMIT + 5):
        book.add(envelope(expires_s=10.0, topic=f"topic{index}"))
    assert len(book._topics) == TOPICS_LIMIT


def test_of_two_records_that_expire_together_the_first_counts() -> None:
    """As in the DHT. Otherwise nodes that hear them in another order would replace them for ever."""
    book = RecordCache()
    assert book.add(envelope(b"first", expires_s=20.0))
    assert not book.add(envelope(b"second", expires_s=20.0))
    assert bodies(book) == [b"first"]
