"""The status pipe: every message arrives as it was sent; neither side depends on the other's good behaviour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.cli import main as cli
from p2pdiloco.node import learner_process
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import (
    LINE_BYTES,
    Exited,
    Farewell,
    Invited,
    Listening,
    PageAt,
    StatusMessage,
    StatusPipeError,
    StatusWriter,
    opened,
)

MESSAGES: list[StatusMessage] = [
    Listening(("/ip4/192.0.2.1/tcp/1/p2p/x", "/ip6/::1/tcp/1/p2p/x")),
    Invited("p2pdilocoABC", "p2pdiloco join p2pdilocoABC", file="/state/members/invite"),
    PageAt("http://127.0.0.1:7373/?token=secret", token_file="/state/page.token"),
    Farewell("run story is complete:\n  model folder  /state/é"),
    Exited(3, "nobody answers:\n\u2028 1. a run\x1b"),
]


def attached(fd: int) -> StatusWriter:
    """A writer with a descriptor of its own, as a child has one."""
    writer = StatusWriter()
    writer.attach(os.dup(fd))
    return writer


def test_a_path_that_is_no_text_is_reported_without_its_bytes() -> None:
    with opened() as (reader, fd):
        attached(fd).report(Farewell(f"model folder  /{os.fsdecode(bytes([233]))}"))
    assert reader.find(Farewell) == Farewell("model folder  /?")


def test_messages_arrive_as_they_were_sent_and_then_the_end() -> None:
    with opened() as (reader, fd):
        writer = attached(fd)
    assert reader.poll() == []
    for number, message in enumerate(MESSAGES, 1):
        writer.report(message)
        assert reader.poll() == MESSAGES[:number]
    writer.close()
    assert reader.find(PageAt) == MESSAGES[2]
    with pytest.raises(StatusPipeError, match=r"the process ended: nobody answers"):
        reader.wait_for(_Other, 60.0)


class _Other(StatusMessage, frozen=True):
    """Never sent."""


def test_the_first_message_of_a_kind_is_waited_for_until_a_deadline() -> None:
    with opened() as (reader, fd):
        writer = attached(fd)
        threading.Timer(0.05, lambda: [writer.report(message) for message in MESSAGES]).start()
        assert reader.wait_for(Invited, 60.0) == MESSAGES[1]
    began = time.monotonic()
    with pytest.raises(StatusPipeError, match=r"no _Other within 0.05 s"):
        reader.wait_for(_Other, 0.05)
    assert time.monotonic() - began < 10.0


def test_a_process_without_a_pipe_reports_nothing() -> None:
    StatusWriter().report(MESSAGES[0])
    StatusWriter().report_exit(1, "an error")


def test_a_parent_that_closes_the_pipe_or_never_reads_it_stops_the_reports_alone() -> None:
    for is_closed in (True, False):
        with opened() as (reader, fd):
            writer = attached(fd)
        if is_closed:
            reader.close()
        for number in range(2000):
            writer.report(PageAt(f"http://127.0.0.1/{number}" + "x" * 100))
        writer.report(MESSAGES[0])
        found = reader.poll()
        assert found == [] if is_closed else len(found) == status_pipe.MOST_MESSAGES
        assert MESSAGES[0] not in found
        with pytest.raises(StatusPipeError, match="the process ended"):
            reader.wait_for(Listening, 60.0)


def test_what_is_no_message_and_what_is_too_long_is_passed_over() -> None:
    long = msgspec.json.encode(PageAt("x" * LINE_BYTES)) + b"\n"
    with opened() as (reader, fd):
        writer = attached(fd)
        for data in (b"not json\n", b'{"type":"Unknown"}\n', b'{"type":"Exited","status":"x"}\n', b"\xff\xfe\n\n"):
            os.write(fd, data)
        for piece in (long[:10], long[10:LINE_BYTES], long[LINE_BYTES:]):
            os.write(fd, piece)
            assert reader.poll() == []
        writer.report(PageAt("x" * LINE_BYTES))
        for message in MESSAGES:
            writer.report(message)
        writer.report_exit(1, "y" * 10 * LINE_BYTES)
    *first, last = reader.poll()
    assert first == MESSAGES
    assert isinstance(last, Exited)
    assert last.reason
    assert set(last.reason) == {"y"}


def test_a_reader_that_is_dropped_keeps_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with opened() as (reader, _fd):
            pass
    del reader
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="no child"), opened():
        raise ValueError("no child")
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_option_is_taken_off_any_command_line_and_its_pipe_passes_to_no_further_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_pipe, "writer", StatusWriter())
    with opened() as (reader, fd):
        own = os.dup(fd)
        os.set_inheritable(own, True)
        rest = cli._attach_status_pipe(["start", "--bootstrap", "a", "b", "--status-fd", str(own), "--", "c"])
        assert rest == ["start", "--bootstrap", "a", "b", "--", "c"]
        assert not os.get_inheritable(own)
    with pytest.raises(SystemExit):
        cli.main(["start", "stdlib-tiny", "--upp", "3"])
    assert reader.poll() == [Exited(2, "there is no option --upp: did you mean --up?")]
    assert "see p2pdiloco start --help" in capsys.readouterr().err, "a person is told as ever"
    for wrong in ("x", "999"):
        with pytest.raises(SystemExit):
            cli.main(["members", "--status-fd", wrong])
        assert f"--status-fd{'' if wrong == 'x' else ' 999'}: " in capsys.readouterr().err
    status_pipe.writer.close()


@pytest.mark.heavy
def test_a_learner_that_outlives_its_node_does_not_keep_the_pipe_open(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StatusWriter()
    monkeypatch.setattr(status_pipe, "writer", writer)
    with opened() as (reader, fd):
        writer.attach(os.dup(fd))
    learner_process.bear()
    learner = learner_process.take()
    assert learner is not None
    writer.report(MESSAGES[2])
    writer.close()
    try:
        with pytest.raises(StatusPipeError, match="the process ended"):
            reader.wait_for(Exited, 20.0)
    finally:
        learner.ours.close()


@pytest.mark.heavy
def test_a_bootstrap_node_reports_its_addresses_and_prints_what_a_person_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "p2pdiloco", "bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0"]
    command += ["--state", str(tmp_path)]
    with opened() as (reader, fd):
        process = subprocess.Popen(
            [*command, status_pipe.OPTION, str(fd)], pass_fds=(fd,), stdout=subprocess.PIPE, text=True
        )
    try:
        listening = reader.wait_for(Listening, 60.0)
        assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in listening.addresses)
        reader.close()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 0, "it does not depend on its reader"
    assert printed == f"{listening}\n"
    assert f"\n  p2pdiloco join {listening.addresses[0]}\n" in printed


def test_what_is_printed_where_no_terminal_is_holds_no_secret() -> None:
    for message, secret, place in ((MESSAGES[1], "ABC", "members/invite"), (MESSAGES[2], "secret", "page.token")):
        assert secret in str(message)
        assert secret not in message.public.replace("(it is secret", "")
        assert place in message.public
    assert Invited("/ip4/192.0.2.1", "p2pdiloco join /ip4/192.0.2.1").public.endswith("join /ip4/192.0.2.1")
    assert PageAt("http://127.0.0.1:7373").public == "look at  http://127.0.0.1:7373"
