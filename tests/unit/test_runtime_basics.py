"""Addresses, logs, atomic files, the address book and the task nursery."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from p2pdiloco.discovery.directory import ADDRESS_LIMIT, ENTRY_LIMIT, AddressBook, save
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.addresses import of_socket, parse
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.util import tasks as tasks_module
from p2pdiloco.util.files import LOCAL, SECTOR_BYTES, STAGING_BYTES, write_atomically
from p2pdiloco.util.tasks import Tasks
from tests.integration.waiting import until

PEER = Identity.ephemeral().peer_id


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/203.0.113.7/tcp/4100",
        "/ip6/::1/tcp/0",
        "/dns/example.org/tcp/1",
        pytest.param(f"/dns4/example.org/tcp/65535/p2p/{PEER}", id="with a peer"),
    ],
)
def test_addresses_come_back_as_written(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("203.0.113.7:4100", "/ip4/203.0.113.7/tcp/4100"),
        ("[::1]:4100", "/ip6/::1/tcp/4100"),
        ("example.org:4100", "/dns/example.org/tcp/4100"),
        ("", "write it as"),
        ("/ip4/203.0.113.7/udp/4100", "not a usable TCP address"),
        ("/ip4/203.0.113.700/tcp/4100", "not a multiaddr"),
        ("/ip4/203.0.113.7/tcp/70000", "not a multiaddr"),
        ("/ip4/203.0.113.7/tcp/1/p2p/nobody", "not a multiaddr"),
        ("/dns/" + "a" * 600 + "/tcp/1", "at most 512"),
    ],
)
def test_a_wrong_address_says_how_to_write_it(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.").replace("[", r"\[")):
        parse(text)


def test_ipv4_in_ipv6_is_written_as_ipv4() -> None:
    assert str(of_socket("::ffff:192.0.2.1", 5)) == "/ip4/192.0.2.1/tcp/5"


def test_log_lines_cannot_be_forged_by_a_peer() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    logs.get("test").info("connected", peer=PEER, reason="ok\n2026 error fake", share=0.123456789)
    logs.get("test").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert f"peer={PEER[-6:]}" in line
    assert 'reason="ok\\n2026 error fake"' in line
    assert "share=0.123457" in line


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_log_line_has_nothing_that_a_terminal_obeys(format: logs.LogFormat) -> None:
    stream, said = io.StringIO(), "\x9b2J\x7f\x85\u2028\u202e\x1b]0;me\x07\U000e0041 café"
    logs.configure("info", format, stream)
    logs.get("test").info("refused", peer=PEER, reason=said)
    line = stream.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert "café" in line
    quoted = line[line.index('"reason"') + 9 :] if format == "json" else line[line.index("reason=") + 7 :]
    assert json.JSONDecoder().raw_decode(quoted.strip())[0] == said, "nothing is lost"


class Terminal(io.StringIO):
    """Somebody watches."""

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_lines_are_short_and_cannot_be_forged_either() -> None:
    stream = Terminal()
    logs.configure("info", "text", stream)
    logs.get("test").info("connected", peer=PEER, reason="ok\n2026 error fake")
    logs.get("test").warning("gone", count=3)
    first, second = stream.getvalue().splitlines()
    assert first[8:] == f' connected peer={PEER[-6:]} reason="ok\\n2026 error fake"'
    assert second[8:] == " warning: gone count=3"
    assert first[2] == first[5] == ":", "the time of day"


def test_json_log_lines_are_objects_with_full_ids() -> None:
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    logs.get("test").warning("gone", peer=PEER, count=3)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["peer"], line["count"], line["level"]) == ("gone", PEER, 3, "warning")


def test_log_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="use one of debug"):
        logs.configure("loud")
    with pytest.raises(ValueError, match="text or json"):
        logs.configure("info", "xml")  # type: ignore[arg-type]


def test_a_file_is_replaced_whole_and_nothing_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"one")
    write_atomically(path, memoryview(b"two"))
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(OSError):
        write_atomically(tmp_path / "new", b"a folder is in the way")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new"]


@pytest.mark.parametrize("size", [0, 1, SECTOR_BYTES, STAGING_BYTES, 2 * STAGING_BYTES + 33])
@pytest.mark.parametrize("most", [SECTOR_BYTES + 1000, 2 * STAGING_BYTES])
def test_a_file_holds_its_parts_whatever_the_disk_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    """The kernel's cache is passed by, which takes whole sectors only; and a disk may take less than it is given."""
    data, write = os.urandom(size), os.write
    monkeypatch.setattr(os, "write", lambda to, given: write(to, given[:most]))
    LOCAL.write(tmp_path / "new" / "file", [data[: size // 3], b"", memoryview(data)[size // 3 :]])
    LOCAL.append(tmp_path / "new" / "file", b"more")
    assert (tmp_path / "new" / "file").read_bytes() == data + b"more"
    LOCAL.write(tmp_path / "new" / "file", [b"shorter"])
    assert LOCAL.read(tmp_path / "new" / "file", 1, 3) == b"hor"


@pytest.mark.parametrize("size", [1, SECTOR_BYTES, STAGING_BYTES + 33])
def test_what_is_put_into_a_file_leaves_the_rest_as_it_is(tmp_path: Path, size: int) -> None:
    """In any order, and again; the folder and the file are made."""
    path, room = tmp_path / "new" / "file", -(-size // SECTOR_BYTES) * SECTOR_BYTES
    pieces = [os.urandom(size) for _ in range(3)]
    for at in (2, 0, 1):
        LOCAL.put(path, at * room, pieces[at])
    pieces[1] = os.urandom(size)
    LOCAL.put(path, room, memoryview(pieces[1]))
    assert [LOCAL.read(path, at * room, size) for at in range(3)] == pieces
    assert path.stat().st_size == 3 * room


def test_the_address_book_is_bounded_and_survives_a_restart(tmp_path: Path) -> None:
    book = AddressBook()
    peers = [PeerId(f"peer{index}") for index in range(ENTRY_LIMIT + 10)]
    for peer in peers:
        book.add(peer, [f"/ip4/10.0.0.1/tcp/{port}" for port in range(1, 9)])
    assert len(book) == ENTRY_LIMIT
    assert book.peers()[0] == peers[-1]
    assert len(book.addresses_of(peers[-1])) == ADDRESS_LIMIT
    save(tmp_path / "cache.json", book.encode())
    again = AddressBook()
    again.load(tmp_path / "cache.json")
    assert again.peers() == book.peers()
    assert again.addresses_of(peers[-1]) == book.addresses_of(peers[-1])


@pytest.mark.parametrize("content", [b"", b"{", b'[{"peer": 1}]', b"[" * 100000])
def test_a_damaged_cache_is_as_if_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache").write_bytes(content)
    book = AddressBook()
    book.load(tmp_path / "cache")
    assert len(book) == 0


def test_the_address_book_skips_what_it_cannot_use() -> None:
    book = AddressBook()
    other = Identity.ephemeral().peer_id
    book.add(
        PEER, ["nonsense", f"/ip4/1.2.3.4/tcp/5/p2p/{other}", "/ip4/1.2.3.4/tcp/0", f"/ip4/1.2.3.4/tcp/6/p2p/{PEER}"]
    )
    assert book.addresses_of(PEER) == ["/ip4/1.2.3.4/tcp/6"]
    assert addresses.parse(book.addresses_of(PEER)[0]).peer is None


def test_tasks_end_with_their_owner_and_a_failure_is_logged() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        raise KeyError("oops")

    async def main() -> None:
        async with Tasks() as tasks:
            tasks.spawn(forever(), name="forever")
            failing = tasks.spawn(fail(), name="failing")
            await asyncio.wait([failing], timeout=5)
            await asyncio.sleep(0)
            assert len(tasks) == 1

    asyncio.run(main())
    assert ended == ["cancelled"]
    assert "task=failing" in stream.getvalue()
    assert "oops" in stream.getvalue()


def test_a_task_that_is_kept_is_told_of_when_it_fails_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    monkeypatch.setattr(tasks_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks_module, "SOUND_S", 0.05)
    told: list[dict[str, str]] = []

    async def main() -> None:
        runs = asyncio.Event()

        async def work() -> None:
            told.append(dict(tasks.troubles))
            if len(told) < 4:
                raise KeyError(f"oops {len(told)}")
            runs.set()
            await asyncio.Event().wait()

        async with Tasks() as tasks:
            kept = tasks.keep(work, name="work")
            await asyncio.wait_for(runs.wait(), 10.0)
            assert (
                "the task work of this peer failed and is started again (KeyError('oops 3'))" in tasks.troubles["work"]
            )
            await until(lambda: not tasks.troubles, what="the end of the trouble, as it runs")
            assert not kept.done()
        assert kept.cancelled()

    asyncio.run(main())
    assert told[0] == {}
    assert ["oops 1" in told[1]["work"], "oops 2" in told[2]["work"]] == [True, True]
    assert stream.getvalue().count("task failed, starting it again") == 3
    assert "Traceback" in stream.getvalue()


def test_a_task_that_has_run_well_for_long_is_started_again_as_soon_as_after_its_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    monkeypatch.setattr(tasks_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks_module, "SOUND_S", 0.02)

    async def main() -> None:
        lives, is_sound = [0], asyncio.Event()

        async def work() -> None:
            lives[0] += 1
            if lives[0] == 3:
                await until(lambda: not tasks.troubles, what="the end of the trouble")
            if lives[0] == 4:
                is_sound.set()
                await asyncio.Event().wait()
            raise KeyError("oops")

        async with Tasks() as tasks:
            tasks.keep(work, name="work")
            await asyncio.wait_for(is_sound.wait(), 10.0)

    asyncio.run(main())
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["pause_s"] for line in told if "pause_s" in line] == [0.001, 0.002, 0.001]


def test_a_task_that_swallows_its_cancellation_is_named_and_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a peer that leaves would never end."""
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    monkeypatch.setattr(tasks_module, "UNWILLING_S", 0.01)

    async def main() -> None:
        async def work() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        async with Tasks() as tasks:
            tasks.spawn(work(), name="stubborn")
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 10.0))
    assert '"tasks": "stubborn"' in stream.getvalue()


def test_what_is_kept_and_comes_to_its_end_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "FIRST_PAUSE_S", 0.001)
    lives = []

    async def main() -> None:
        async def work() -> None:
            lives.append(1)
            if len(lives) == 1:
                raise OSError("once")

        async with Tasks() as tasks:
            await asyncio.wait_for(tasks.keep(work, name="work"), 10.0)
            assert not tasks.troubles

    asyncio.run(main())
    assert len(lives) == 2
