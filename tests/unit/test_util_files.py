"""The last few files of a kind are kept, within a bound; file systems that lack locks; other users of the machine."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.discovery.p2pd import SocketFolder
from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.checkpoint import CheckpointError
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.training.optimizer_state import InnerStateError, InnerStateFile
from p2pdiloco.training.parameters import read_buffers
from p2pdiloco.transport.identity import Identity, IdentityError
from p2pdiloco.util import files
from p2pdiloco.util.files import (
    LOCAL,
    LockedError,
    lock,
    make_private_folder,
    make_state_folder,
    older,
    open_regular,
    read_regular,
    rotate,
    write_atomically,
)


def texts(path: Path) -> list[str]:
    return [other.read_text() for other in older(path)]


def test_the_newest_few_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rotate(path, keep=3, most_bytes=100)
    assert older(path) == []
    for word in ("one", "two", "three", "four", "five"):
        path.write_text(word)
        rotate(path, keep=3, most_bytes=100)
        assert not path.exists()
    assert texts(path) == ["three", "four", "five"]
    assert older(tmp_path / "other.jsonl") == []


def test_they_stay_within_the_bound_but_for_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "learner.log"
    for size in (10, 20, 30):
        path.write_text("x" * size)
        rotate(path, keep=3, most_bytes=55)
    assert [len(text) for text in texts(path)] == [20, 30]
    path.write_text("x" * 1000)
    rotate(path, keep=3, most_bytes=55)
    assert [len(text) for text in texts(path)] == [1000]


class LackingDisk:
    """Below ``folder``, locks fail with ``lacks``, and the sync of a folder with EINVAL, as on Lustre, gcsfuse, 9p."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.lacks = folder, errno.ENOSYS
        for owner, name in ((fcntl, "flock"), (fcntl, "lockf"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), is_sync=name == "fsync"))

    def _failing(self, whole: Any, *, is_sync: bool) -> Any:
        def called(descriptor: int, *arguments: object) -> object:
            place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            if place.is_relative_to(self.folder) and (is_folder or not is_sync):
                raise OSError(errno.EINVAL if is_sync else self.lacks, "lacking")
            return whole(descriptor, *arguments)

        return called


@pytest.fixture
def lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LackingDisk:
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    monkeypatch.setattr(files, "_without_locks", set())
    return LackingDisk(tmp_path / "shared", monkeypatch)


@pytest.mark.parametrize("lacks", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("is_inherited", [True, False])
def test_without_locks_one_process_of_this_machine_has_a_folder_and_a_warning_says_so_once(
    lacking: LackingDisk, lacks: int, is_inherited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lacking.lacks = lacks
    identity = Identity.load_or_create(lacking.folder / "identity.key")
    with identity.hold():
        used = pytest.raises(IdentityError, match=rf"in use by another peer on this machine \(process {os.getpid()}\)")
        with used, identity.hold():
            pass
        os.close(lock(lacking.folder / "lock", is_inherited=is_inherited))
    with identity.hold():
        pass
    (warned,) = caplog.messages
    assert f"{lacking.folder} has no locks" in warned
    assert "--state" in warned


def test_without_locks_anywhere_the_error_names_the_remedy_and_no_process(lacking: LackingDisk, tmp_path: Path) -> None:
    lacking.folder = tmp_path
    identity = Identity.load_or_create(tmp_path / "identity.key")
    told = pytest.raises(
        IdentityError, match=r"Function not implemented \(file lock\): choose a folder on a local disk"
    )
    with told, identity.hold():
        pass
    folder = SocketFolder()  # needs a lock only against other processes' clean-up, which needs one, too
    folder.remove()


def test_other_errors_of_a_disk_are_neither_locks_nor_ignored(
    lacking: LackingDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking.folder.mkdir()
    lacking.lacks = errno.EIO
    with pytest.raises(OSError, match="Input/output error") as caught:
        lock(lacking.folder / "lock")
    assert not isinstance(caught.value, LockedError)
    write_atomically(lacking.folder / "file", b"new")
    assert (lacking.folder / "file").read_bytes() == b"new"

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="broken"):
        files.sync_folder(tmp_path)


# -- Other users of the machine ----------------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are readable and writable for all, unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in sorted(folder.rglob("*"))}


@pytest.mark.usefixtures("open_umask")
def test_others_may_neither_enter_nor_read_what_is_made(tmp_path: Path) -> None:
    run = tmp_path / "state" / "run"
    make_private_folder(run)
    write_atomically(run / "members" / "chain", b"1")
    LOCAL.write(run / "checkpoint" / "state-1.json", [b"1"])
    LOCAL.put(run / "payloads" / "log", 0, b"1")
    os.close(lock(run / "lock"))
    with Metrics(run / "metrics.jsonl") as metrics, open(run / "learner.log", "ab", opener=open_regular):
        metrics.write("joined")
    Identity.load_or_create(tmp_path / "other" / "identity.key")
    assert {name: mode for name, mode in modes(tmp_path).items() if mode & 0o077} == {}
    assert stat.S_IMODE(run.parent.stat().st_mode) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_what_an_earlier_release_left_readable_is_closed_when_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    for name in ("metrics.jsonl", "wal", "read"):
        (folder / name).touch(mode=0o644)
    make_private_folder(folder)
    with Metrics(folder / "metrics.jsonl"):
        LOCAL.append(folder / "wal", b"1")
        read_regular(folder / "read")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes(folder) == {"metrics.jsonl": 0o600, "wal": 0o600, "read": 0o644}


def test_only_a_default_state_folder_is_closed_and_not_one_that_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--state .`` must not close somebody's project folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    default, named = tmp_path / "p2pdiloco" / "run", tmp_path / "project"
    for folder in (default, named):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        make_state_folder(folder)
    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    assert stat.S_IMODE(named.stat().st_mode) == 0o755


def test_a_mode_that_cannot_be_changed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    monkeypatch.setattr(files, "_without_modes", set())
    for name in "ab":
        (tmp_path / name).mkdir(mode=0o755)
        make_private_folder(tmp_path / name)
    assert len(caplog.messages) == 1
    assert "others on this machine may read" in caplog.messages[0]


@contextmanager
def within_seconds() -> Iterator[None]:
    """Opening a FIFO waits for its other end, for ever: this ends such a call with an error of its own."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for the other end of a FIFO")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


OPENERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "state-00000001.json": (lambda path: checkpoint.load(path.parent), CheckpointError),
    "identity.key": (Identity.load, IdentityError),
    "inner.safetensors": (lambda path: InnerStateFile(path).read(), InnerStateError),
    "buffers.safetensors": (lambda path: read_buffers(path.parent, "run"), OSError),  # type: ignore[arg-type]
    "metrics.jsonl": (lambda path: Metrics(path).__enter__(), OSError),
    "lock": (lock, OSError),
    "read": (read_regular, OSError),
    "append": (lambda path: LOCAL.append(path, b"1"), OSError),
    "put": (lambda path: LOCAL.put(path, 0, b"1"), OSError),
    "sync": (LOCAL.sync, OSError),
}


@pytest.mark.parametrize("name", OPENERS)
def test_a_fifo_in_place_of_a_file_is_an_error_and_no_endless_wait(tmp_path: Path, name: str) -> None:
    opener, error = OPENERS[name]
    os.mkfifo(tmp_path / name)
    with within_seconds(), pytest.raises(error, match="it is not a regular file: remove it"):
        opener(tmp_path / name)


def test_a_folder_in_place_of_a_file_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
