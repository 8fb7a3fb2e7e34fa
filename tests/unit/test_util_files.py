"""The last few files of a kind are kept, within a bound; file systems that lack locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.discovery.p2pd import SocketFolder
from p2pdiloco.transport.identity import Identity, IdentityError
from p2pdiloco.util import files
from p2pdiloco.util.files import LockedError, lock, older, rotate, write_atomically


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
