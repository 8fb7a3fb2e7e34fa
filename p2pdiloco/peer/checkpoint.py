"""A peer's state on its disk: the manifest, every shard's head with its proof, global parameters and momentum.

Rules of this file:
1. A checkpoint appears whole or not at all: tensors first, then the small JSON that names them, each by rename. The
   newest few stay, so that one that the disk has spoilt is not the last.
   It is written and read shard by shard (``Draft``): neither takes memory beside the vectors for more than one. Each
   shard is at a head of its own; they need not be of one moment, since shards are independent chains.
2. What is read back is checked: the manifest against the run's id, which the index tells, every shard against the
   digest that its owner signed. Of several checkpoints the heaviest that passes is used. A spoilt manifest hides
   nothing while there is a copy in the folder above.
3. Checkpoints of several peers of a run can be put together: of each shard the heaviest head, by the protocol's own
   rule. Where they come from, and in which order, does not matter.
4. What a crash left half-written, or without its index, is swept at the next save and at the peer's start.
5. What is read back is led on by what was committed since (``commit_wal``).
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from p2pdiloco.codec.digests import StateForm, packed
from p2pdiloco.peer import commit_wal
from p2pdiloco.peer.commit_wal import CHECKPOINT_PREFIX, next_number, numbers, path_of
from p2pdiloco.peer.host import PART, Disk, replace
from p2pdiloco.peer.state_proof import SavedState, proven_digest
from p2pdiloco.protocol.chain import is_heavier
from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Layout, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.util import logs
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import StateProof

log = logs.get("node")

FORMAT = 4
GOOD = ".good"
AVERAGE = "average.bin"
"""A running average of the parameters, where one is kept (``ema.py``)."""
LEARNER = "learner.safetensors"
"""Where the learner's inner state lies beside them."""
PLACES = ("checkpoint", "*/checkpoint")
"""Where checkpoints lie in the folder that a user names (a run's folder, a peer's state), if it is not one itself."""

SYNC_BYTES = 64 << 20
"""Written at most before they are forced to the disk: nothing else waits long for its turn."""


class CheckpointError(Exception):
    """No checkpoint can be used; the message says why."""


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON beside the tensors, which have its name but for the suffix."""

    format: int = FORMAT
    run: RunId
    shards: tuple[SavedState, ...]

    @property
    def weight(self) -> int:
        """Tokens of all chains together: what is later in a chain is heavier."""
        return sum(proof.state.head.tokens for proof in self.shards)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was read back and checked."""

    manifest: Manifest
    shards: tuple[SavedState, ...]
    """By shard."""
    theta: Tensor
    momentum: Tensor


class Draft:
    """A checkpoint that is being written, shard after shard, in the layout's order. Until ``finish`` it is not there.
    Everything blocks: it belongs on the host's ``disk`` queue."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk = LOCAL) -> None:
        self._folder = folder
        self._manifest = manifest
        self._disk = disk
        self._form = StateForm.of(manifest.config.outer)
        self._number = 0
        self._shards: list[SavedState] = []
        self._unsynced = 0

    @property
    def number(self) -> int:
        """The number in its name."""
        return self._number

    @property
    def _part(self) -> Path:
        path = _tensors(self._folder, self._number)
        return path.with_name(f".{path.name}{PART}")

    def begin(self, number: int) -> None:
        """Begin the checkpoint of that number, which no other in the folder has.

        Raises:
            OSError: the disk is full or not writable.
        """
        folder, disk = self._folder, self._disk
        sweep_halves(folder, disk)
        self._number = number
        replace(disk, folder / MANIFEST, [self._manifest.encode()])
        disk.write(self._part, [_header(Layout.of(self._manifest), self._form)])

    def add(self, saved: SavedState, data: memoryview) -> None:
        """Append the next shard, as it travels.

        Raises:
            OSError: the disk is full.
            ValueError: it is not what its owner signed, and could not be read back.
        """
        if digest_of(self._form.listed(data)) != proven_digest(self._manifest, saved):
            raise ValueError(f"shard {saved.state.head.shard} does not have the digest that its owner signed")
        self._disk.append(self._part, data)
        self._shards.append(saved)
        self._unsynced += len(data)
        if self._unsynced > SYNC_BYTES:
            self._unsynced = 0
            self._disk.sync(self._part)

    def finish(self, *, keep: int) -> None:
        """Give the checkpoint its name; of all in the folder keep the newest ``keep`` and the one that is known to be
        good.

        Raises:
            OSError: it is not there.
        """
        folder, disk, number = self._folder, self._disk, self._number
        disk.sync(self._part)
        disk.rename(self._part, _tensors(folder, number))
        disk.sync_folder(folder)
        index = Index(run=self._manifest.run, shards=tuple(self._shards))
        replace(disk, _index(folder, number), [msgspec.json.format(msgspec.json.encode(index))])
        good, there = good_number(folder, disk), _numbers(disk, folder)
        for old in there[keep:]:
            if old != good:
                disk.remove(_index(folder, old))
                disk.remove(_tensors(folder, old))
        if len(there) >= keep:
            commit_wal.remove(folder, disk, before=min(there[:keep]))

    def discard(self) -> None:
        """Remove what was written, as far as the disk allows it."""
        if self._number:
            with contextlib.suppress(OSError):
                self._disk.remove(self._part)
            with contextlib.suppress(OSError):
                if self._number not in _numbers(self._disk, self._folder):
                    self._disk.remove(_tensors(self._folder, self._number))


def save(
    folder: Path,
    manifest: Manifest,
    shards: Sequence[StateProof],
    theta: Tensor,
    momentum: Tensor,
    *,
    keep: int,
    disk: Disk = LOCAL,
) -> None:
    """Write a checkpoint of vectors that do not change; of all in ``folder`` the newest ``keep`` stay. Blocks.

    Raises:
        OSError: the disk is full or not writable; what is there stays.
        ValueError: a shard is not what its owner signed: it could not be read back, and nothing is written.
    """
    draft = Draft(folder, manifest, disk)
    try:
        draft.begin(next_number(folder, disk))
        for piece, proof in zip(Layout.of(manifest).shards, shards, strict=True):
            saved = proof if isinstance(proof, SavedState) else SavedState(proof.state, proof.header, proof.signature)
            span = slice(piece.start, piece.stop)
            draft.add(saved, packed(theta[span], momentum[span]))
        draft.finish(keep=keep)
    except (OSError, ValueError):
        draft.discard()
        raise


def sweep_halves(folder: Path, disk: Disk = LOCAL) -> list[str]:
    """Remove what a crash left of checkpoints that were being written or removed; the names. Only for who writes here.

    Raises:
        OSError: it cannot be removed.
    """
    names = disk.names(folder)
    ours = (f".{CHECKPOINT_PREFIX}", f".{MANIFEST}.", f".{AVERAGE}.")
    halves = [name for name in names if name.endswith(PART) and name.startswith(ours)]
    halves += [
        name
        for name in names
        if name.startswith(CHECKPOINT_PREFIX)
        and name.endswith(".safetensors")
        and f"{Path(name).stem}.json" not in names
    ]
    for name in halves:
        disk.remove(folder / name)
    return halves


def indices(folder: Path, disk: Disk = LOCAL) -> list[tuple[int, Index]]:
    """Number and index of each checkpoint in ``folder`` whose index can be read, the heaviest first."""
    found = []
    for number in _numbers(disk, folder):
        with contextlib.suppress(OSError, ValueError):
            found.append((number, _read_index(disk, folder, number)))
    return sorted(found, key=lambda item: (item[1].weight, item[0]), reverse=True)


def load(folder: Path, disk: Disk = LOCAL, run: RunId | None = None) -> Checkpoint | None:
    """The heaviest checkpoint in ``folder`` that is whole, or None if there is none at all; with ``run``, of that run.

    Raises:
        CheckpointError: there are some, but each is torn, altered, or of another format.
    """
    reasons, readable = [], indices(folder, disk)
    torn = [number for number in _numbers(disk, folder) if number not in dict(readable)]
    for number in [number for number, index in readable if run in (None, index.run)] + torn:
        try:
            return _read(disk, folder, number)
        except (OSError, ValueError) as error:
            reasons.append(f"{_index(folder, number).name}: {error}")
            log.warning("checkpoint cannot be used", folder=folder, number=number, reason=str(error))
    if reasons:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {'; '.join(reasons)}. Take another peer's folder, or a copy of "
            "this one; or move it away and join again, if the run still has peers"
        )
    return None


def places(folders: Iterable[Path]) -> list[Path]:
    """Where checkpoints may lie: ``folders`` themselves, and what is below them."""
    searched = list(folders)
    below = (place for folder in searched for pattern in PLACES for place in folder.glob(pattern))
    return sorted({*searched, *below})


def load_all(folders: Iterable[Path], run: RunId | None = None) -> list[Checkpoint]:
    """Whatever can be used of the checkpoints in ``folders`` and in the run folders below them, with ``run`` of that
    run; what cannot be is told in the log.

    Raises:
        CheckpointError: nothing can.
    """
    found, reasons, searched = [], [], list(folders)
    for place in places(searched):
        try:
            checkpoint = load(place, run=run)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            found += [] if checkpoint is None else [checkpoint]
    if not found:
        where = ", ".join(map(str, searched))
        nothing = f"there is no checkpoint in {where}: name a state folder (--state) of a peer, or a run's folder in it"
        raise CheckpointError("; ".join(reasons) or nothing)
    return found


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint:
    """Of each shard the heaviest head in any of ``checkpoints``, at least one.

    Raises:
        CheckpointError: they are of several runs.
    """
    first, *others = checkpoints
    if any(other.manifest.run != first.manifest.run for other in others):
        runs = sorted({c.manifest.run[:12] for c in (first, *others)})
        raise CheckpointError(f"the checkpoints are of several runs ({', '.join(runs)}): give those of one")
    if not others:
        return first
    shards, theta, momentum = list(first.shards), first.theta.clone(), first.momentum.clone()
    for other in others:
        for piece, proof in zip(Layout.of(first.manifest).shards, other.shards, strict=True):
            if is_heavier(proof.state.head, shards[piece.shard].state.head):
                span = slice(piece.start, piece.stop)
                shards[piece.shard] = proof
                theta[span], momentum[span] = other.theta[span], other.momentum[span]
    return Checkpoint(manifest=first.manifest, shards=tuple(shards), theta=theta, momentum=momentum)


def stem(number: int) -> str:
    """The name of a checkpoint's files, without suffix."""
    return f"{CHECKPOINT_PREFIX}{number:08d}"


def _index(folder: Path, number: int) -> Path:
    return folder / f"{stem(number)}.json"


def _tensors(folder: Path, number: int) -> Path:
    return folder / f"{stem(number)}.safetensors"


def mark_good(folder: Path, number: int, disk: Disk = LOCAL) -> None:
    """Mark this checkpoint, and no other, as known to be good.

    Raises:
        OSError: the mark cannot be written.
    """
    name = f"{stem(number)}{GOOD}"
    replace(disk, folder / name, [b""])
    for other in disk.names(folder):
        if other.endswith(GOOD) and other != name:
            disk.remove(folder / other)


def good_number(folder: Path, disk: Disk = LOCAL) -> int | None:
    """The number of the checkpoint in ``folder`` that is known to be good, if there is one."""
    names = disk.names(folder)
    marked = (name.removeprefix(CHECKPOINT_PREFIX).removesuffix(GOOD) for name in names if name.endswith(GOOD))
    there = set(_numbers(disk, folder))
    return max((int(number) for number in marked if number.isdecimal() and int(number) in there), default=None)


def _numbers(disk: Disk, folder: Path) -> list[int]:
    """Numbers of the checkpoints in ``folder``, newest first."""
    names = (name for name in disk.names(folder) if name.startswith(CHECKPOINT_PREFIX) and name.endswith(".json"))
    stems = (name.removeprefix(CHECKPOINT_PREFIX).removesuffix(".json") for name in names)
    return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)


def _read_index(disk: Disk, folder: Path, number: int) -> Index:
    index = msgspec.json.decode(disk.read(_index(folder, number)), type=Index)
    if index.format != FORMAT:
        raise ValueError(f"it has format {index.format}, this version reads {FORMAT}")
    return index


def read_manifest(folder: Path, run: RunId, disk: Disk = LOCAL) -> Manifest:
    """The manifest of ``run`` from a folder of checkpoints, or, if that is spoilt, from the run's folder above it.

    Raises:
        OSError, ValueError: neither has it.
    """
    try:
        return decode_manifest(disk.read(folder / MANIFEST), run)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            manifest = decode_manifest(disk.read(folder.parent / MANIFEST), run)
            log.warning("the checkpoints' manifest is spoilt, its copy above is used", folder=folder)
            return manifest
        raise


def _read(disk: Disk, folder: Path, number: int) -> Checkpoint:
    index = _read_index(disk, folder, number)
    manifest = read_manifest(folder, index.run, disk)
    layout = Layout.of(manifest)
    if [proof.state.head.shard for proof in index.shards] != [s.shard for s in layout.shards]:
        raise ValueError("it does not have every shard once")
    form = StateForm.of(manifest.config.outer)
    path, header = _tensors(folder, number), _header(layout, form)
    if disk.read(path, 0, len(header)) != header:
        raise ValueError("its tensors do not fit its manifest")
    theta, momentum = torch.empty(layout.elements), torch.empty(layout.elements, dtype=form.momentum)
    for piece, proof in zip(layout.shards, index.shards, strict=True):
        span = slice(piece.start, piece.stop)
        data = disk.read(path, len(header) + form.width * piece.start, form.width * piece.elements)
        if digest_of(form.unpacked(data, theta[span], momentum[span])) != proven_digest(manifest, proof):
            raise ValueError(f"shard {piece.shard} does not have the digest that its owner signed")
        if not (theta[span].isfinite().all() and momentum[span].isfinite().all()):
            raise ValueError(f"shard {piece.shard} is not finite")
    shards = commit_wal.replay(folder, number, manifest, index.shards, theta, momentum, disk)
    return Checkpoint(manifest=manifest, shards=shards, theta=theta, momentum=momentum)


def _header(layout: Layout, form: StateForm) -> bytes:
    """The header of a safetensors file with a tensor ``shard.N`` for each shard, as it travels: float32 [2 * n], or
    bytes [6 * n] where momentum has another type."""
    dtype, size = ("F32", 4) if form.momentum == torch.float32 else ("U8", 1)
    entries = {
        f"shard.{piece.shard}": {
            "dtype": dtype,
            "shape": [form.width // size * piece.elements],
            "data_offsets": [form.width * piece.start, form.width * piece.stop],
        }
        for piece in layout.shards
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -- Known-good checkpoints --------------------------------------------------------------------------------------------
# Checkpoints that are known to be good, kept apart from the newest: training went on from them as it went before.
# Rules of this file:
# 1. A checkpoint is judged when the next one is written, by the training loss of this peer's learner since: finite, and
#    no higher above the median of the losses that were found good than ``ROOM``. Who does not train judges nothing.
# 2. The newest that is good stays, however many are written after it. Nothing is copied: a file beside it says so.
# 3. Who goes back to it puts aside what is newer, commits since it and the learner's inner state, too, and removes
#    nothing.


MEMORY = 32
"""Losses."""
ROOM = 0.5
"""Nats a token, or as large a share of the median if that is more."""
ASIDE = "aside-"


class KnownGood:
    """Judges and marks the checkpoints of one folder, during one life of its peer."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._losses: deque[float] = deque(maxlen=MEMORY)
        self._waiting: int | None = None
        """The checkpoint that was written last."""

    def judge_previous(self, number: int, loss: float | None) -> bool:
        """Judge the checkpoint before ``number``, which is there now, by the ``loss`` of this peer's learner since;
        mark it if it is good, and say so. Blocks.

        Raises:
            OSError: it cannot be marked.
        """
        before, self._waiting = self._waiting, number
        if loss is None or not self._is_usual(loss):
            return False
        self._losses.append(loss)
        if before is not None:
            mark_good(self._folder, before, self._disk)
        return before is not None

    def _is_usual(self, loss: float) -> bool:
        if not math.isfinite(loss) or not self._losses:
            return math.isfinite(loss)
        usual = sorted(self._losses)[len(self._losses) // 2]
        return loss <= usual + max(ROOM, ROOM * abs(usual))


def _asides() -> Iterator[str]:
    """Prefixes for files that are put aside, one for each time: none writes over another's."""
    yield ASIDE
    yield from (f"{ASIDE}{time}-" for time in count(2))


def go_back(folder: Path, disk: Disk) -> int | None:
    """Put aside what is newer than the checkpoint in ``folder`` that is known to be good; its number, or None if there
    is none. Only where nobody writes. Blocks.

    Raises:
        OSError: files cannot be renamed.
    """
    good = good_number(folder, disk)
    if good is None:
        return None
    newer = [number for number, _ in indices(folder, disk) if number > good]
    names = {f"{stem(number)}{suffix}" for number in newer for suffix in (".json", ".safetensors")} | {LEARNER}
    names |= {path_of(folder, number).name for number in numbers(folder, disk) if number >= good}
    there = disk.names(folder)
    aside = next(aside for aside in _asides() if not any(name.startswith(aside) for name in there))
    for name in sorted(names.intersection(there)):
        disk.rename(folder / name, folder / f"{aside}{name}")
    disk.sync_folder(folder)
    return good
