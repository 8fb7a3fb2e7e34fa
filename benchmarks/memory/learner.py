"""Memory that a run adds to a learner: a real learner in this process, driven by a script instead of a node.

It trains alone, then with everything that a node requests: snapshots, shifts, evaluations, saving its own state. The
difference of the two peaks is what the run adds. Memory that it shares with its node counts as the node's.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.memory import residence
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.learner import Learner
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId
from p2pdiloco.protocol.manifest import (
    EvaluationConfig,
    InnerConfig,
    Layout,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
)
from p2pdiloco.script_node import ParentNode
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.models import build_model, named_tensors
from p2pdiloco.training.optimizer_state import InnerStateFile
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire import learner_ipc

DEPTH = 6
CONTEXT = 32
STEPS = 6
PATIENCE_S = 120.0
T = TypeVar("T")


def manifest_of(parameters: int) -> Manifest:
    """A run whose transformer has about so many parameters: 12 times the width squared for each layer."""
    width = max(64, int((parameters / (12 * DEPTH)) ** 0.5) // 64 * 64)
    config = RunConfig(
        name="memory",
        model=ModelConfig(width=width, depth=DEPTH, heads=width // 64, context=CONTEXT),
        inner=InnerConfig(steps=1 << 30, batch=1, warmup=0),
        schedule=ScheduleConfig(fragments=8),
        evaluation=EvaluationConfig(samples=1),
    )
    specs = tensor_specs(named_tensors(build_model(config.model, 0)), 8)
    return Manifest(founder=PeerId("memory"), config=config, tensors=specs, genesis=(Digest("0" * 40),))


class ScriptedNode:
    """The node's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._socket = connection
        self._decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        self._seen: list[learner_ipc.FromLearner] = []

    def say(self, message: learner_ipc.FromNode) -> None:
        """A command."""
        self._socket.sendall(learner_ipc.encode(message))

    def until(self, holds: Callable[[learner_ipc.FromLearner], bool]) -> None:
        """Wait for a message."""
        while True:
            while self._seen:
                if holds(self._seen.pop(0)):
                    return
            self._seen += self._decoder.feed(self._socket.recv(1 << 16))

    def steps(self, number: int) -> None:
        """So many more."""
        for _ in range(number):
            self.until(lambda message: isinstance(message, learner_ipc.Progress))


def script(node: ScriptedNode, layout: Layout, path: Path, found: dict[str, int]) -> None:
    """What is asked of the learner; ``found`` gets the peaks in bytes."""
    node.until(lambda message: isinstance(message, learner_ipc.Ready))
    node.say(learner_ipc.Shift(shards=tuple(shard.shard for shard in layout.shards), replace=True))
    node.say(learner_ipc.Begin(step=0))
    node.steps(2)
    with residence.Peak("RssAnon") as alone:
        node.steps(STEPS)
    with residence.Peak("RssAnon") as together:
        for fragment, shards in enumerate(layout.fragments):
            node.say(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=1))
            node.say(learner_ipc.Shift(shards=shards, replace=False))
        node.steps(STEPS)
        node.say(learner_ipc.Evaluate(version=1))
        node.until(lambda message: isinstance(message, learner_ipc.Evaluated))
        node.steps(STEPS)
        node.say(learner_ipc.Save())
        while not path.exists():
            node.steps(1)
        node.steps(STEPS)
    rest = residence.resident("RssAnon")
    with residence.Peak("RssAnon") as after:
        node.steps(STEPS)
    found.update(alone=alone.most, together=together.most, after=after.most, rest=rest)
    node.say(learner_ipc.Exit())


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parameters", type=float, default=8e6)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    manifest = manifest_of(int(options.parameters))
    layout = Layout.of(manifest)
    text = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    ours, theirs = socket.socketpair()
    found: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="p2pdiloco-memory-") as folder,
        SharedVectors.create(layout.elements, ring_elements(layout)) as vectors,
    ):
        path = Path(folder) / "learner.safetensors"
        described = Path(folder) / "manifest.msgpack"
        described.write_bytes(manifest.encode())
        corpus = Corpus(train=text, held_out=text[: 1 << 12])
        node = ParentNode(described, theirs, vectors.fd)
        learner = Learner(node, manifest, corpus, incarnation="memory/1", inner_state_file=InnerStateFile(path))
        vectors.theta.normal_(std=0.02)
        vectors.shift[: layout.elements] = vectors.theta
        told = threading.Thread(target=script, args=(ScriptedNode(ours), layout, path, found), name="node")
        told.start()
        learner.run()
        told.join()
    print(json.dumps({"parameters": layout.elements, **found}))


if __name__ == "__main__":
    main()
