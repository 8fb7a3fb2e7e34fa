"""Checkpoints: saves and loads a peer's state on disk (manifest, shard heads with their proofs, parameters, momentum).

Rules of this file:
1. A checkpoint appears whole or not at all. The tensors are written first, then the small JSON index that names them,
   each by rename. Several recent checkpoints are kept, because the disk may corrupt the newest.
2. A checkpoint is written and read one shard at a time (``Draft``), so it needs memory for one shard beside the
   vectors. Each shard is saved at its own head. The heads need not be of one moment, because shards are independent
   chains.
3. Everything is checked when it is read: the manifest against the run ID in the index, and every shard against the
   digest that its owner signed. Of several checkpoints, the heaviest valid one is used. If the manifest is corrupted,
   the copy in the parent folder is used.
4. Checkpoints of several peers of a run can be combined: for each shard the heaviest head is taken, by the protocol's
   own rule. The order and the origin of the checkpoints do not matter.
5. Files that a crash left half-written, or without an index, are removed at the next save and when the peer starts.
6. After a checkpoint is loaded, the commits made since are replayed from the write-ahead log (``commit_wal``).
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
from p2pdiloco.protocol.ids import Digest, RunId, ShardId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Layout, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.util import logs
from p2pdiloco.util.errors import UserError
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import StateProof

log = logs.get("node")

FORMAT = 4
GOOD = ".good"
# The learner's inner optimizer state, in the same folder as the checkpoints.
LEARNER = "learner.safetensors"
# Where checkpoints lie below a folder that the user names (a run's folder or a peer's state folder).
PLACES = ("checkpoint", "*/checkpoint")

# Sync after this many bytes, so that other writers to the disk do not wait long.
SYNC_BYTES = 64 << 20


class CheckpointError(UserError):
    """No checkpoint can be used. The message says why."""


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON index of a checkpoint. Its file has the same name as the tensors' file, with another suffix."""

    format: int = FORMAT
    run: RunId
    shards: tuple[SavedState, ...]

    @property
    def weight(self) -> int:
        """Sum of the tokens of all chains. A later checkpoint of the same chains is heavier."""
        return sum(proof.state.head.tokens for proof in self.shards)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was read and verified."""

    manifest: Manifest
    shards: tuple[SavedState, ...]
    """One entry per shard, in the layout's order."""
    theta: Tensor
    momentum: Tensor


class Draft:
    """A checkpoint that is being written, shard by shard in the layout's order.

    The checkpoint does not exist until ``finish``. All methods block: call them on the host's ``disk`` queue.
    """

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk = LOCAL) -> None:
        self._folder = folder
        self._manifest = manifest
        self._disk = disk
        self._form = StateForm.of(manifest.config.outer)
        # The number in the checkpoint's file name; 0 before ``begin``.
        self.number = 0
        self._shards: list[SavedState] = []
        self._unsynced = 0

    @property
    def _part(self) -> Path:
        path = _tensors(self._folder, self.number)
        return path.with_name(f".{path.name}{PART}")

    def begin(self, number: int) -> None:
        """Begin a checkpoint with this number, which must be new in the folder.

        Raises:
            OSError: the disk is full or not writable.
        """
        folder, disk = self._folder, self._disk
        sweep_halves(folder, disk)
        self.number = number
        replace(disk, folder / MANIFEST, [self._manifest.encode()])
        disk.write(self._part, [_header(Layout.of(self._manifest), self._form)])

    def add(self, saved: SavedState, data: memoryview) -> None:
        """Append the next shard, in wire layout (``StateForm``).

        Raises:
            OSError: the disk is full.
            ValueError: the data does not have the digest that the shard's owner signed, so it could not be read back.
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
        """Rename the checkpoint into place. Keep the newest ``keep`` checkpoints and the known-good one; remove the
        others.

        Raises:
            OSError: the checkpoint was not written.
        """
        folder, disk, number = self._folder, self._disk, self.number
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
        if self.number:
            with contextlib.suppress(OSError):
                self._disk.remove(self._part)
            with contextlib.suppress(OSError):
                if self.number not in _numbers(self._disk, self._folder):
                    self._disk.remove(_tensors(self._folder, self.number))


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
    """Write a checkpoint of vectors that nobody changes meanwhile, and keep the newest ``keep``. Blocks.

    Raises:
        OSError: the disk is full or not writable. Existing checkpoints are untouched.
        ValueError: a shard does not have the digest that its owner signed. Nothing is written.
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
    """Remove the remains of checkpoints that were being written or removed when the peer crashed; return their names.

    Call it only from the process that writes to this folder.

    Raises:
        OSError: a file cannot be removed.
    """
    names = disk.names(folder)
    ours = (f".{CHECKPOINT_PREFIX}", f".{MANIFEST}.")
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
    """Return the number and index of each checkpoint in ``folder`` with a readable index, heaviest first."""
    found = []
    for number in _numbers(disk, folder):
        with contextlib.suppress(OSError, ValueError):
            found.append((number, _read_index(disk, folder, number)))
    return sorted(found, key=lambda item: (item[1].weight, item[0]), reverse=True)


def load(folder: Path, disk: Disk = LOCAL, run: RunId | None = None) -> Checkpoint | None:
    """Return the heaviest valid checkpoint in ``folder`` (of ``run``, if given), or None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, but each is torn, altered, or of another format.
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
            f"no checkpoint in {folder} can be used: {'; '.join(reasons)}. If a file is damaged, use another peer's "
            "folder, or a copy of this one; or move it away and join again, if the run still has peers"
        )
    return None


def places(folders: Iterable[Path]) -> list[Path]:
    """Return ``folders`` and the folders below them that may hold checkpoints."""
    searched = list(folders)
    below = (place for folder in searched for pattern in PLACES for place in folder.glob(pattern))
    return sorted({*searched, *below})


def load_all(folders: Iterable[Path], run: RunId | None = None) -> list[Checkpoint]:
    """Return every valid checkpoint in ``folders`` and in the run folders below them (of ``run``, if given).
    Checkpoints that cannot be used are logged.

    Raises:
        CheckpointError: no checkpoint can be used.
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
    """Combine one or more checkpoints: take the heaviest head of each shard.

    Raises:
        CheckpointError: the checkpoints belong to different runs.
    """
    first, *others = checkpoints
    if any(other.manifest.run != first.manifest.run for other in others):
        runs = sorted({c.manifest.run[:12] for c in (first, *others)})
        raise CheckpointError(f"the checkpoints belong to different runs ({', '.join(runs)}): name folders of one run")
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
    """Return the file name of a checkpoint, without suffix."""
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
    """Return the number of the known-good checkpoint in ``folder``, or None."""
    marked = set(numbers(folder, disk, CHECKPOINT_PREFIX, GOOD))
    return max(marked.intersection(_numbers(disk, folder)), default=None)


def _numbers(disk: Disk, folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in ``folder``, newest first."""
    return numbers(folder, disk, CHECKPOINT_PREFIX, ".json")[::-1]


def _read_index(disk: Disk, folder: Path, number: int) -> Index:
    index = msgspec.json.decode(disk.read(_index(folder, number)), type=Index)
    if index.format != FORMAT:
        raise ValueError(f"it has format {index.format}; this version reads format {FORMAT}")
    return index


def read_manifest(folder: Path, run: RunId, disk: Disk = LOCAL) -> Manifest:
    """Read the manifest of ``run`` from a checkpoint folder, or from the run folder above it if that copy is corrupted.

    Raises:
        OSError, ValueError: neither folder has a valid manifest.
    """
    try:
        return decode_manifest(disk.read(folder / MANIFEST), run)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            manifest = decode_manifest(disk.read(folder.parent / MANIFEST), run)
            log.warning("the checkpoint folder's manifest is corrupted; using the run folder's copy", folder=folder)
            return manifest
        raise


def _read(disk: Disk, folder: Path, number: int) -> Checkpoint:
    index = _read_index(disk, folder, number)
    manifest = read_manifest(folder, index.run, disk)
    layout = Layout.of(manifest)
    if [proof.state.head.shard for proof in index.shards] != [s.shard for s in layout.shards]:
        raise ValueError("its index does not list every shard exactly once")
    form = StateForm.of(manifest.config.outer)
    path, header = _tensors(folder, number), _header(layout, form)
    if disk.read(path, 0, len(header)) != header:
        raise ValueError("its tensors do not match its manifest")
    theta, momentum = torch.empty(layout.elements), torch.empty(layout.elements, dtype=form.momentum)
    for piece, proof in zip(layout.shards, index.shards, strict=True):
        span = slice(piece.start, piece.stop)
        data = disk.read(path, len(header) + form.width * piece.start, form.width * piece.elements)
        if digest_of(form.unpacked(data, theta[span], momentum[span])) != proven_digest(manifest, proof):
            raise ValueError(f"shard {piece.shard} does not have the digest that its owner signed")
        if not (theta[span].isfinite().all() and momentum[span].isfinite().all()):
            raise ValueError(f"shard {piece.shard} contains NaN or infinity")
    shards = commit_wal.replay(folder, number, manifest, index.shards, theta, momentum, disk)
    return Checkpoint(manifest=manifest, shards=shards, theta=theta, momentum=momentum)


def good_heads(folder: Path, disk: Disk = LOCAL) -> tuple[Digest, ...]:
    """Return the heads of the known-good checkpoint in ``folder``, by shard; empty if there is none. Blocks.

    Raises:
        OSError, ValueError: its index cannot be read.
    """
    number = good_number(folder, disk)
    if number is None:
        return ()
    return tuple(proof.state.head.id for proof in _read_index(disk, folder, number).shards)


def read_shard(
    folder: Path, number: int, manifest: Manifest, shard: ShardId, disk: Disk = LOCAL
) -> tuple[SavedState, memoryview, bytes]:
    """Return one shard of a checkpoint: its proof, its data in wire layout, and its chunks' digests. Blocks.

    Raises:
        OSError, ValueError: it cannot be read, or is not what its owner signed.
    """
    layout, form = Layout.of(manifest), StateForm.of(manifest.config.outer)
    proof, piece = _read_index(disk, folder, number).shards[shard], layout.shards[shard]
    start = len(_header(layout, form)) + form.width * piece.start
    data = memoryview(bytearray(disk.read(_tensors(folder, number), start, form.width * piece.elements)))
    listed = form.listed(data)
    if digest_of(listed) != proven_digest(manifest, proof):
        raise ValueError(f"shard {shard} does not have the digest that its owner signed")
    return proof, data, listed


def _header(layout: Layout, form: StateForm) -> bytes:
    """Return the header of a safetensors file with one tensor ``shard.N`` per shard, in wire layout.

    The tensors are float32 [2 * n], or bytes [6 * n] if momentum is bfloat16.
    """
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
# A checkpoint is known to be good if training went on from it without a jump of the loss.
# Rules of this section:
# 1. A checkpoint is judged when the next one is written, by the training loss of this peer's learner since then. The
#    loss must be finite and at most ``ROOM`` above the median of the earlier good losses. A peer that does not train
#    judges nothing.
# 2. The newest good checkpoint is kept, however many are written after it. It is not copied: an empty file beside it
#    marks it.
# 3. Going back to it (``go_back``) removes nothing. Newer checkpoints, commits since, and the learner's inner state are
#    renamed.


# Number of good losses that the median is taken of.
MEMORY = 32
# In nats per token, or as a share of the median, whichever is more.
ROOM = 0.5
ASIDE = "aside-"


class KnownGood:
    """Judges and marks the checkpoints of one folder, during one life of its peer."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._losses: deque[float] = deque(maxlen=MEMORY)
        # Number of the checkpoint that was written last; it is judged when the next one is written.
        self._waiting: int | None = None

    def judge_previous(self, number: int, loss: float | None) -> bool:
        """Judge the checkpoint before ``number`` by the learner's ``loss`` since then, and mark it if it is good.

        Returns True if a checkpoint was marked. Call it when checkpoint ``number`` has been written. Blocks.

        Raises:
            OSError: the mark cannot be written.
        """
        before, self._waiting = self._waiting, number
        if loss is None or not self._is_usual(loss):
            return False
        self._losses.append(loss)
        if before is not None:
            mark_good(self._folder, before, self._disk)
        return before is not None

    def forget_newest(self) -> None:
        """Judge no checkpoint before the next one is written: the newest was set aside."""
        self._waiting = None

    def _is_usual(self, loss: float) -> bool:
        if not math.isfinite(loss) or not self._losses:
            return math.isfinite(loss)
        usual = sorted(self._losses)[len(self._losses) // 2]
        return loss <= usual + max(ROOM, ROOM * abs(usual))


def _asides() -> Iterator[str]:
    """Yield prefixes for files that are put aside. Each rollback gets its own prefix, so none overwrites another's
    files."""
    yield ASIDE
    yield from (f"{ASIDE}{time}-" for time in count(2))


def go_back(folder: Path, disk: Disk) -> int | None:
    """Put aside everything newer than the known-good checkpoint; return its number, or None if there is none.

    Call it only while nobody writes to ``folder``. Blocks.

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
