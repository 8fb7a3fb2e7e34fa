"""What the stage's peers are made of: a run whose sums are exact, a learner in this process, metrics in memory."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from p2pdiloco.codec.digests import state_digest
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.ids import FragmentId
from p2pdiloco.protocol.manifest import (
    CodecChoice,
    CodecConfig,
    EvaluationConfig,
    Layout,
    Manifest,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire import learner_ipc
from p2pdiloco.wire.control_messages import StateProof

if TYPE_CHECKING:
    from troupe import Member

FOUNDER = Identity.ephemeral()
STEP_S = 0.5
TOKENS = 10
"""Of one inner step."""


def make_manifest(elements: int = 64, fragments: int = 2, codec: CodecChoice = "bf16") -> Manifest:
    """A run of fragments of one shard each, whose sums are exact for small integers; version 0 is all ones."""
    config = RunConfig(
        name="stage",
        schedule=ScheduleConfig(fragments=fragments, sync_every=2 * fragments, overlap=1, max_shard=1 << 24),
        outer=OuterConfig(learning_rate=0.5, momentum=0.5, merge="direct", momentum_type="bfloat16"),
        codec=CodecConfig(up=codec, down=codec),
        evaluation=EvaluationConfig(every=0),
    )
    tensors = tuple(
        TensorSpec(name=f"{f:03d}", shape=(elements,), merge="direct", fragment=FragmentId(f)) for f in range(fragments)
    )
    zero = state_digest(torch.ones(elements), torch.zeros(elements, dtype=torch.bfloat16))
    return Manifest(founder=FOUNDER.peer_id, config=config, tensors=tensors, genesis=(zero,) * fragments)


def genesis(manifest: Manifest) -> InitialState:
    """Version 0, as the founder brings it."""
    layout = Layout.of(manifest)
    proofs = [
        StateProof(ev.ShardState(genesis_head(manifest.run, s.shard, manifest.genesis[s.shard]), 0, ()), None, b"")
        for s in layout.shards
    ]
    momentum = torch.zeros(layout.elements, dtype=torch.bfloat16)
    return InitialState(proofs, torch.ones(layout.elements), momentum)


class Learner:
    """One life of a learner: a real link, and parameters that the test moves. ``is_mute``: it never becomes ready."""

    pid = 0

    def __init__(self, member: Member, heard: Callable[[learner_ipc.FromLearner], None], ended: Any) -> None:
        self._member = member
        self._heard = heard
        self.ended: Callable[[str, int], None] = ended
        self.is_over = False
        self.is_adopted = member.is_learner_waiting
        # How often the inner optimizer's state was to be kept.
        self.saves = 0

    async def __aenter__(self) -> Self:
        member = self._member
        layout, tensors = member.peer.state.layout, member.peer.manifest.tensors
        self.parameters = [nn.Parameter(torch.zeros(t.shape)) for t in tensors]
        named = [(t.name, p) for t, p in zip(tensors, self.parameters, strict=True)]
        self._node, self._theirs = socket.socketpair()
        self._node.setblocking(False)
        flat = FlatParameters(named, tensors, layout)
        self.link = NodeLink(
            flat,
            member.vectors,
            Channel(self._theirs),
            last_step=1 << 40,
            evaluate=lambda theta: float(theta.sum()),
            save=self._save,
        )
        self._decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        member.lives.append(self)
        self.link.greet(device="cpu")
        self.boundary()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        self._node.close()
        self._theirs.close()

    def _save(self) -> None:
        self.saves += 1

    def send(self, message: learner_ipc.FromNode) -> None:
        """From the node."""
        if not self.is_over:
            self._node.sendall(learner_ipc.encode(message))

    def end(self, reason: str) -> None:
        """The node ends it."""
        self.is_over = True
        self.ended(reason, -9)

    def boundary(self) -> None:
        """The learner does what it was told, and the node hears its answers; nothing once it has ended."""
        if self.is_over:
            return
        self.link.boundary()
        self.link.boundary()
        try:
            data = self._node.recv(1 << 16)
        except BlockingIOError:
            return
        for message in self._decoder.feed(data):
            self._heard(message)

    def step(self, change: float) -> None:
        """One inner step: every parameter moves by ``change``."""
        assert self.link.is_training
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(change)
        self.link.stepped(TOKENS, None, STEP_S)

    def die(self, status: int = 1) -> None:
        """Its process ends."""
        self.is_over = True
        self.ended("it was killed", status)

    def flat(self) -> Tensor:
        """Its parameters, in the order of the layout (which is that of the model here)."""
        return torch.cat([p.detach() for p in self.parameters])


class Recorded(Metrics):
    """Metrics in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lines: list[tuple[str, dict[str, object]]] = []

    def write(self, event: str, **fields: object) -> None:
        """Keep it."""
        self.lines.append((event, fields))

    def events(self) -> list[str]:
        """What happened, in order."""
        return [event for event, _ in self.lines]
