"""Publications: whole versions of a run's model in a folder for other programs, written while the run trains.

Rules of this file:
1. ``FOLDER/step-STEP-HEADS`` is one version, as ``p2pdiloco export`` writes it. It appears by one rename, after all its
   bytes are on the disk, and does not change afterwards. Files as in the version before are hard links to them.
2. ``FOLDER/latest`` is a link to the newest version. It is moved last, by one rename, so it always names a whole one.
3. Whatever else is made there has a name that begins with a dot and ends with ``.part``; the next publication, and the
   next start, remove it.
4. A process of its own writes, one publication after the other (``main``): torch is loaded once, the node never waits,
   and a lack of memory ends no node.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch

from p2pdiloco.node.results import Result, find_result
from p2pdiloco.node.worker_process import answer_lines
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.training.export import ABOUT, About, Format
from p2pdiloco.util.errors import UserError
from p2pdiloco.util.files import LOCAL, LockedError, lock

LATEST = "latest"
LOCK = ".lock"
PROGRAM = "p2pdiloco.node.publication"
_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
_PART = re.compile(rf"\.(?:{_NAME.pattern}|{LATEST})(?:\..*)?\.part")


class PublicationError(UserError):
    """A folder cannot be published in. The message says why, and what to do."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to publish a run's model in a folder. ``base``, ``tokenizer`` and ``like`` are as of
    ``training.export.export``."""

    state: str
    """The run's folder, with the checkpoints."""
    run: RunId
    folder: str
    format: Format
    base: str | None = None
    tokenizer: str | None = None
    like: str | None = None
    keep: int = 2
    """Number of publications that stay, the newest included."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The newest publication, or why there is none."""

    name: str = ""
    step: int = 0
    """Global step."""
    is_new: bool = False
    """False: the version was published before."""
    lacks_tokenizer: bool = False
    """True: it is for a program that needs one."""
    error: str = ""


def publish(order: Order) -> Published:
    """Publish the newest checkpoint, unless it is published; then remove old publications. Blocks.

    Raises:
        UserError, ValueError: there is no checkpoint, or it cannot be exported so.
        OSError: the disk is full or not writable. ``latest`` is as before.
    """
    folder = Path(order.folder)
    _remove_old(folder, order.keep)  # so that who is always killed before the end does not fill the disk
    result = find_result(order.state, Path(order.state), order.run)
    name = _name(result, order.format)
    is_new = not (folder / name).is_dir()
    if is_new:
        _write(result, folder, name, order)
    if latest(folder) != name:
        link = folder / f".{LATEST}.part"
        os.symlink(name, link)
        os.replace(link, folder / LATEST)
        LOCAL.sync_folder(folder)
    _remove_old(folder, order.keep)
    about = msgspec.json.decode(LOCAL.read(folder / name / ABOUT), type=About)
    lacks_tokenizer = order.format in ("hf", "gguf") and not about.has_tokenizer
    return Published(name=name, step=result.step, is_new=is_new, lacks_tokenizer=lacks_tokenizer)


def latest(folder: Path) -> str | None:
    """Return the name of the newest publication in ``folder``; None if there is none."""
    try:
        name = os.readlink(folder / LATEST)
    except OSError:
        return None
    return name if _NAME.fullmatch(name) and (folder / name).is_dir() else None


@contextmanager
def hold(folder: Path, run: RunId) -> Iterator[None]:
    """Create ``folder``, and keep other processes from publishing in it while entered.

    Raises:
        PublicationError: another process does, or it holds another run's model.
        OSError: it cannot be created or written.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        descriptor = lock(folder / LOCK)
    except LockedError as error:
        raise PublicationError(
            f"process {error} publishes in {folder}: stop that one (kill {error}), or name another folder (--publish)"
        ) from error
    try:
        link = folder / LATEST
        if os.path.lexists(link) and not link.is_symlink():
            raise PublicationError(f"{link} is no link, so it cannot name the newest model: move it away")
        with suppress(OSError, msgspec.DecodeError):
            other = msgspec.json.decode(LOCAL.read(link / ABOUT), type=About)
            if other.run != run:
                raise PublicationError(
                    f"{folder} holds the model of another run, {other.name} ({other.run[:12]}): name another folder "
                    "(--publish)"
                )
        sweep(folder)
        yield
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what a process that was killed has left in ``folder``.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in filter(_PART.fullmatch, LOCAL.names(folder)):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            LOCAL.remove_folder(folder / name)
        else:
            LOCAL.remove(folder / name)


def _name(result: Result, wanted: Format) -> str:
    """Return the version's name: its step, and a digest, since versions of some shards may have the same step."""
    heads = [shard.state.head.id for shard in result.checkpoint.shards]
    digest = hashlib.blake2b("\n".join([wanted, *heads]).encode(), digest_size=4).hexdigest()
    return f"step-{result.step:08d}-{digest}"


def _write(result: Result, folder: Path, name: str, order: Order) -> None:
    part, before = folder / f".{name}.part", latest(folder)
    try:
        result.write(part, order.format, base=order.base, tokenizer=order.tokenizer, like=order.like)
        for path in filter(Path.is_file, sorted(part.rglob("*"))):
            older = folder / (before or name) / path.relative_to(part)
            if older.is_file() and filecmp.cmp(path, older, shallow=False):
                with suppress(OSError):  # a file system without links keeps the copy
                    link = path.with_name(f".{path.name}.part")
                    os.link(older, link)
                    os.replace(link, path)
            LOCAL.sync(path)
        LOCAL.sync_folder(part)
        os.rename(part, folder / name)
        LOCAL.sync_folder(folder)
    except BaseException:
        LOCAL.remove_folder(part)
        raise


def _remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` publications. That which ``latest`` names is one of them."""
    current = latest(folder)
    names = [name for name in LOCAL.names(folder) if _NAME.fullmatch(name) and name != current]
    names.sort(key=lambda name: (folder / name).stat().st_mtime_ns, reverse=True)
    for name in names[keep - 1 :]:
        os.rename(folder / name, folder / f".{name}.part")  # nobody finds half of it under its name
    sweep(folder)


# -- Process -----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer each line of the standard input, an ``Order``, by a line with a ``Published``, until the input ends."""
    torch.set_num_threads(1)
    answer_lines("publisher", lambda line: msgspec.json.encode(_answer(msgspec.json.decode(line, type=Order))))


def _answer(order: Order) -> Published:
    try:
        return publish(order)
    except OSError as error:
        reason = error.strerror or str(error)
        return Published(error=f"{error.filename}: {reason}" if error.filename else reason)
    except (UserError, ValueError) as error:
        return Published(error=str(error))


if __name__ == "__main__":
    main()
