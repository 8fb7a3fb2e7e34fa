"""A learner's side of its node, whatever the training loop: what is done at each step's boundary.

Rules of this file:
1. Training never waits for the node. Commands are read without waiting, at step boundaries only, and executed in order;
   answers that the socket does not take stay queued (``channel.py``). Only ``wait`` sleeps, for who does not train.
2. The global step grows by 1 with each inner step and by ``AdoptStep``; at the run's last step training ends.
3. ``steps`` and ``tokens`` only grow: ``Begin`` follows new parameters, not a new history.
4. Answers leave in the order of the commands. One whose copy is under way on a GPU holds back those behind it only.
5. What is not finite, loss or snapshot, is never merged, nor is what the training loop doubts (``step_check.py``): its
   snapshots are NaN, which no node encodes. That it is so is said once, and that it is over (``Unable``); to the node's
   next life again.
6. When the socket ends, the node is dead. With a ``Reunion`` the learner trains on for a while: the node's next life
   gets all progress since then, on top of the swarm's parameters. To the swarm that is a new learner, whose counters
   begin at the loss. Whoever is not found ends (a script trains on alone).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import FragmentId, ShardId
from p2pdiloco.training.cuda_copies import Finished
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import Vectors
from p2pdiloco.wire.learner_ipc import (
    AdoptStep,
    Batches,
    Begin,
    BlockFinished,
    Evaluate,
    Evaluated,
    Exit,
    Failed,
    ForPeople,
    FromLearner,
    FromNode,
    Pause,
    Paused,
    Progress,
    Ready,
    Rest,
    Rested,
    Save,
    Shift,
    Shifted,
    Snapshot,
    Snapshotted,
    Swarm,
    Train,
    Unable,
)

if TYPE_CHECKING:
    from p2pdiloco.training.multi_rank import RankGroupChannel, RankGroupParameters


# -- Health of what is trained -----------------------------------------------------------------------------------------
# Whether what a learner trains may be merged: its losses and the copies of its fragments are finite, and its training
# loop has no doubt of its steps (``step_check.py``).


ADVICE = (
    ": nothing that is trained here is merged until it is finite again. Stop this learner and start it again, with a "
    "lower learning rate: it then goes on from the swarm's parameters"
)


class Health:
    """Of one learner."""

    def __init__(self) -> None:
        self._spoilt: set[FragmentId | None] = set()
        """Fragments whose last snapshot was not finite; None: nor was the last loss that was told."""
        self._doubt = ""
        self.problem = ""
        """What was told last; empty: all is well."""

    def check_loss(self, loss: float, step: int) -> str | None:
        """The loss of a step is this. What is to be told, if that is news."""
        self._spoilt.discard(None)
        if math.isfinite(loss):
            return None  # whether the parameters are, a snapshot shows
        self._spoilt.add(None)
        return self._judge(f"the loss is {loss} at step {step}{ADVICE}")

    def copied(self, fragment: FragmentId, is_sound: bool, step: int) -> str | None:
        """A snapshot of ``fragment`` is finite, or not. What is to be told, if that is news; "": all is well again."""
        if not is_sound:
            self._spoilt.add(fragment)
            return self._judge(f"parameters are not finite at step {step}{ADVICE}")
        self._spoilt.discard(fragment)
        if not self._spoilt:
            return self._judge(self._doubt)
        return None

    def doubted(self, problem: str) -> str | None:
        """What is trained must not be merged for this reason, however finite it is; empty: it may. What is to be told,
        if that is news; "": all is well again."""
        self._doubt = problem
        return None if self._spoilt else self._judge(problem)

    @property
    def is_doubted(self) -> bool:
        """Whether it must not."""
        return bool(self._doubt)

    def _judge(self, problem: str) -> str | None:
        if bool(problem) == bool(self.problem):
            return None
        self.problem = problem
        return problem


def is_finite(vector: Tensor) -> bool:
    """Whether all of ``vector``, float32 [n], is finite. One pass over it: a sum shows what it is made of, unless it
    overflows."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())


# -- Node link ---------------------------------------------------------------------------------------------------------
# A learner's side of its node, whatever the training loop: what is done at each step's boundary.


log = logging.getLogger("p2pdiloco")

_LOOK_S = 0.05
_COPY_S = 0.001
"""Between two looks at copies under way, for a learner that does nothing else."""
_FAREWELL_S = 2.0
"""How long a learner that ends tries to say what is left."""


class Trainer(Protocol):
    """What a training loop does for its node."""

    def evaluate(self, theta: Tensor) -> float:
        """Held-out loss of the global parameters, float32 [n], in nats a token."""

    def train(self, block: Block) -> None:
        """This block of data is next but those given before."""

    def save(self) -> None:
        """Keep the inner optimizer's state."""

    def merged(self, tokens: int) -> None:
        """So much of the run's budget is merged, if it has one."""

    def begin_again(self) -> None:
        """The node is lost: what it had given (blocks of data) is given no more."""

    def end(self) -> None:
        """The process ends next."""


class Visit(Protocol):
    """The node's next life has come (``reunion.Found``)."""

    def attach(self, elements: int) -> tuple[Vectors, Channel | RankGroupChannel]:
        """Its memory and the link to it. Raises ValueError: the memory is that of another model."""


class Meeting(Protocol):
    """How a learner without a node waits for the next one (``node_reconnect.Reunion``, ``script_node.Return``)."""

    @property
    def is_open(self) -> bool:
        """Whether it looks out."""

    @property
    def is_over(self) -> bool:
        """Whether nobody will come any more."""

    def open(self) -> bool:
        """Look out from now on; False if that is not possible."""

    def poll(self) -> Visit | None:
        """Who came; it is then closed."""

    def close(self) -> None:
        """Look out no more."""


class NodeEnd(NamedTuple):
    """What is shared with one life of the node."""

    vectors: Vectors
    channel: Channel | RankGroupChannel


class Counts:
    """What a learner has done."""

    def __init__(self) -> None:
        self.global_step = 0
        self.steps = 0
        self.tokens = 0
        self.exchange_s = 0.0
        """Copies since the last ``Progress``."""


class NodeLink:
    """The connection, the shared vectors and the model's parameters as the run's flat vector."""

    def __init__(
        self,
        trainer: Trainer,
        flat: FlatParameters | RankGroupParameters,
        vectors: Vectors,
        channel: Channel | RankGroupChannel,
        *,
        last_step: int,
        reunion: Meeting | None = None,
        doubt: Callable[[], str] = lambda: "",
    ) -> None:
        """``doubt``: why what is trained must not be merged, asked before each snapshot; empty: it may."""
        self._trainer = trainer
        self._doubt = doubt
        self._flat = flat
        self._node = NodeEnd(vectors, channel)
        flat.pin((vectors.shift, vectors.snapshot))
        self._answers: deque[tuple[Finished | None, FromLearner]] = deque()
        self.last_step = last_step
        self._reunion = reunion
        self._ready: Ready | None = None
        self._anchor: Tensor | None = None
        """Parameters at the loss of the node, until another has given those of the swarm."""
        self.is_training = False
        self.is_loaded = False
        """It has got the global parameters, once."""
        self.is_dismissed = False
        """The node has said that it is over."""
        self.swarm: Swarm | None = None
        """What a script's node said last of the others."""
        self.counts = Counts()
        self.is_resting = False
        """No steps for now: others want the machine."""
        self._health = Health()

    # ------------------------------------------------------------------------------------------------ to the node

    def greet(self, *, device: str, inner_steps: int = 0, has_blocks: bool = False) -> None:
        """The model is built."""
        elements = self._flat.layout.elements
        self._ready = Ready(device=device, parameters=elements, inner_steps=inner_steps, has_blocks=has_blocks)
        self._node.channel.post(self._ready)

    def stepped(self, tokens: int, loss: float | None, step_time_s: float) -> None:
        """An inner step is done; None: its loss is not known."""
        self.counts.steps += 1
        self.counts.tokens += tokens
        self.counts.global_step += 1
        if loss is not None:
            self._tell_health(self._health.check_loss(loss, self.counts.global_step))
            loss = loss if math.isfinite(loss) else None
        progress = Progress(
            steps=self.counts.steps,
            tokens=self.counts.tokens,
            loss=loss,
            step_time_s=step_time_s,
            blocked_s=self._node.channel.blocked_s,
            exchange_s=self.counts.exchange_s,
        )
        if self._node.channel.post(progress):
            self._node.channel.blocked_s = self.counts.exchange_s = 0.0

    def block_finished(self, block: Block) -> None:
        """A whole block of data is trained, at the count of tokens of now."""
        self._answer(BlockFinished(block=block, tokens=self.counts.tokens))

    def batches(self, digests: tuple[str, ...]) -> None:
        """Of the first ones that were trained."""
        self._node.channel.post(Batches(digests=digests))

    def tell(self, message: ForPeople) -> None:
        """For people."""
        self._node.channel.post(message)

    def fail(self, reason: str) -> None:
        """The learner ends; try to say why."""
        self._node.channel.post(Failed(reason=reason[:2000]))
        if not self._node.channel.flush(_FAREWELL_S):
            log.error("the learner ends, and cannot tell its node: %s", reason)

    # ------------------------------------------------------------------------------------------------ the boundary

    def wait(self) -> None:
        """Sleep until the node says something. Not while steps are to be made."""
        if self._reunion is not None and self._reunion.is_open:
            time.sleep(_LOOK_S)
        elif self._answers:
            time.sleep(_COPY_S)
        else:
            self._node.channel.wait()

    def boundary(self) -> bool:
        """Do what the node asked for, without waiting. False when the learner is to end."""
        if self.is_dismissed:
            return False
        if self._reunion is not None and self._reunion.is_open:
            return self._look_out(self._reunion)
        self._release()
        commands = self._node.channel.exchange()
        if not self.is_training or self.is_resting:
            self._node.channel.blocked_s = 0.0
        for command in commands:
            if isinstance(command, Exit):
                self._settle()
                self._node.channel.flush(_FAREWELL_S)
                self._trainer.end()
                self.is_dismissed, self.is_training = True, False
                return False
            self._execute(command)
        if self._node.channel.is_closed:  # after what it has said last
            return self._lost_node()
        if self.is_training and self.counts.global_step >= self.last_step:
            self._stop()
        return True

    def _execute(self, command: FromNode) -> None:
        match command:
            case Begin(step=step):
                self._anchor = None
                self.counts.global_step = step
                self.is_training = self.is_loaded = True
            case Shift() | Snapshot():
                began = time.perf_counter()
                self._copy(command)
                self.counts.exchange_s += time.perf_counter() - began
            case AdoptStep(step=step, tokens=tokens):
                self.counts.global_step = max(self.counts.global_step, step)
                self._trainer.merged(tokens)
            case Evaluate(version=version):
                self._answer(Evaluated(version=version, loss=self._trainer.evaluate(self._node.vectors.theta)))
            case Pause():
                self._stop()
            case Rest():
                self.is_resting = command.is_resting
                if self.is_resting:
                    self._answer(Rested())
            case Train(block=block):
                self._trainer.train(block)
            case Save():
                self._save()
            case Swarm():
                self.swarm = command
            case Exit():
                pass
            case _:
                assert_never(command)

    def _copy(self, command: Shift | Snapshot) -> None:
        match command:
            case Shift(shards=shards, replace=True) if self._anchor is not None:
                self._regain(self._anchor, shards)
                self._answer(Shifted(shards=shards))
            case Shift(shards=shards, replace=replace):
                take = self._flat.copy_from if replace else self._flat.add_from
                self._answer(Shifted(shards=shards), take(self._node.vectors.shift, shards))
            case Snapshot(fragment=fragment, step=step):
                self._tell_health(self._health.doubted(self._doubt()))
                answer = Snapshotted(fragment=fragment, step=step, steps=self.counts.steps, tokens=self.counts.tokens)
                self._answer(answer, self._flat.copy_to(self._node.vectors.snapshot, self._flat.of_fragment(fragment)))
            case _:
                assert_never(command)

    def _regain(self, anchor: Tensor, shards: Sequence[ShardId]) -> None:
        """Parameters = the swarm's, with all that was trained since the loss of the node on top; and should the next
        node be lost before it has given the others, what is trained from now on counts from these."""
        shift, pieces = self._node.vectors.shift, [self._flat.layout.shards[shard] for shard in shards]
        for piece in pieces:
            anchor[piece.start : piece.stop].neg_().add_(shift[piece.start : piece.stop])
        self._until(self._flat.add_from(anchor, shards))
        for piece in pieces:
            anchor[piece.start : piece.stop].copy_(shift[piece.start : piece.stop])

    def _until(self, finished: Finished | None) -> None:
        """Wait for a copy; it takes milliseconds."""
        while finished is not None and not finished():
            time.sleep(_COPY_S)

    def _answer(self, message: FromLearner, finished: Finished | None = None) -> None:
        """Say ``message`` when its copy, and those of all messages before it, have ended."""
        self._answers.append((finished, message))
        self._release()

    def _release(self) -> None:
        while self._answers and ((finished := self._answers[0][0]) is None or finished()):
            message = self._answers.popleft()[1]
            if isinstance(message, Snapshotted):
                self._judge_snapshot(message.fragment)
            self._node.channel.post(message)

    def _judge_snapshot(self, fragment: FragmentId) -> None:
        shards = (self._flat.layout.shards[shard] for shard in self._flat.of_fragment(fragment))
        pieces = [self._node.vectors.snapshot[shard.start : shard.stop] for shard in shards]
        if self._health.is_doubted:
            for piece in pieces:
                piece.fill_(math.nan)
            return
        is_sound = all(map(is_finite, pieces))
        self._tell_health(self._health.copied(fragment, is_sound, self.counts.global_step))

    def _tell_health(self, problem: str | None) -> None:
        """Say that what is trained cannot be merged, or that it can again, if that is news."""
        if problem is not None:
            log.warning(problem or "what is trained here can be merged again")
            self._node.channel.post(Unable(reason=problem))

    def _settle(self) -> None:
        """Wait for copies under way; they take milliseconds."""
        until = time.monotonic() + _FAREWELL_S
        while self._answers and time.monotonic() < until:
            self._release()
            time.sleep(_COPY_S)

    def _stop(self) -> None:
        if self.is_training:
            self._save()
        self.is_training = False
        if not self.is_alone:  # else it is for the node to say where the run is, with Begin: it may be less far
            self._answer(Paused(steps=self.counts.steps, tokens=self.counts.tokens))

    def _save(self) -> None:
        began = time.perf_counter()
        self._trainer.save()
        self.counts.exchange_s += time.perf_counter() - began

    # ------------------------------------------------------------------------------------------------ without a node

    def _lost_node(self) -> bool:
        """Begin another life by itself; False if there is nothing to wait for."""
        if self._reunion is None or not self.is_training or not self._reunion.open():
            return False
        if self._anchor is None:
            self._anchor = torch.empty_like(self._node.vectors.shift)
            self._until(self._flat.copy_to(self._anchor, self._flat.everything))
            self.counts.steps = self.counts.tokens = 0
        self._answers.clear()
        self._trainer.begin_again()
        return True

    def load_global(self) -> None:
        """Parameters := the global ones."""
        self._flat.copy_from(self._node.vectors.theta, self._flat.everything)

    @property
    def is_alone(self) -> bool:
        """Whether the node is lost, and no other has given the swarm's parameters yet."""
        return self._anchor is not None

    def _look_out(self, reunion: Meeting) -> bool:
        """Is the node's next life there? False when it is too late for that."""
        if self.is_training and self.counts.global_step >= self.last_step:
            self.is_training = False
        found = reunion.poll()
        if found is not None:
            self._flat.unpin((self._node.vectors.shift, self._node.vectors.snapshot))
            self._node.vectors.close()
            self._node = NodeEnd(*found.attach(self._flat.layout.elements))
            self._flat.pin((self._node.vectors.shift, self._node.vectors.snapshot))
            assert self._ready is not None
            self._node.channel.post(self._ready)
            if self._health.problem:
                self._node.channel.post(Unable(reason=self._health.problem))
            self.is_resting = False  # the node's next life says it anew
        if reunion.is_open and reunion.is_over:
            reunion.close()
            return False
        return True


# -- Trainer of a script -----------------------------------------------------------------------------------------------
# What a node may ask of a training loop, where that is the user's own script: nothing.


class ScriptTrainer:
    """An ``outer_link.Trainer``."""

    def evaluate(self, theta: Tensor) -> float:
        """Runs of scripts (``evaluation.every`` is 0) are evaluated by the scripts."""
        raise AssertionError("no node asks for this")

    def train(self, block: Block) -> None:
        """The script has data of its own."""

    def save(self) -> None:
        """The script saves its own optimizer."""

    def merged(self, tokens: int) -> None:
        """A script's rate is its own affair."""

    def begin_again(self) -> None:
        """Nothing was given."""

    def end(self) -> None:
        """Nothing to finish."""
