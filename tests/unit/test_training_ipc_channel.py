"""The learner's end of the link, at real sockets."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire import learner_ipc

HIGH = 1500
"""A descriptor beyond what ``select`` takes."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft <= HIGH:
        if hard != resource.RLIM_INFINITY and hard <= HIGH:
            pytest.skip(f"this user may have {hard} descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (HIGH + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_node_with_many_connections_has_a_learner(many_descriptors: None) -> None:
    node, theirs = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, HIGH))
    theirs.close()
    with node, high:
        channel = Channel(high)
        node.sendall(learner_ipc.encode(learner_ipc.Pause()))
        channel.wait(10.0)
        assert channel.exchange() == [learner_ipc.Pause()]
        channel.post(learner_ipc.Failed(reason="x" * 1000))
        assert channel.flush(10.0)
        decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        assert decoder.feed(node.recv(1 << 16)) == [learner_ipc.Failed(reason="x" * 1000)]


def test_who_waits_to_write_to_a_node_that_dies_does_not_wait_for_ever() -> None:
    node, ours = socket.socketpair()
    with ours:
        channel = Channel(ours)
        while len(channel.exchange()) == 0 and len(channel._outgoing) < 1 << 20:
            channel.post(learner_ipc.Failed(reason="x" * 1000))
        dying = threading.Timer(0.05, node.close)
        dying.start()
        began = time.monotonic()
        assert not channel.flush(60.0)
        assert channel.is_closed
        assert time.monotonic() - began < 30.0
        dying.join()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a process holds")
def test_what_nobody_closed_holds_no_descriptor() -> None:
    """A learner has a channel for each life of its node, a process of tests thousands of both."""
    before = descriptors()
    node, ours = socket.socketpair()
    channel, vectors = Channel(ours), SharedVectors.create(1000)
    channel.exchange()
    assert descriptors() > before
    vectors.close()
    vectors.close()
    del channel, vectors, node, ours
    assert descriptors() == before
    unclosed = SharedVectors.create(1000)
    del unclosed
    assert descriptors() == before
