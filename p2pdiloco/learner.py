"""The shipped training script: trains the language model of a configuration file with ``p2pdiloco.DiLoCo``. A node
starts it with a socket and the shared memory; nobody starts it by hand::

    python -m p2pdiloco.learner --socket-fd N --memory-fd N --manifest PATH --incarnation TEXT
                            [--inner-state PATH] [--socket-name NAME --reattach-s S] [--device cpu] [--data PATH]
                            [--tokenizer PATH] [--model PATH] [--threads N]

Rules of this file:
1. The node leads. SIGINT and SIGHUP are ignored, because Ctrl+C and the end of a terminal reach the whole process
   group. SIGTERM ends the learner at once; its log then says where it was.
   So does the node's death (Linux), even in the middle of a step that takes minutes, unless the learner may wait for
   the next node.
2. A problem that the user must repair (data, device, manifest) is sent to the node as ``Failed`` and ends with status
   2. A failure while training ends with status 1, and the supervisor starts a new process from the global parameters.
3. A step that fails, or whose loss is not finite, ends the learner before it can corrupt a snapshot.
4. Training never waits for data (``DataSupply``).

The manifest names the inner optimizers (``optimizers``). A new process continues with their saved state on the peer's
disk (``optimizer_state``). Without one it warms up briefly.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from p2pdiloco.diloco import DiLoCo, DiLoCoError
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.script_node import ParentNode
from p2pdiloco.training import NAME
from p2pdiloco.training.corpus import DataSupply, load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import excerpt, given_samples, held_out_loss
from p2pdiloco.training.learner_options import be_nice, parser_of_a_learner, setting
from p2pdiloco.training.models import build, vocabulary
from p2pdiloco.training.node_reconnect import NodeListener
from p2pdiloco.training.optimizer_state import InnerStateError, InnerStateFile, put, take
from p2pdiloco.training.optimizers import inner_optimizers, inner_step
from p2pdiloco.training.thread_tuning import ThreadChoice
from p2pdiloco.util import logs
from p2pdiloco.util.process import be_called, die_with_parent
from p2pdiloco.wire.learner_ipc import Trouble, Written

# A text for people takes as long as a measurement of the loss, so it is not written with each.
WRITES_EVERY_S = 10.0


class Learner:
    """Model, data and optimizers of one life of a peer's learner."""

    def __init__(
        self,
        node: ParentNode,
        manifest: Manifest,
        corpus: Corpus,
        *,
        incarnation: str,
        device: str | torch.device = "cpu",
        base: str | None = None,
        inner_state_file: InnerStateFile | None = None,
        threads: ThreadChoice | None = None,
    ) -> None:
        """``incarnation`` names this life and seeds the order of its data. Use the learner's whole ID, so that no two
        learners of a run see the same batches.

        Raises:
            ValueError: the model is not the manifest's, or the corpus has symbols beyond its vocabulary.
            RuntimeError: the device does not exist or has too little memory.
            DiLoCoError: the model cannot be exchanged.
        """
        config = self._config = manifest.config
        self._given = given_samples(manifest)
        largest = int(max(corpus.train.max(), corpus.held_out.max(), 0 if self._given is None else self._given.max()))
        if largest >= vocabulary(config.model):
            raise ValueError(
                f"the data has symbol {largest}, but the model's vocabulary is {vocabulary(config.model)}: bytes need "
                "256, tokens as many as the tokenizer has"
            )
        self._node = node
        self._device = torch.device(device)
        self._corpus = corpus
        self._supply = DataSupply(manifest, corpus, incarnation, node.blocks)
        self.model = build(config.model, config.seed, manifest.tensors, base).to(self._device)
        self._optimizers = inner_optimizers(self.model, config.inner)
        self._inner_state_file = inner_state_file
        # A save was requested while the previous one was being written.
        self._is_save_due = False
        # Steps of the inner optimizer, including earlier lives.
        self._inner_steps = 0
        self._restore()
        self._written_at = -math.inf
        # None: torch's number of threads is not changed.
        self._threads = threads
        node.inner_steps, node.has_blocks = self._inner_steps, self._supply.has_blocks
        self._outer = DiLoCo(
            self.model,
            self._optimizers,
            run=node,
            tokens_per_step=config.inner.batch * config.model.context,
            evaluate=self.evaluate,
            on_save=self._save,
        )

    def run(self) -> None:
        """Train until the node ends.

        Raises:
            RuntimeError, ValueError, DiLoCoError: a step, or something for the node, failed. The node has been told.
        """
        with self._outer as outer:
            while outer.wait():
                if self._inner_state_file is not None and self._inner_state_file.trouble:
                    self._node.tell(Trouble(reason=self._inner_state_file.trouble))
                    self._inner_state_file.trouble = ""
                self._step()
        if self._inner_state_file is not None and self._is_save_due:
            self._inner_state_file.join()
            self._save()

    def _step(self) -> None:
        outer, began = self._outer, time.perf_counter()
        batch = self._supply.next().to(self._device)
        made = self._inner_steps
        self._inner_steps += 1  # DiLoCo may save within the step
        inner, step, progress = self._config.inner, outer.global_step, outer.progress
        inner_step(self.model, self._optimizers, inner, batch, step, made, progress, outer.report)
        if self._threads is not None and (number := self._threads.stepped(time.perf_counter() - began)) is not None:
            torch.set_num_threads(number)
        if (block := self._supply.trained()) is not None and self._node.link is not None:
            self._node.link.block_finished(block)

    def evaluate(self) -> float:
        """Return the held-out loss of the global parameters, which the model holds. If the node applies new versions
        meanwhile, it is that of a mixture of neighbouring versions."""
        config, began = self._config, time.perf_counter()
        found = held_out_loss(
            self.model, self._corpus, config.model.context, config.evaluation.samples, self._device, self._given
        )
        is_due = began - self._written_at >= WRITES_EVERY_S
        if config.model.kind == "transformer" and is_due and (text := excerpt(self.model, self._corpus, began)):
            self._written_at = began
            self._node.tell(Written(text=text))
        return found

    def _restore(self) -> None:
        """Continue with the saved state of the inner optimizer, if there is one."""
        try:
            taken = None if self._inner_state_file is None else self._inner_state_file.read()
            if taken is not None:
                self._inner_steps = put(taken, self._optimizers, self._supply.windows)
        except InnerStateError as error:
            reason = f"the inner optimizer starts fresh, because its saved state cannot be used: {error}"
            self._node.tell(Trouble(reason=reason))

    def _save(self) -> None:
        """Save the inner optimizer's state in the background."""
        if self._inner_state_file is not None:
            self._is_save_due = self._inner_state_file.is_busy
            if not self._is_save_due:
                self._inner_state_file.keep(take(self._optimizers, self._supply.windows, self._inner_steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the node sends ``Exit`` or is gone; return the exit status."""
    options = _parser().parse_args(argv)
    be_called(NAME)
    logs.configure()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)
    if not options.reattach_s:
        die_with_parent()
    listener = NodeListener(options.socket_name, options.reattach_s) if options.socket_name else None
    node = ParentNode(options.manifest, socket.socket(fileno=options.socket_fd), options.memory_fd, listener)
    try:
        learner = _build(options, node)
    except (OSError, ValueError, RuntimeError, DiLoCoError) as error:
        node.fail(str(error) or type(error).__name__)
        return 2
    be_nice()
    try:
        learner.run()
    except DiLoCoError:
        return 2  # the node was told why
    except (ValueError, RuntimeError):
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_a_learner("python -m p2pdiloco.learner", "A peer's learner; its node starts it.")
    parser.add_argument("--socket-fd", type=int, required=True, help="connected Unix stream socket to the node")
    parser.add_argument("--memory-fd", type=int, required=True, help="the shared vectors")
    parser.add_argument("--incarnation", required=True, help="names this life; seeds the order of the data")
    parser.add_argument("--inner-state", type=Path, help="the inner optimizer's state: read if it is there, and kept")
    parser.add_argument("--socket-name", metavar="NAME", help="socket on which this learner waits for a new node")
    parser.add_argument("--reattach-s", type=float, default=0.0, help="how long to wait for it; 0: end with the node")
    return parser


def _build(options: argparse.Namespace, node: ParentNode) -> Learner:
    device, manifest = setting(options)
    config = manifest.config
    corpus = load_corpus(config.data, options.data, options.tokenizer, context=config.model.context)
    return Learner(
        node,
        manifest,
        corpus,
        incarnation=options.incarnation,
        device=device,
        base=options.model,
        threads=ThreadChoice(torch.get_num_threads()) if device.type == "cpu" and not options.threads else None,
        inner_state_file=None if options.inner_state is None else InnerStateFile(options.inner_state),
    )


if __name__ == "__main__":
    sys.exit(main())
