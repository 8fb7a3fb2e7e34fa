"""Each kind of failed dial has a cause in words and a remedy of its own; an unknown one is repeated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2pdiloco.discovery import dht, directory

DIAL = "Connect failed. msg=failed to dial: failed to dial 12D3KooW: "


def test_what_the_daemon_says_becomes_a_cause_and_a_remedy() -> None:
    for said, what, remedy in (
        ("all dials failed * [/ip4/1.2.3.4/tcp/1] dial tcp4: connect: connection refused", "refused", "start it again"),
        ("no good addresses", "cannot be resolved", "correct the name"),
        ("all dials failed * connect: network is unreachable", "no route", "IPv6"),
        ("all dials failed * connect: no route to host", "no route", "IPv6"),
        ("all dials failed * i/o timeout", "no answer", "open or forward its port"),
        ("all dials failed * context deadline exceeded", "no answer", "open or forward its port"),
        ("dial to self attempted", "own address", "name another peer's"),
        ("all dials failed * failed to negotiate: peer id mismatch: expected", "another key", "prints now"),
    ):
        assert (
            what in directory.explain_failure(DIAL + said)[0],
            remedy in directory.explain_failure(DIAL + said)[1],
        ) == (
            True,
            True,
        )
    assert directory.explain_failure(DIAL + "a dragon") == ("failed to dial 12D3KooW: a dragon", directory.CHECK)
    assert directory.explain_failure("") == ("no answer", directory.CHECK)


def test_of_several_addresses_each_has_its_cause_and_a_remedy_is_said_once() -> None:
    said = directory.explain_failures({"/ip4/a": DIAL + "connection refused", "/ip4/b": DIAL + "connection refused"})
    assert said.count("connection refused") == 2
    assert said.count("start it again") == 1


WITHOUT_SHARED_MEMORY = """
import _multiprocessing
def full(*_, **__):
    raise OSError(28, "No space left on device")
_multiprocessing.SemLock = full
import p2pdiloco.discovery.dht
"""


def test_a_full_dev_shm_keeps_no_peer_from_starting() -> None:
    """hivemind makes a lock between processes when it is imported; before, a peer ended with its traceback."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_SHARED_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_records_that_are_stored_again_and_again_take_no_more_memory() -> None:
    """hivemind's heap of expirations grew with each read and each announcement, by 20 MB an hour in a node."""
    storage, later = dht.timed_storage.TimedStorage(), dht.CLOCK.now() + 3600.0
    for again in range(100):
        for key in "abc":
            storage.store(key, again, later + again)
            assert not storage.store(key, "older", later)
            assert not storage.store(key, "the same", later + again)
    assert dict(storage.items()) == dict.fromkeys("abc", (99, later + 99.0))
    assert len(storage.expiration_heap) < 50
    assert storage.top() == ("a", (99, later + 99.0))


def test_who_offers_an_older_value_does_not_make_the_newer_one_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, now = dht.timed_storage.TimedStorage(), dht.CLOCK.now()
    storage.store("key", "new", now + 100.0)
    storage.store("key", "old", now + 10.0)
    monkeypatch.setattr(dht.timed_storage, "get_dht_time", lambda: now + 50.0)
    assert storage.get("key") == ("new", now + 100.0)
