"""A training script's view of the other peers: gives it samples of its own, and warns if two peers train the same
ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, Subset

from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.sampler import FirstBatches, OwnSamples, share_loader
from p2pdiloco.training.streams import OwnStream, TrainingPeers, share_stream

log = logging.getLogger("p2pdiloco")

# Maximum wait for other peers.
WAIT_S = 600.0
# Maximum wait until the script knows the training peers.
KNOWN_S = 5.0
LOOK_S = 0.05


class SwarmView:
    """Base class of ``DiLoCo``: the peers, the run's figures, and the division of the data."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, *, has_run: bool) -> None:
        self._model = model
        self._process_group = process_group
        self._has_run = has_run
        self._link: NodeLink | None = None
        # True while there is a node, or the script waits for one.
        self._is_linked = False
        self._batches = FirstBatches()
        # What workers of data loaders know of the peers. It is made for the first stream.
        self._shared_peers: TrainingPeers | None = None
        self._call_hook: Any = None
        # True once the script was warned that another peer trains the same batches.
        self._is_warned = False

    @property
    def peers(self) -> tuple[str, ...]:
        """Ids of the peers that train, this one included: a sorted tuple of str, empty without a run."""
        swarm = None if self._link is None else self._link.swarm
        return () if swarm is None else swarm.peers

    @property
    def swarm(self) -> Mapping[str, float]:
        """Figures of the run, by name; empty without a run. All are floats. A figure that is unknown is left out.

        - ``loss``: training loss of the peers, weighted by their tokens per second.
        - ``peers``: number of peers that train.
        - ``step``, ``version``: the run's step, and the lowest version of any part of the model.
        - ``tokens``: tokens merged so far. ``tokens_per_s``: of all peers together.
        - ``share``: this peer's part of ``tokens_per_s``, from 0 to 1.
        - ``sent_mb``, ``received_mb``: traffic of this peer in MB (10^6 bytes).
        """
        swarm = None if self._link is None else self._link.swarm
        return {} if swarm is None else swarm.figures

    def sampler(self, dataset: Any) -> OwnSamples:
        """Sampler that draws samples which no other peer draws in the same epoch: ``DataLoader(dataset, sampler=...)``.

        An epoch of the run is one random order of the dataset, divided among the peers that train. The sampler follows
        peers that join or leave. Samples that a peer trained on before another one joined may repeat. One pass of the
        sampler has ``len(dataset)`` samples, so it spans several epochs of the run. Under torchrun, each rank draws its
        own part of these samples. Without a run it draws all samples in a fixed random order.

        Args:
            dataset: A dataset with a length, the same at all peers.

        Raises:
            ValueError: The dataset is empty.
        """
        rank, ranks = 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, ranks = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
        return OwnSamples(len(dataset), self._known_peers, rank=rank, replicas=ranks)

    def shard(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """This peer's part of a dataset, for any loader. Call it after ``start``.

        The part is fixed by the peers that train at this moment: it does not follow peers that join or leave later, as
        ``sampler`` does. It may be empty if there are more peers than samples.

        Args:
            dataset: A dataset with a length, the same at all peers.

        Returns:
            A ``torch.utils.data.Subset``; without a run, the dataset itself.

        Raises:
            ValueError: The dataset is empty.
        """
        if not self._has_run:
            return dataset
        return Subset(dataset, list(self.sampler(dataset).epoch(0)))

    def stream(self, dataset: Iterable[Any]) -> OwnStream:
        """This peer's samples of an iterable dataset: ``DataLoader(outer.stream(dataset), num_workers=4)``.

        A hash of the sample decides which peer trains it, so the peers may read the stream in different orders. Each
        iteration over the result is a pass, and gives the peer other samples. It follows peers that join or leave.
        Under torchrun each rank gets its own part. Without a run it has all samples.

        Args:
            dataset: An iterable dataset, of torch or Hugging Face, or any other iterable.

        Returns:
            A ``torch.utils.data.IterableDataset``.
        """
        rank, ranks = 0, 1
        if self._has_run and dist.is_available() and dist.is_initialized():
            rank, ranks = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
        return OwnStream(dataset, self._tell_workers(), rank=rank, ranks=ranks)

    def share(self, loader: Any) -> bool:
        """Make a ``DataLoader`` draw this peer's samples, before the first iteration.

        Its sampler is replaced by ``sampler``, or its iterable dataset by ``stream``. A ``DistributedSampler`` is
        replaced too: each rank of an island then draws its own part of the peer's samples. The ranks of an island must
        divide an iterable dataset themselves, as accelerate does.

        Args:
            loader: A ``DataLoader`` with torch's random, sequential or distributed sampler (or accelerate's), or of an
                iterable dataset.

        Returns:
            False if nothing was replaced: without a run, and for samplers of your own.
        """
        if not self._has_run:
            return False
        return share_stream(loader, self._tell_workers()) or share_loader(loader, self._known_peers)

    def record_batch(self, *batch: Any) -> None:
        """Record a batch by which peers detect that they train the same data.

        Only needed if the model is not called with the batch itself. The first four batches count. Peers with equal
        batches print a warning.

        Args:
            batch: Tensors, or lists, tuples and dicts of tensors.
        """
        self._batches.add(*batch)

    def _wait_for_swarm(self, wanted: int) -> None:
        """Wait until ``wanted`` peers train, including this one, or at least until the training peers are known."""
        link, since, told = self._link, time.monotonic(), False
        assert link is not None
        while self._is_linked and link.is_training:
            waited_s = time.monotonic() - since
            there = len(link.swarm.peers) if link.swarm is not None else 0
            if there >= max(1, wanted) or waited_s > (WAIT_S if there else KNOWN_S):
                break
            if there and not told:
                log.warning("%s of %s peers are here: waiting %.0f minutes for the others", there, wanted, WAIT_S / 60)
                told = True
            self._is_linked = link.boundary()
            time.sleep(LOOK_S)
        if told and self._is_linked and len(self.peers) < wanted:
            log.warning("training begins with %s of %s peers", len(self.peers), wanted)

    def _tell_end(self, run: str, last_step: int, state: Path) -> None:
        """Warn if the run is complete before this script has made a step, since its steps would have no effect.

        state: this script's state folder.
        """
        link = self._link
        if link is not None and not link.is_training and link.counts.global_step >= last_step:
            log.warning(
                "run %s is complete at step %s: the model now has its result, and this script's steps are not merged. "
                "To train it longer, as its founder or an admin: p2pdiloco prolong %s --steps N, then start this "
                "script again. To train another one, choose another run= (and another state=, if you set one)",
                run,
                last_step,
                state,
            )

    def _known_peers(self) -> tuple[str, tuple[str, ...]]:
        swarm = None if self._link is None else self._link.swarm
        return ("", ()) if swarm is None else (swarm.me, swarm.peers)

    def _tell_workers(self) -> TrainingPeers:
        """Let the workers of data loaders know the training peers."""
        if self._shared_peers is None:
            self._shared_peers = TrainingPeers()
        self._shared_peers.write(*self._known_peers())
        return self._shared_peers

    def _look_at_batches(self, link: NodeLink) -> None:
        """Report the first batches, and warn if another peer trains them too. Tell loaders who trains."""
        if self._shared_peers is not None:
            self._tell_workers()
        if news := self._batches.news():
            link.batches(news)
        if not self._is_warned and link.swarm is not None and link.swarm.same_batches:
            self._is_warned = True
            log.warning(
                "peer %s trains the same batches in the same order, so one of you adds nothing: draw them with "
                "DataLoader(data, sampler=outer.sampler(data)), or give each script data or a seed of its own",
                link.swarm.same_batches,
            )

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the batch that the model is called with."""
        if module.training and torch.is_grad_enabled():
            self._batches.add(*args, kwargs)
        if self._batches.is_full:
            self._look_no_more()

    def _begin_to_look(self) -> None:
        """Begin to record the batches that the model is called with. Tell loaders who trains."""
        if self._shared_peers is not None:
            self._tell_workers()
        self._call_hook = self._model.register_forward_pre_hook(CallHook(self._on_call), with_kwargs=True)

    def _look_no_more(self) -> None:
        if self._call_hook is not None:
            self._call_hook.remove()
            self._call_hook = None


class CallHook:
    """A hook for calls of one model. In copies of the model (``copy.deepcopy``, ``torch.save``) it does nothing, and
    holds nothing."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        self._hook = hook

    def __call__(self, *given: Any) -> None:
        """Call the hook."""
        if self._hook is not None:
            self._hook(*given)

    def __reduce__(self) -> tuple[type[CallHook], tuple[()]]:
        return CallHook, ()
