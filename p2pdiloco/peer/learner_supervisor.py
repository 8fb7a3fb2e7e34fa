"""Learner supervisor: starts a peer's learner, sends it the machine's commands, and restarts it after a crash or hang.

Rules of this file:
1. The node sends commands and never waits for the learner. The learner never waits for the node.
2. The learner's answers become jobs on the worker thread, in order, because that order says which shifts it had added.
   Its counters go to the machine at once.
3. A learner outlives its node for a while. A new node adopts the learner of the previous one if it is still running.
4. A crash costs the learner, not the peer. A new process starts from the live global state after a pause that doubles.
   Too many crashes in a row end the peer, in order and with the reason. A learner that cannot be started (no free
   process or file descriptor, folder not writable) is not a crash: the start is retried, with a pause that doubles, for
   as long as it fails. Status, metrics and alerts report it meanwhile.
5. The node does not start a training script. When a script dies, the node waits ``reattach_s`` for it, because its
   launcher may restart it (``torchrun --max-restarts``). The peer stays in the swarm meanwhile. If the run completes
   before the script has connected, the peer waits for it too, so that the script gets the result.
6. A learner that hangs is ended, which is then a crash. A script may be busy with something else, so its user is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from p2pdiloco.peer.checkpoint import LEARNER
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import LearnerLife, within
from p2pdiloco.peer.learner_updates import KEPT, Shifts, rounds_at_once
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId, learner_id, peer_of
from p2pdiloco.timing import Backoff
from p2pdiloco.training.node_reconnect import learner_socket_name
from p2pdiloco.util import logs
from p2pdiloco.util.logs import short
from p2pdiloco.wire import learner_ipc
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT

# -- Snapshots ---------------------------------------------------------------------------------------------------------
# Copies of its parameters that the learner is asked for, and a limit on how many are in memory at once.
# Rules of this section:
# 1. A fragment's copy takes memory from the request until everything made from it is encoded. At most twice as many
#    fragments as are due at one step have copies at once; more only if they are small (``KEPT`` parameters in all). If
#    all fragments are due at once, as after a learner has stopped, their copies follow each other.
# 2. Waiting requests keep their order. A new learner process starts with none.


class Snapshots:
    """Schedules the snapshots of one learner process. ``ask`` sends it a request."""

    def __init__(self, driver: Driver, ask: Callable[[ef.Snapshot], None]) -> None:
        self._driver = driver
        self._layout = driver.state.layout
        self._shifts = driver.state.shifts
        self._ask = ask
        self._at_once = rounds_at_once(self._layout, driver.view.sync_every)
        self._waiting: deque[ef.Snapshot] = deque()
        self._under_way: set[FragmentId] = set()

    def request(self, question: ef.Snapshot) -> None:
        """Queue a snapshot that the machine asks for."""
        self._waiting.append(question)
        self._start_waiting()

    def on_taken(self, event: ev.Snapshotted) -> None:
        """Complete a snapshot that the learner has written."""
        self._driver.submit(lambda: self._shifts.complete_snapshot(event.fragment), lambda _: self._encode(event))

    def _encode(self, event: ev.Snapshotted) -> None:
        """Feed the snapshot to the machine, which submits the encoding jobs; then submit the job that follows all of
        them."""
        self._driver.feed(event)
        self._driver.submit(
            lambda: self._shifts.end_snapshot(event.fragment), lambda _: self._on_encoded(event.fragment)
        )

    def _on_encoded(self, fragment: FragmentId) -> None:
        self._under_way.discard(fragment)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].fragment):
            question = self._waiting.popleft()
            self._under_way.add(question.fragment)
            self._start(question)

    def _has_room(self, fragment: FragmentId) -> bool:
        if fragment in self._under_way:
            return False
        shards = (shard for one in (fragment, *self._under_way) for shard in self._layout.fragments[one])
        return len(self._under_way) < self._at_once or sum(self._layout.shards[s].elements for s in shards) <= KEPT

    def _start(self, question: ef.Snapshot) -> None:
        self._driver.submit(lambda: self._shifts.begin_snapshot(question.fragment), lambda _: self._ask(question))


# -- Learner supervisor ------------------------------------------------------------------------------------------------


log = logs.get("node")

# Crashes in a row after which the peer leaves.
RESTARTS = 3
# Bounds of the pause before a failed start is retried, or a crashed learner restarted.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# After running this long, a learner counts as sound and its earlier crashes are forgotten.
STABLE_S = 600.0
# How long a node waits for the first connection of its training script.
SCRIPT_S = 600.0
# Maximum characters of a text sample that the learner's model writes.
MOST_TEXT = 1000
# Maximum number of contributors that a message about a merge names.
MOST_NAMED = 8
# A learner hangs after so long without a message, so many of its usual steps, and twice its longest silence before.
HUNG_S, HUNG_STEPS = 180.0, 20.0
# Exit status of a learner that the user must repair. A restart would end the same way.
MISUSED = 2


@dataclass(eq=False)
class SupervisedLearner:
    """One learner process, as its node sees it."""

    learner: LearnerId
    snapshots: Snapshots
    process: LearnerLife | None = None
    """None before the process has started, and after it has ended."""
    is_ready: bool = False
    is_given: bool = False
    """True once the node has begun to send it the global parameters."""
    is_loaded: bool = False
    """True once it has received all of them."""
    has_blocks: bool = False
    makes_steps: bool = False
    """False before its first step, which may compile, and after its last one."""
    is_evaluating: bool = False
    silent_s: float = 0.0
    """Time since its last message."""
    longest_s: float = 0.0
    """Its longest such time before."""
    step_s: float = 0.0
    """Its usual step."""
    hang: str = ""
    """What people are told of its hang; empty if it does not hang."""

    def heard(self, message: learner_ipc.FromLearner) -> None:
        """Note that it is alive."""
        self.longest_s, self.silent_s = max(self.longest_s, self.silent_s), 0.0
        if isinstance(message, learner_ipc.Progress):
            self.step_s += (message.step_time_s - self.step_s) * (0.1 if self.makes_steps else 1.0)
            self.makes_steps = True
        elif isinstance(message, learner_ipc.Paused):
            self.makes_steps = False
        elif isinstance(message, learner_ipc.Evaluated):
            self.is_evaluating = False
        self.hang = ""


class LearnerSupervisor:
    """Supervises the learner of one peer.

    ``gave_up`` gets an exit status and a sentence when the learner is not restarted any more. ``sent_bytes`` returns
    the bytes that the peer has sent so far, for the metrics. An evaluation takes no longer than ``evaluation_steps``
    steps.
    """

    def __init__(
        self,
        driver: Driver,
        options: PeerOptions,
        *,
        manifest: bytes,
        evaluation_steps: float,
        gave_up: Callable[[int, str], None],
        sent_bytes: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._view = driver.view
        self._state = driver.state
        self._shifts = driver.state.shifts
        self._host = driver.host
        self._options = options
        self._metrics = driver.metrics
        self._evaluation_steps = evaluation_steps
        self._gave_up = gave_up
        self._sent_bytes = sent_bytes
        # The newest learner process.
        self.child: SupervisedLearner | None = None
        self._manifest = manifest if options.learner.script else None
        # Name of the socket on which a learner of this folder waits after its previous node ended.
        self._socket_name = options.learner.script or learner_socket_name(options.folder)
        # Counts crashes in a row.
        self._losses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        # Why nothing that the learner trains can be merged; empty if it can.
        self.trouble = ""
        # Why no learner can be started; empty if one runs or is being started.
        self.absence = ""
        # Why the learner pauses; empty if it does not.
        self.resting = ""
        # Digests of the first batches of a training script, to detect peers that train on the same data.
        self.first_batches: tuple[str, ...] = ()
        # Done when the learner has the global parameters, or when nobody waits for that any more.
        self._script_met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # True when the peer is ending: no learner is started any more.
        self.is_over = False

    @property
    def learner(self) -> LearnerId | None:
        """ID of the newest learner process."""
        return None if self.child is None else self.child.learner

    def new_child(self, name: str) -> SupervisedLearner:
        """Return a new learner process, not started yet."""
        return SupervisedLearner(learner_id(self._view.me, name), Snapshots(self._driver, self._ask_for_snapshot))

    async def live(self, lives: AsyncExitStack) -> None:
        """Run the learner, and restart it after a crash. Closing ``lives`` ends the learner in order."""
        starts = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while not self.is_over:
            child = self.child = self.new_child(self._host.draw_name())
            ended: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

            def gone(reason: str, status: int, ended: asyncio.Future[tuple[str, int]] = ended) -> None:
                if not ended.done():
                    ended.set_result((reason, status))

            began = self._host.now()
            process = self._host.start_learner(
                self._arguments(child.learner),
                heard=self._on_message,
                ended=gone,
                socket_name=self._socket_name,
                manifest=self._manifest,
                patience_s=self._options.learner.reattach_s if self._losses.failures else SCRIPT_S,
            )
            try:
                child.process = await lives.enter_async_context(process)
            except TimeoutError as error:
                if not self.is_over:
                    self._gave_up(1, str(error))
                return
            except OSError as error:
                await self._cannot_start(error, starts.next_s())
                continue
            if self.is_over:  # the peer ended during the start, and ``lives`` was closed before this learner was in it
                await lives.aclose()
                return
            if self.absence:
                self.absence = ""
                log.info("the learner was started")
            self._metrics.learner_began()
            starts.reset()
            if child.process.is_adopted and self._manifest is None:
                log.info("reconnected to the learner, which trained on while the node was away")
                self._metrics.write("learner-adopted", pid=child.process.pid)
            reason, status = await ended
            child.process = None
            if self.is_over:
                return
            self._set_trouble("")
            self._driver.submit(self._shifts.unload, lambda _: None)
            self._metrics.write("learner-lost", reason=reason, status=status)
            if child.is_loaded:
                self._driver.feed(ev.LearnerStopped(reason))
            if self._host.now() - began >= STABLE_S:
                self._losses.reset()
            pause_s = self._losses.next_s()
            if self._manifest is not None:
                if not self._options.learner.reattach_s:
                    self._gave_up(1, f"the training script ended without closing the connection: {reason}")
                    return
                log.warning(
                    "the training script ended; waiting for it to reconnect", s=self._options.learner.reattach_s
                )
                continue
            if status == MISUSED or self._losses.failures > RESTARTS:
                self._gave_up(MISUSED if status == MISUSED else 1, f"the learner cannot go on: {reason}")
                return
            life = self._losses.failures + 1
            log.warning("the learner ended unexpectedly; restarting it", reason=reason, pause_s=pause_s, life=life)
            await self._host.sleep(pause_s)

    async def _cannot_start(self, error: OSError, pause_s: float) -> None:
        """Report that the learner cannot be started, and wait before the next try."""
        self.absence = f"the learner cannot be started: {error.strerror or error}"
        self._metrics.write("learner-not-started", reason=str(error), pause_s=pause_s)
        log.warning(
            "the learner cannot be started; trying again. Check the limits on processes and file descriptors, free "
            "disk space, and whether the learner's log is writable",
            reason=str(error),
            pause_s=pause_s,
        )
        await self._host.sleep(pause_s)

    @property
    def hang(self) -> str:
        """What people are told of a learner that hangs; empty if it does not."""
        return "" if self.child is None else self.child.hang

    def look_for_hang(self, passed_s: float) -> None:
        """End the learner if it hangs; if it is a training script, tell its user.

        ``passed_s``: time since the last call, without any in which this process did not run either.
        """
        child = self.child
        process = None if child is None else child.process
        if child is None or process is None or not child.makes_steps or self.resting:
            return
        child.silent_s += passed_s
        steps = HUNG_STEPS * (1.0 + self._evaluation_steps * child.is_evaluating)
        if child.hang or child.silent_s < max(HUNG_S, steps * child.step_s, 2.0 * child.longest_s):
            return
        seen = f"no step for {child.silent_s:.0f} s, where one takes {child.step_s:.2g} s"
        if self._manifest is None:
            child.hang = f"the learner hangs ({seen}): this node ends it and starts another"
            process.end(f"it hung ({seen})")
        else:
            child.hang = (
                f"the training script makes no steps ({seen}): the others continue without it. If it hangs, end it "
                f"(kill -9 {process.pid}) and start it again; it then continues as the same peer"
            )
        self._metrics.write("learner-hung", reason=child.hang)
        log.warning(child.hang)

    async def wait_for_script(self) -> None:
        """Wait until the training script has the global parameters, at most ``reattach_s``."""
        if self._manifest is not None and not self._script_met.done():
            log.info("waiting for the training script to connect", s=self._options.learner.reattach_s)
            with contextlib.suppress(TimeoutError):
                await within(self._host, self._script_met, self._options.learner.reattach_s)

    def stop_waiting(self) -> None:
        """Stop waiting for the training script."""
        if not self._script_met.done():
            self._script_met.set_result(None)

    def _arguments(self, learner: LearnerId) -> list[str]:
        options = self._options
        arguments = ["--manifest", str(options.folder / "manifest.msgpack"), "--incarnation", learner]
        arguments += ["--inner-state", str(options.folder / "checkpoint" / LEARNER)]
        if options.learner.reattach_s:
            arguments += ["--socket-name", self._socket_name, "--reattach-s", str(options.learner.reattach_s)]
        arguments += ["--device", options.learner.device, "--threads", str(options.learner.threads)]
        places = (
            ("--model", options.learner.model),
            ("--data", options.learner.data),
            ("--tokenizer", options.learner.tokenizer),
        )
        return arguments + [word for option, place in places if place for word in (option, place)]

    # -- messages from the learner -------------------------------------------------------------------------------------

    def _on_message(self, message: learner_ipc.FromLearner) -> None:
        driver = self._driver
        if self.child is not None:
            self.child.heard(message)
        match message:
            case learner_ipc.Progress():
                self._metrics.progress(message, step=self._view.step, sent_bytes=self._sent_bytes())
                driver.feed(ev.Stepped(message.steps, message.tokens, message.step_time_s))
            case learner_ipc.BlockFinished():
                driver.feed(ev.BlockFinished(message.block, message.tokens))
            case learner_ipc.Shifted():
                driver.submit(lambda: self._shifts.acknowledge(message.shards), self._shifts_to(self.child))
            case learner_ipc.Snapshotted():
                assert self.child is not None
                event = ev.Snapshotted(message.fragment, message.step, message.steps, message.tokens)
                self.child.snapshots.on_taken(event)
            case learner_ipc.Paused():
                driver.feed(ev.LearnerPaused(message.steps, message.tokens, message.step))
            case learner_ipc.Evaluated():
                driver.feed(ev.Evaluated(message.version, message.loss))
            case learner_ipc.Written():
                self._metrics.write("sample", step=self._view.step, text=message.text[:MOST_TEXT])
            case learner_ipc.Rested():
                driver.feed(ev.LearnerRested())
            case learner_ipc.Ready():
                assert self.child is not None
                self.child.is_ready = True
                self.child.has_blocks = message.has_blocks
                is_pinned = message.device.startswith("cuda")
                driver.submit(lambda: setattr(self._shifts.memory, "is_pinned", is_pinned), lambda _: None)
                self._metrics.write(
                    "learner-ready",
                    learner=self.learner,
                    device=message.device,
                    parameters=message.parameters,
                    inner_steps=message.inner_steps,
                )
                self.load()
            case learner_ipc.Trouble():
                self._metrics.write("learner-trouble", reason=message.reason)
                log.warning("the learner reports a problem and continues", reason=message.reason)
            case learner_ipc.Batches():
                self.first_batches = tuple(digest[:16] for digest in message.digests[:4])
            case learner_ipc.Unable():
                self._set_trouble(message.reason)
            case learner_ipc.Failed():
                pass  # the process ends next, with this reason

    def _set_trouble(self, reason: str) -> None:
        """Set or clear the reason why nothing that the learner trains can be merged."""
        if reason:
            if self.trouble:
                return  # keep the first reason: later merges did not cause the problem
            merged = self._last_merge()
            reason = reason[: TROUBLE_LIMIT - len(merged)] + merged
            self._metrics.write("learner-unable", reason=reason)
            log.warning("the learner's updates cannot be merged", reason=reason)
        elif self.trouble:
            self._metrics.write("learner-able")
            log.info("the learner's updates can be merged again")
        self.trouble = reason[:TROUBLE_LIMIT]

    def _last_merge(self) -> str:
        """Describe the last merge that this peer applied, with its owner and contributors, for a person who looks for a
        cause."""
        commits = self._view.newest_commits()
        header = max(commits, key=lambda header: (header.step, header.shard), default=None)
        if header is None or not header.contributors:
            return ""
        givers = sorted({short(peer_of(given.learner)) for given in header.contributors})
        named = ", ".join(givers[:MOST_NAMED])
        more = f" and {len(givers) - MOST_NAMED} more" if len(givers) > MOST_NAMED else ""
        merge = f"version {header.version} of shard {header.shard}"
        return f"; last merge: {merge}, by {short(header.owner)}, contributors {named}{more}"

    # -- commands to the learner ---------------------------------------------------------------------------------------

    def load(self) -> None:
        """Begin to send the learner the global parameters, once the learner is ready and the peer has them."""
        child = self.child
        if child is not None and child.is_ready and not child.is_given and self._view.is_current:
            child.is_given = True
            self._driver.submit(lambda: self._shifts.load(child.learner), self._shifts_to(child))

    def _on_loaded(self, child: SupervisedLearner, process: LearnerLife) -> None:
        """Let the learner begin to train: it has all global parameters."""
        child.is_loaded = True
        process.send(_end(self._view.end))
        process.send(learner_ipc.Begin(step=self._view.step))
        self.stop_waiting()
        self._driver.feed(ev.LearnerStarted(child.learner, child.has_blocks))
        if self.resting:
            self.rest(self.resting)

    def rest(self, reason: str) -> None:
        """Pause the learner's steps while ``reason``, a text for people, is not empty. It still answers the node."""
        self.resting = reason
        self.send(learner_ipc.Rest(is_resting=bool(reason)))

    @property
    def pid(self) -> int | None:
        """Process ID of the learner."""
        process = None if self.child is None else self.child.process
        return None if process is None else process.pid

    def _shifts_to(self, child: SupervisedLearner | None) -> Callable[[Shifts], None]:
        """Return a callback that sends shifts to this learner only. A job may finish after its learner was replaced."""
        return lambda shifts: self.send_shifts(shifts) if self.child is child else None

    def send_shifts(self, shifts: Shifts) -> None:
        """Tell the learner which shifts to take."""
        child = self.child
        process = None if child is None else child.process
        if child is not None and process is not None:
            if shifts.added:
                self._send_shift(process, shifts.added, replace=False)
            if shifts.replaced:
                self._send_shift(process, shifts.replaced, replace=True)
            if shifts.is_last_piece and child.is_given and not child.is_loaded:
                self._on_loaded(child, process)

    def _send_shift(self, process: LearnerLife, shards: tuple[ShardId, ...], *, replace: bool) -> None:
        at = self._shifts.memory.starts("shift", shards)
        if at is not None:  # else they were meant for a learner that has ended since
            process.send(learner_ipc.Shift(shards=shards, replace=replace, at=at))

    def save(self) -> None:
        """Ask the learner to save its inner optimizer's state."""
        self.send(learner_ipc.Save())

    def send_effect(self, effect: ef.ForLearner) -> None:
        """Pass a command of the machine on to the learner."""
        match effect:
            case ef.Snapshot():
                if self.child is not None:
                    self.child.snapshots.request(effect)
            case ef.Train():
                self.send(learner_ipc.Train(block=effect.block))
            case ef.AdoptStep():
                self.send(learner_ipc.AdoptStep(step=effect.step, tokens=effect.tokens))
            case ef.PauseLearner():
                self.send(learner_ipc.Pause())
            case ef.MoveEnd():
                self.send(_end(effect.end))
            case ef.Evaluate():
                if self.child is not None:
                    self.child.is_evaluating = True
                self.send(learner_ipc.Evaluate(version=effect.version))

    def _ask_for_snapshot(self, question: ef.Snapshot) -> None:
        at = self._shifts.memory.starts("snapshot", self._state.layout.fragments[question.fragment])
        if at is not None:  # else the learner that was to be asked has ended since
            self.send(learner_ipc.Snapshot(fragment=question.fragment, step=question.step, at=at))

    def send(self, command: learner_ipc.FromNode) -> None:
        """Send a command to a learner that has its parameters. One that starts later gets the state of that time."""
        child = self.child
        if child is not None and child.process is not None and child.is_loaded:
            child.process.send(command)


def _end(end: RunEnd) -> learner_ipc.MoveEnd:
    return learner_ipc.MoveEnd(last_step=end.steps, tokens=end.tokens)
