"""A simulated learner: it steps, and never waits; what the node asks for happens at its next step boundary.

Rules of this file:
1. Commands run in the order in which they were given, at step boundaries (a paused learner runs them at once).
2. Its own component of a shard is ``value_of(tokens) + moved[shard]``: training adds tokens, shifts move. While every
   token is either merged or in the learner's delta, ``moved`` stays 0.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.events import BlockFinished, LearnerPaused, Snapshotted, Stepped
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId
from tests.machine_sim.integer_shards import tokens_in, value_of

if TYPE_CHECKING:
    from tests.machine_sim.process import Process


class Shift(msgspec.Struct, frozen=True, gc=False):
    """Move one shard; a reset moves the own component to what is merged."""

    shard: ShardId
    own: int
    is_reset: bool


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Copy a fragment."""

    fragment: FragmentId
    step: int


class Adopt(msgspec.Struct, frozen=True, gc=False):
    """The swarm's step."""

    step: int


class Pause(msgspec.Struct, frozen=True, gc=False):
    """Make no more steps."""


class MoveEnd(msgspec.Struct, frozen=True, gc=False):
    """The run's last step is another one; go on if it is not reached."""

    last_step: int


Command = Shift | Copy | Adopt | Pause | MoveEnd


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """What a copy holds of one shard."""

    own: int
    shifts: int
    """How much the shard had been moved by then, in all."""
    resets: int


class Work:
    """A learner's blocks of data."""

    def __init__(self, finished: list[tuple[int, Block]]) -> None:
        self.blocks: deque[Block] = deque()
        """Given and not trained."""
        self._steps = 0
        """Made of the first of them."""
        self._finished = finished
        """With the tokens at their ends."""

    def step(self, block_steps: int, tokens: int) -> Block | None:
        """An inner step; the block that it finishes."""
        if not self.blocks:
            return None
        self._steps += 1
        if self._steps < block_steps:
            return None
        self._steps = 0
        block = self.blocks.popleft()
        self._finished.append((tokens, block))
        return block


class Orders:
    """The node's side: what it has told its learner, and its copies of what the learner gave last."""

    def __init__(self, shards: int) -> None:
        self.snapshots: dict[ShardId, Snapshot] = {}
        self._shifts = [0] * shards
        """Sums of what the learner was told to move."""
        self._resets = [0] * shards

    def move(self, shard: ShardId, own: int, *, is_reset: bool) -> None:
        """The learner is told to move."""
        if is_reset:
            self._resets[shard] += 1
        else:
            self._shifts[shard] += own

    def effective(self, shard: ShardId) -> int | None:
        """The last copy, moved by all that the learner had not yet moved by then; None if that cannot be told."""
        snapshot = self.snapshots.get(shard)
        if snapshot is None or snapshot.resets != self._resets[shard]:
            return None
        return snapshot.own + self._shifts[shard] - snapshot.shifts


class Learner:
    """One life of a learner."""

    def __init__(self, process: Process, name: LearnerId, global_step: int) -> None:
        shards = process.machine.core.config.shards
        self.process = process
        self.name = name
        self.global_step = global_step
        self.last_step = process.machine.core.end.steps
        self.steps = 0
        self.tokens = 0
        self.moved = [0] * shards
        self.shifts = [0] * shards
        self.resets = [0] * shards
        self.work = Work(process.world.checks.finished.setdefault(name, []))
        self.commands: list[Command] = []
        self.is_paused = False
        self.is_dead = False
        self.tokens_lost = 0
        self.orders = Orders(shards)
        self._next_step()

    def _next_step(self) -> None:
        world = self.process.world
        jitter = self.process.setting.step_jitter
        duration_s = self.process.setting.step_s * (1.0 + jitter * (2.0 * world.random.random() - 1.0))
        pace = world.conditions.paces.get(self.process.name)
        if pace is not None:
            duration_s = pace(world.now, duration_s)
        world.schedule(world.now + duration_s, self.process, self._step, duration_s)

    def _step(self, duration_s: float) -> None:
        process = self.process
        if self.is_dead or self.is_paused:
            return
        if process.world.conditions.is_frozen:
            process.world.schedule(process.world.now + self.process.setting.step_s, process, self._step, duration_s)
            return
        self.steps += 1
        self.tokens += self.process.setting.tokens_per_step
        self.global_step += 1
        process.tell(Stepped(self.steps, self.tokens, duration_s * process.clock.rate))
        block = self.work.step(process.setting.block_steps, self.tokens)
        if block is not None:
            process.tell(BlockFinished(block, self.tokens))
        if self.global_step >= self.last_step:
            self._pause()
        self._run_commands()
        if not self.is_paused:
            self._next_step()

    def order(self, command: Command) -> None:
        """Queue a command."""
        self.commands.append(command)
        if self.is_paused:
            self.process.world.schedule(self.process.world.now + 0.001, self.process, self._wake, None)

    def _wake(self, _: None) -> None:
        if not self.is_dead:
            self._run_commands()

    def _pause(self) -> None:
        if not self.is_paused:
            self.is_paused = True
            self._report(LearnerPaused(self.steps, self.tokens, self.global_step))

    def _run_commands(self) -> None:
        while self.commands:
            commands, self.commands = self.commands, []
            for command in commands:
                match command:
                    case Shift():
                        self._shift(command)
                    case Copy():
                        self._copy(command)
                    case Adopt():
                        self.global_step = max(self.global_step, command.step)
                    case Pause():
                        self._pause()
                    case MoveEnd():
                        self._move_end(command.last_step)

    def _move_end(self, last_step: int) -> None:
        self.last_step = last_step
        if self.is_paused and self.global_step < last_step:
            self.is_paused = False
            self._next_step()

    def _shift(self, shift: Shift) -> None:
        shard = shift.shard
        if shift.is_reset:
            lost = value_of(self.tokens) + self.moved[shard] - shift.own
            if not self.process.machine.core.config.is_overwrite:
                self.tokens_lost += tokens_in(lost)
                self.process.world.checks.lost(self, shard, tokens_in(lost))
            self.moved[shard] -= lost
            self.resets[shard] += 1
        else:
            self.moved[shard] += shift.own
            self.shifts[shard] += shift.own

    def _copy(self, copy: Copy) -> None:
        own = value_of(self.tokens)
        copied = {
            shard: Snapshot(own + self.moved[shard], self.shifts[shard], self.resets[shard])
            for shard in self.process.machine.core.config.fragments[copy.fragment]
        }
        self._report((copied, Snapshotted(copy.fragment, copy.step, self.steps, self.tokens)))

    def _report(self, report: LearnerPaused | tuple[dict[ShardId, Snapshot], Snapshotted]) -> None:
        world = self.process.world
        world.schedule(world.now + self.process.setting.learner_lag_s, self.process, self._reported, report)

    def _reported(self, report: LearnerPaused | tuple[dict[ShardId, Snapshot], Snapshotted]) -> None:
        if self.is_dead:
            return
        if isinstance(report, LearnerPaused):
            self.process.tell(report)
        else:
            self.orders.snapshots.update(report[0])
            self.process.tell(report[1])

    # -- the node's side -----------------------------------------------------------------------------------------------

    def move(self, shard: ShardId, own: int, *, is_reset: bool) -> None:
        """Tell the learner to move."""
        self.orders.move(shard, own, is_reset=is_reset)
        self.order(Shift(shard, own, is_reset))
