"""Streams that peers share: each peer takes its own samples of an iterable dataset, which has no length and no index.

Rules of this file:
1. A hash of the sample's content decides which peer trains it. So peers may read the stream in different orders, and
   the workers of a ``DataLoader`` may divide it.
2. The hash selects one of PIECES pieces, and each piece belongs to one of the training peers, as in ``sampler.py``. In
   each pass the pieces belong to other peers.
3. Workers are other processes. They read the training peers from shared memory, and so follow peers that join or leave.
4. A peer that gets nothing in a whole pass, or for PATIENCE times its fair share of samples, takes all samples until
   one is its own: there are more peers than distinct samples. An endless stream has no second pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.training.sampler import PIECES, owner
from p2pdiloco.util import logs

# Bytes of the shared memory. Peers beyond it are left out, which costs repeated samples.
_BYTES = 1 << 18
_HEADER = 16
_WORKERS = 256
# So many times as many samples as a peer's fair share takes on average. Of distinct samples, one is its own by then.
PATIENCE = 64

log = logs.get("data")


class TrainingPeers:
    """This peer's ID and those of all training peers, in memory that other processes read.

    One process writes. A counter is odd while it does, so that a reader sees whether what it read is whole.
    """

    def __init__(self) -> None:
        self._memory = _shared(_BYTES, torch.uint8)
        self._seen = 0
        self._known: tuple[str, tuple[str, ...]] = ("", ())

    def write(self, me: str, peers: tuple[str, ...]) -> None:
        """Tell all readers."""
        if (me, peers) == self._known:
            return
        text = json.dumps([me, *peers]).encode()
        if len(text) > _BYTES - _HEADER:
            return
        numbers = self._memory[:_HEADER].view(torch.int64)
        numbers[0] += 1
        numbers[1] = len(text)
        self._memory[_HEADER : _HEADER + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        numbers[0] += 1
        self._known, self._seen = (me, peers), int(numbers[0])

    def read(self) -> tuple[str, tuple[str, ...]]:
        """Return this peer's ID and the training peers; before the start of the run, nobody."""
        numbers = self._memory[:_HEADER].view(torch.int64)
        count = int(numbers[0])
        if count != self._seen and not count % 2:
            text = bytes(self._memory[_HEADER : _HEADER + int(numbers[1])].tolist())
            if int(numbers[0]) == count:
                me, *peers = json.loads(text)
                self._known, self._seen = (me, tuple(peers)), count
        return self._known


class OwnStream(IterableDataset[Any]):
    """The samples of ``source`` that this peer trains. Each iteration over it is a pass."""

    def __init__(self, source: Iterable[Any], peers: TrainingPeers, *, rank: int = 0, ranks: int = 1) -> None:
        self.source = source
        self._peers = peers
        self._rank, self._ranks = rank, ranks
        # For each worker, whose process may not last: its passes, and whether the last one gave it nothing.
        self._passes, self._got_nothing = _shared(_WORKERS, torch.int64), _shared(_WORKERS, torch.bool)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        at = 0 if worker is None else worker.id % _WORKERS
        number, takes_all = int(self._passes[at]), bool(self._got_nothing[at])
        self._passes[at] += 1
        taken, passed_by, is_told = False, 0, False
        for sample in self.source:
            if self._is_own(sample, number):
                passed_by = 0
            elif not takes_all:
                if passed_by < self._patience():
                    passed_by += 1
                    continue
                if not is_told:
                    is_told = True
                    log.warning(
                        f"none of the last {passed_by:,} samples of the stream belongs to this peer, so it trains all "
                        "of them, and peers repeat each other's samples: the stream has too few distinct samples; give "
                        "it more data"
                    )
            taken = True
            yield sample
        self._got_nothing[at] = not taken

    def _patience(self) -> int:
        me, peers = self._peers.read()
        return PATIENCE * self._ranks * len({*peers, me})

    def _is_own(self, sample: Any, number: int) -> bool:
        me, peers = self._peers.read()
        hashed = int(digest_of(*_content(sample))[:15], 16)
        if (hashed // PIECES) % self._ranks != self._rank:
            return False
        return _owner(tuple(sorted({*peers, me})), number, hashed % PIECES) == me

    def set_epoch(self, epoch: int) -> None:
        """Pass on what a Trainer tells the dataset."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)


def share_stream(loader: Any, peers: TrainingPeers) -> bool:
    """Make the loader of an iterable dataset yield this peer's samples. Call it before anything iterates over it.

    Returns False if it is none.
    """
    shared = False
    while isinstance(loader, DataLoader):  # accelerate puts one loader around another
        data = loader.dataset
        if isinstance(data, IterableDataset) and not isinstance(data, OwnStream):
            loader.__dict__["dataset"] = OwnStream(data, peers)  # torch refuses the assignment
            shared = True
        loader = getattr(loader, "base_dataloader", None)
    return shared


def _shared(size: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.zeros(size, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return found


_owner = lru_cache(maxsize=4 * PIECES)(owner)


def _content(sample: Any) -> Iterator[bytes]:
    """Yield a sample's content as bytes, the same in every process."""
    if isinstance(sample, str):
        yield sample.encode("utf-8", "surrogatepass")
    elif isinstance(sample, bytes):
        yield sample
    elif isinstance(sample, Tensor):
        yield sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(sample, Mapping):
        for key in sorted(sample, key=str):
            yield str(key).encode()
            yield from _content(sample[key])
    elif isinstance(sample, list | tuple):
        if all(isinstance(item, int | float) for item in sample):  # tokens
            yield repr(sample).encode()
        else:
            for item in sample:
                yield from _content(item)
    elif hasattr(sample, "tobytes"):
        yield sample.tobytes()
    else:
        yield repr(sample).encode()
