"""The learner's program. A node starts it with a socket and the shared memory; nobody starts it by hand::

    python -m p2pdiloco.training.learner_main --socket-fd N --memory-fd N --manifest PATH --incarnation TEXT
                            [--inner-state PATH] [--reunion NAME --reattach-s S] [--device cpu] [--data PATH]
                            [--tokenizer PATH] [--model PATH] [--threads N]

Rules of this file:
1. The node leads. SIGINT and SIGHUP are ignored, because Ctrl+C and the end of a terminal reach the whole process
   group. SIGTERM ends the learner at once.
   So does the node's death (Linux), even in the middle of a step that takes minutes, unless the learner may wait for
   the next node.
2. A problem that the user must repair (data, device, manifest) is sent to the node as ``Failed`` and ends with status
   2. A failure while training ends with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.training import NAME
from p2pdiloco.training.builtin_learner import Learner
from p2pdiloco.training.corpus import load_corpus
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_reconnect import Reunion
from p2pdiloco.training.optimizer_state import Keeper
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.training.thread_tuning import ThreadChoice
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular
from p2pdiloco.util.process import be_called, die_with_parent
from p2pdiloco.wire.learner_ipc import Failed

_FAREWELL_S = 2.0
# Niceness of training. Nodes on the same CPU need little time, but soon. Start-up runs at normal priority.
_NICENESS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the node sends ``Exit`` or is gone; return the exit status."""
    options = _parser().parse_args(argv)
    be_called(NAME)
    logs.configure()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not options.reattach_s:
        die_with_parent()
    connection = socket.socket(fileno=options.socket_fd)
    try:
        learner = _build(options, connection)
    except (OSError, ValueError, RuntimeError) as error:
        farewell = Channel(connection)
        told = str(error)[:2000].encode(errors="replace").decode()  # a path may have bytes that are no text
        farewell.post(Failed(reason=told or type(error).__name__))
        farewell.flush(_FAREWELL_S)
        return 2
    be_nice()
    try:
        learner.run()
    except (ValueError, RuntimeError):
        return 1  # the node was told why
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_a_learner("python -m p2pdiloco.training.learner_main", "A peer's learner; its node starts it.")
    parser.add_argument("--socket-fd", type=int, required=True, help="connected Unix stream socket to the node")
    parser.add_argument("--memory-fd", type=int, required=True, help="the shared vectors")
    parser.add_argument("--incarnation", required=True, help="names this life; seeds the order of the data")
    parser.add_argument("--inner-state", type=Path, help="the inner optimizer's state: read if it is there, and kept")
    parser.add_argument("--reunion", metavar="NAME", help="where the node's next life finds this learner")
    parser.add_argument("--reattach-s", type=float, default=0.0, help="how long to wait for it; 0: end with the node")
    return parser


def parser_of_a_learner(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every learner has."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--manifest", type=Path, required=True, help="the run's manifest, MessagePack")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ...")
    parser.add_argument("--data", help="folder, or a file of documents, to train on")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, if it is not among the data")
    parser.add_argument("--model", help="folder with the weights that the run's adapters are for")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0: by measured steps")
    return parser


def device_of(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        ValueError: torch does not know it, or does not find it on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name} is not a device that torch knows: use cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch sees no CUDA device here; install the driver and torch's build for it "
            "(https://pytorch.org), or train with --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"--device {name}: torch sees no Apple GPU here, use --device cpu")
    return device


def setting(options: argparse.Namespace) -> tuple[torch.device, Manifest]:
    """Return a learner's device and its run's manifest, and set torch's threads.

    Raises:
        ValueError: the learner cannot train with these options.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    device = device_of(options.device)
    manifest = msgspec.msgpack.decode(read_regular(options.manifest), type=Manifest)
    if manifest.config.model.kind == "external":
        raise ValueError(
            "the run's learners are training scripts: take part with p2pdiloco.DiLoCo, or join with --follow"
        )
    return device, manifest


def _build(options: argparse.Namespace, connection: socket.socket) -> Learner:
    device, manifest = setting(options)
    layout = Layout.of(manifest)
    vectors = SharedVectors.attach(options.memory_fd, layout.elements, ring_elements(layout))
    config = manifest.config
    corpus = load_corpus(config.data, options.data, options.tokenizer, context=config.model.context)
    return Learner(
        manifest=manifest,
        layout=layout,
        device=device,
        vectors=vectors,
        connection=connection,
        corpus=corpus,
        incarnation=options.incarnation,
        base=options.model,
        threads=ThreadChoice(torch.get_num_threads()) if device.type == "cpu" and not options.threads else None,
        reunion=Reunion(options.reunion, options.reattach_s) if options.reunion and options.reattach_s else None,
        keeper=None if options.inner_state is None else Keeper(options.inner_state),
    )


def be_nice() -> None:
    """Lower this process's priority below that of nodes. Threads that torch makes for its first step inherit it."""
    os.nice(_NICENESS)
    # Linux divides the CPU among sessions before it considers niceness. A node's learner has a session of its own.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
