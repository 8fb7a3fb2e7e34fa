"""A training script's view of the other peers: assigns it samples of its own, and warns if peers train the same
ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.sampler import FirstBatches, OwnSamples, share_loader

log = logging.getLogger("p2pdiloco")

WAIT_S = 600.0
"""How long peers are waited for."""
KNOWN_S = 5.0
"""How long a script waits to hear who trains, at most."""
LOOK_S = 0.05


class SwarmView:
    """One script's; the link to its node is there while it takes part."""

    def __init__(self, model: nn.Module, *, has_run: bool) -> None:
        self._model = model
        self._has_run = has_run
        self._link: NodeLink | None = None
        self._is_linked = False
        """A node is there, or looked for."""
        self._batches = FirstBatches()
        self._call_hook: Any = None
        self._is_warned = False
        """Of batches that another peer trains, too."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Ids of the peers that train, this one included; empty without a run."""
        swarm = None if self._link is None else self._link.swarm
        return () if swarm is None else swarm.peers

    @property
    def swarm(self) -> Mapping[str, float]:
        """How all peers stand together: ``loss`` (training, weighted by tokens), ``peers``, ``version``, ``step``,
        ``tokens`` (merged), ``tokens_per_s``, ``share`` (this peer's, of that), ``sent_mb``, ``received_mb`` and, where
        the run measures it, ``held_out``; those that are known."""
        swarm = None if self._link is None else self._link.swarm
        return {} if swarm is None else swarm.figures

    def sampler(self, dataset: Any) -> OwnSamples:
        """For ``DataLoader(dataset, sampler=...)``: samples that no other peer takes in this epoch of the swarm,
        following who comes and goes (``sampler.py``). Its passes are as long as ``dataset``."""
        return OwnSamples(len(dataset), self._known_peers)

    def shard(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """This peer's part of ``dataset``, by who trains now, for whatever goes through it: it stays the same when
        others come or go (``sampler`` follows them). Without a run all of it."""
        if not self._has_run:
            return dataset
        return Subset(dataset, list(self.sampler(dataset).epoch(0)))

    def share(self, loader: Any) -> bool:
        """Have a ``DataLoader``, which nobody goes through yet, draw this peer's samples (``sampler``). False, and
        nothing is changed, if it has a sampler of its user's own, or no length."""
        return self._has_run and share_loader(loader, self._known_peers)

    def record_batch(self, *batch: Any) -> None:
        """A batch that is trained, as tensors or what holds them: peers that train the same are warned. The first few
        count; those that the model is called with are seen anyway."""
        self._batches.add(*batch)

    def _wait_for_swarm(self, wanted: int) -> None:
        """Until so many peers train, this one included; at least until it is known who does."""
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

    def _tell_end(self, run: str, last_step: int) -> None:
        """Warn of a run that is over before this script has made a step: its loop would seem to do something."""
        link = self._link
        if link is not None and not link.is_training and link.counts.global_step >= last_step:
            log.warning(
                "run %s is complete at step %s: the model now holds what came of it, and what this script trains is "
                "not merged any more. To begin anew, choose another run= (and another state=, if you name one)",
                run,
                last_step,
            )

    def _known_peers(self) -> tuple[str, tuple[str, ...]]:
        swarm = None if self._link is None else self._link.swarm
        return ("", ()) if swarm is None else (swarm.me, swarm.peers)

    def _look_at_batches(self, link: NodeLink) -> None:
        """Tell the first batches, and warn if somebody else trains them."""
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
        """The model is called."""
        if module.training and torch.is_grad_enabled():
            self._batches.add(*args, kwargs)
        if self._batches.is_full:
            self._look_no_more()

    def _begin_to_look(self) -> None:
        """At what the model is called with."""
        self._call_hook = self._model.register_forward_pre_hook(of(self._model, self._on_call), with_kwargs=True)

    def _look_no_more(self) -> None:
        if self._call_hook is not None:
            self._call_hook.remove()
            self._call_hook = None


def of(model: nn.Module, hook: Callable[..., None]) -> Callable[..., None]:
    """``hook`` for the calls of ``model``, and not of its copies (an average of it, ``copy.deepcopy``). A function is
    not copied with them, where a method would be with all that it belongs to."""

    def called(module: nn.Module, *given: Any) -> None:
        if module is model:
            hook(module, *given)

    return called
