"""Node link: a learner's connection to its node, for any training loop. Does the node's work at each step's boundary.

Rules of this file:
1. Training never waits for the node. Commands are read without waiting, at step boundaries only, and executed in order.
   Answers that the socket does not accept stay queued (``ipc_channel.py``). Only ``wait`` sleeps, for a learner that
   makes no steps.
2. The global step grows by 1 with each inner step, and by ``AdoptStep``. At the run's last step training ends.
3. ``steps`` and ``tokens`` only grow: ``Begin`` follows new parameters and does not reset them.
4. Answers are sent in the order of the commands. An answer whose copy is still running on a GPU delays only those
   behind it.
5. Nothing is merged that is not finite (loss or snapshot), or that the training loop doubts (``step_check.py``): such
   snapshots are NaN, which no node encodes. The beginning and the end of such a period are reported once (``Unable``),
   and again to a new node.
6. If the socket ends, the node is dead. With a ``NodeListener`` the learner trains on for a while. The next node
   gets all progress made since then, on top of the swarm's parameters. To the swarm it is a new learner, whose counters
   begin when the old node died. If no node comes in time, the learner ends (a script trains on alone).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, assert_never

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import FragmentId, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training.cuda_copies import Finished
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.parameters import FlatParameters, OnUpdate, moves
from p2pdiloco.training.shared_memory import Vectors, slot_elements
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
    MoveEnd,
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


# -- Health of the learner's updates -----------------------------------------------------------------------------------
# A learner's updates may be merged if its losses and the copies of its fragments are finite, and its training loop does
# not doubt its steps (``step_check.py``).


ADVICE = (
    ": nothing that is trained here is merged until it is finite again. Stop this learner and start it again with a "
    "lower learning rate: it then continues from the swarm's parameters"
)


class Health:
    """Decides whether one learner's updates may be merged, and which changes of that to report."""

    def __init__(self) -> None:
        # Fragments whose last snapshot was not finite; None: the last reported loss was not finite.
        self._spoilt: set[FragmentId | None] = set()
        self._doubt = ""
        # The problem that was reported last; empty: none.
        self.problem = ""

    def check_loss(self, loss: float, step: int) -> str | None:
        """Check the loss of a step. Returns a problem to report, if it is new."""
        self._spoilt.discard(None)
        if math.isfinite(loss):
            return None  # snapshots show whether the parameters are finite
        self._spoilt.add(None)
        return self._judge(f"the loss is {loss} at step {step}{ADVICE}")

    def copied(self, fragment: FragmentId, is_sound: bool, step: int) -> str | None:
        """Record whether a snapshot of ``fragment`` is finite.

        Returns a problem to report, if it is new; "": all is well again; None: nothing to report.
        """
        if not is_sound:
            self._spoilt.add(fragment)
            return self._judge(f"parameters are not finite at step {step}{ADVICE}")
        self._spoilt.discard(fragment)
        if not self._spoilt:
            return self._judge(self._doubt)
        return None

    def doubted(self, problem: str) -> str | None:
        """Set the training loop's reason why its updates must not be merged, even if finite; empty: it has none.

        Returns a problem to report, if it is new; "": all is well again; None: nothing to report.
        """
        self._doubt = problem
        return None if self._spoilt else self._judge(problem)

    @property
    def is_doubted(self) -> bool:
        """True if the training loop has such a reason."""
        return bool(self._doubt)

    def _judge(self, problem: str) -> str | None:
        if bool(problem) == bool(self.problem):
            return None
        self.problem = problem
        return problem


def is_finite(vector: Tensor) -> bool:
    """Return whether all of ``vector``, float32 [n], is finite.

    Mostly one pass: a finite sum proves it. If the sum overflows, the elements are checked.
    """
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())


# -- Node link ---------------------------------------------------------------------------------------------------------


log = logging.getLogger("p2pdiloco")

_LOOK_S = 0.05
# Longest sleep of a learner that makes no steps. It has nothing else to do than to listen to its node.
_WAIT_S = 0.5
# Interval between two checks of running copies, for a learner that does nothing else.
_COPY_S = 0.001
# How long a learner that ends tries to send its remaining messages.
FAREWELL_S = 2.0


class NewNode(Protocol):
    """A new node that has connected (``node_reconnect.NodeConnection``)."""

    def attach(self, layout: Layout) -> tuple[Vectors, Channel | RankGroupChannel]:
        """Return the node's memory and the link to it.

        Raises:
            ValueError: the memory is that of another model.
        """


class NodeSearch(Protocol):
    """Waits for the next node of a learner that has lost its node (``node_reconnect.NodeListener``,
    ``script_node.RestartedNode``)."""

    @property
    def is_open(self) -> bool:
        """True while it waits for a node."""

    @property
    def is_over(self) -> bool:
        """True if no node will come any more."""

    def open(self) -> bool:
        """Begin to wait. Returns False if that is not possible."""

    def poll(self) -> NewNode | None:
        """Return the node that has connected, if any; the search is then closed."""

    def close(self) -> None:
        """Stop waiting."""


class NodeEnd(NamedTuple):
    """Memory and channel shared with one life of the node."""

    vectors: Vectors
    channel: Channel | RankGroupChannel


class Counts(Struct):
    """Counters of a learner."""

    global_step: int = 0
    steps: int = 0
    tokens: int = 0
    overhead_s: float = 0.0
    """Seconds between steps since the last ``Progress``."""


class NodeLink:
    """Connects the node's channel, the shared vectors, and the model's parameters as the run's flat vector."""

    def __init__(
        self,
        flat: FlatParameters | RankGroupParameters,
        vectors: Vectors,
        channel: Channel | RankGroupChannel,
        *,
        last_step: int,
        token_budget: int = 0,
        node_search: NodeSearch | None = None,
        doubt: Callable[[], str] = lambda: "",
        on_update: OnUpdate | None = None,
        evaluate: Callable[[Tensor], float] | None = None,
        save: Callable[[], None] = lambda: None,
        blocks: deque[Block] | None = None,
    ) -> None:
        """
        Args:
            last_step, token_budget: end of the run; 0: it has no budget.
            doubt: returns why updates must not be merged; empty: they may. It is called before each snapshot.
            on_update: called with each parameter that an update of other peers changes; not in a rank group.
            evaluate: returns the held-out loss of the global parameters, float32 [n], in nats per token. None: the node
                gets no answer.
            save: saves what the node does not have: the inner optimizer's state, buffers.
            blocks: gets the blocks of data that the node assigns. The training loop removes each one that it finished.
        """
        self._doubt = doubt
        self._evaluate = evaluate
        self._save = save
        self._blocks: deque[Block] = deque() if blocks is None else blocks
        self._flat = flat
        self._on_update = on_update
        self._node = NodeEnd(vectors, channel)
        # Slots of the node's memory that are page-locked, by ring and first element.
        self._pinned: dict[tuple[str, int], Tensor] = {}
        # Parts of ``snapshot`` that hold the copies under way.
        self._copies: dict[FragmentId, list[Tensor]] = {}
        self._answers: deque[tuple[Finished | None, FromLearner]] = deque()
        self.last_step = last_step
        self.token_budget = token_budget
        # Tokens that the run has merged of its budget.
        self.merged_tokens = 0
        self._node_search = node_search
        self._ready: Ready | None = None
        # The learner's parameters when its node was lost. None unless a new node still has to send the swarm's.
        self._anchor: Tensor | None = None
        self.is_training = False
        # True once it has received the global parameters.
        self.is_loaded = False
        # True when the node has sent ``Exit``.
        self.is_dismissed = False
        # The latest news of the other peers that a script's node has sent.
        self.swarm: Swarm | None = None
        self.counts = Counts()
        # True while no steps are made, because others need the machine.
        self.is_resting = False
        # When the last step ended (``time.perf_counter``); None: the learner paused or rested since, or made none.
        self._stepped_at: float | None = None
        self._health = Health()
        # Latest reward that the script has reported.
        self.reward: float | None = None

    # ------------------------------------------------------------------------------------------------ to the node

    def greet(self, *, device: str, inner_steps: int = 0, has_blocks: bool = False) -> None:
        """Tell the node that the model is built."""
        elements = self._flat.layout.elements
        self._ready = Ready(device=device, parameters=elements, inner_steps=inner_steps, has_blocks=has_blocks)
        self._node.channel.post(self._ready)

    def stepped(self, tokens: int, loss: float | None, step_time_s: float) -> None:
        """Record an inner step, which ends now and took ``step_time_s``. ``loss``: None if it is not known."""
        self.counts.steps += 1
        self.counts.tokens += tokens
        self.counts.global_step += 1
        now = time.perf_counter()
        if self._stepped_at is not None:
            self.counts.overhead_s += max(0.0, now - self._stepped_at - step_time_s)
        self._stepped_at = now
        if loss is not None:
            self._tell_health(self._health.check_loss(loss, self.counts.global_step))
            loss = loss if math.isfinite(loss) else None
        progress = Progress(
            steps=self.counts.steps,
            tokens=self.counts.tokens,
            loss=loss,
            reward=self.reward,
            step_time_s=step_time_s,
            blocked_s=self._node.channel.blocked_s,
            overhead_s=self.counts.overhead_s,
        )
        if self._node.channel.post(progress):
            self._node.channel.blocked_s = self.counts.overhead_s = 0.0

    def block_finished(self, block: Block) -> None:
        """Report that a block of data was trained, at the present count of tokens."""
        self._answer(BlockFinished(block=block, tokens=self.counts.tokens))

    def batches(self, digests: tuple[str, ...]) -> None:
        """Send digests of the first batches that were trained."""
        self._node.channel.post(Batches(digests=digests))

    def tell(self, message: ForPeople) -> None:
        """Send a message that is meant for people."""
        self._node.channel.post(message)

    def fail(self, reason: str) -> None:
        """Tell the node why the learner ends."""
        self._node.channel.post(Failed(reason=reason[:2000]))
        if not self._node.channel.flush(FAREWELL_S):
            log.error("the learner ends and cannot tell its node why: %s", reason)

    # ------------------------------------------------------------------------------------------------ the boundary

    def wait(self) -> None:
        """Sleep until the node sends something, but not long. Do not call it while steps are to be made."""
        if self._node_search is not None and self._node_search.is_open:
            time.sleep(_LOOK_S)
        elif self._answers:
            time.sleep(_COPY_S)
        else:
            self._node.channel.wait(_WAIT_S)

    def boundary(self) -> bool:
        """Execute the node's commands, without waiting. Returns False when the learner must end."""
        if self.is_dismissed:
            return False
        if self._node_search is not None and self._node_search.is_open:
            return self._look_for_node(self._node_search)
        self._release()
        commands = self._node.channel.exchange()
        if not self.is_training or self.is_resting:
            self._node.channel.blocked_s = 0.0
            self._stepped_at = None
        for command in commands:
            if isinstance(command, Exit):
                self._settle()
                self._node.channel.flush(FAREWELL_S)
                self.is_dismissed, self.is_training = True, False
                return False
            self._execute(command)
        if self._node.channel.is_closed:  # checked after its last commands were executed
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
                self._copy(command)
            case AdoptStep(step=step, tokens=tokens):
                self.counts.global_step = max(self.counts.global_step, step)
                self.merged_tokens = max(self.merged_tokens, tokens)
            case Evaluate(version=version):
                if self._evaluate is not None:
                    self._answer(Evaluated(version=version, loss=self._evaluate(self._node.vectors.theta)))
            case MoveEnd(last_step=last_step, tokens=tokens):
                self.last_step, self.token_budget = last_step, tokens
                self.is_training = self.is_loaded  # one that has reached this end stops again at the boundary
            case Pause():
                self._stop()
            case Rest():
                self.is_resting = command.is_resting
                if self.is_resting:
                    self._answer(Rested())
            case Train(block=block):
                self._blocks.append(block)
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
            case Shift(shards=shards, replace=True, at=at) if self._anchor is not None:
                self._regain(self._anchor, shards, at)
                self._answer(Shifted(shards=shards))
            case Shift(shards=shards, replace=replace, at=at):
                self._pin("shift", at)
                finished = self._apply(self._node.vectors.shift, shards, at, replace=replace)
                self._answer(Shifted(shards=shards), finished)
            case Snapshot(fragment=fragment, step=step, at=at):
                self._tell_health(self._health.doubted(self._doubt()))
                self._pin("snapshot", at)
                answer = Snapshotted(fragment=fragment, step=step, steps=self.counts.steps, tokens=self.counts.tokens)
                snapshot, shards = self._node.vectors.snapshot, self._flat.layout.fragments[fragment]
                self._copies[fragment] = self._parts(snapshot, shards, at)
                self._answer(answer, self._flat.copy_to(snapshot, shards, at))
            case _:
                assert_never(command)

    def _pin(self, ring: Literal["shift", "snapshot"], at: Sequence[int]) -> None:
        """Page-lock the slots that begin at these elements, for as long as this node is there: the node uses few."""
        vector: Tensor = getattr(self._node.vectors, ring)
        for start in at:
            if (ring, start) not in self._pinned:
                slot = self._pinned[ring, start] = vector[start : start + slot_elements(self._flat.layout)]
                self._flat.pin((slot,))

    def _parts(self, vector: Tensor, shards: Sequence[ShardId], at: Sequence[int]) -> list[Tensor]:
        pieces = ((self._flat.layout.shards[shard], moved) for shard, moved in moves(self._flat.layout, shards, at))
        return [vector[piece.start + moved : piece.stop + moved] for piece, moved in pieces]

    def _apply(
        self, vector: Tensor, shards: Sequence[ShardId], at: Sequence[int] = (), *, replace: bool = False
    ) -> Finished | None:
        """Change these shards of the parameters, and tell ``on_update``."""
        changes: list[tuple[Tensor, Tensor]] = []
        if self._on_update is not None and isinstance(self._flat, FlatParameters):
            changes = self._flat.changes(vector, shards, at, replace=replace)
        finished = (self._flat.copy_from if replace else self._flat.add_from)(vector, shards, at)
        for parameter, change in changes:
            assert self._on_update is not None
            self._on_update(parameter, change)
        return finished

    def _regain(self, anchor: Tensor, shards: Sequence[ShardId], at: Sequence[int]) -> None:
        """Set these shards to the swarm's parameters plus everything trained since the node was lost.

        The anchor becomes the swarm's parameters. If this node is lost too before it has sent the other shards,
        progress counts from there.
        """
        given = self._parts(self._node.vectors.shift, shards, at)
        for part, new in zip(self._parts(anchor, shards, ()), given, strict=True):
            part.neg_().add_(new)
        self._until(self._apply(anchor, shards))
        for part, new in zip(self._parts(anchor, shards, ()), given, strict=True):
            part.copy_(new)

    def _until(self, finished: Finished | None) -> None:
        """Wait for a copy, which takes milliseconds."""
        while finished is not None and not finished():
            time.sleep(_COPY_S)

    def _answer(self, message: FromLearner, finished: Finished | None = None) -> None:
        """Send ``message`` when its copy, and those of all messages before it, have ended."""
        self._answers.append((finished, message))
        self._release()

    def _release(self) -> None:
        while self._answers and ((finished := self._answers[0][0]) is None or finished()):
            message = self._answers.popleft()[1]
            if isinstance(message, Snapshotted):
                self._judge_snapshot(message.fragment)
            self._node.channel.post(message)

    def _judge_snapshot(self, fragment: FragmentId) -> None:
        pieces = self._copies.pop(fragment)
        if self._health.is_doubted:
            for piece in pieces:
                piece.fill_(math.nan)
            return
        is_sound = all(map(is_finite, pieces))
        self._tell_health(self._health.copied(fragment, is_sound, self.counts.global_step))

    def _tell_health(self, problem: str | None) -> None:
        """Report that updates cannot be merged, or can be again (empty). None: nothing to report."""
        if problem is not None:
            log.warning(problem or "this learner's updates can be merged again")
            self._node.channel.post(Unable(reason=problem))

    def _settle(self) -> None:
        """Wait for running copies, which take milliseconds."""
        until = time.monotonic() + FAREWELL_S
        while self._answers and time.monotonic() < until:
            self._release()
            time.sleep(_COPY_S)

    def _stop(self) -> None:
        if self.is_training:
            self._save()
        self.is_training = False
        if not self.is_alone:  # without a node, the next one decides with Begin where the run is, possibly further back
            self._answer(Paused(steps=self.counts.steps, tokens=self.counts.tokens, step=self.counts.global_step))

    # ------------------------------------------------------------------------------------------------ without a node

    def _lost_node(self) -> bool:
        """Begin another life without the node, and the blocks that it assigned. Returns False if there is nothing to
        wait for."""
        if self._node_search is None or not self.is_training or not self._node_search.open():
            return False
        if self._anchor is None:
            self._anchor = torch.empty_like(self._node.vectors.theta)
            self._until(self._flat.copy_to(self._anchor, self._flat.everything))
            self.counts.steps = self.counts.tokens = 0
        self._answers.clear()
        self._blocks.clear()
        return True

    def load_global(self) -> None:
        """Set the parameters to the global ones."""
        self._flat.copy_from(self._node.vectors.theta, self._flat.everything)

    @property
    def is_alone(self) -> bool:
        """True if the node is lost, and no other has sent the swarm's parameters yet."""
        return self._anchor is not None

    def _look_for_node(self, node_search: NodeSearch) -> bool:
        """Look for the next node. Returns False when the wait is over."""
        if self.is_training and self.counts.global_step >= self.last_step:
            self.is_training = False
        found = node_search.poll()
        if found is not None:
            self._flat.unpin(tuple(self._pinned.values()))
            self._pinned.clear()
            self._copies.clear()
            self._node.vectors.close()
            self._node = NodeEnd(*found.attach(self._flat.layout))
            assert self._ready is not None
            self._node.channel.post(self._ready)
            if self._health.problem:
                self._node.channel.post(Unable(reason=self._health.problem))
            self.is_resting = False  # the new node sends ``Rest`` again if needed
        if node_search.is_open and node_search.is_over:
            node_search.close()
            return False
        return True
