"""The learner's lives: started, told what the machine wants, listened to, and started again when it crashes.

Rules of this file:
1. The learner is told, never asked: nothing here waits for it, and it waits for nothing here.
2. Its answers become jobs on the worker thread, in order, because that order says which shifts it had added; its
   counters go to the machine at once.
3. A learner outlives its node for a while, and this one begins with the last one's if it is still there.
4. A crash costs the learner, not the peer: a new life starts from the live global state after a pause that doubles. Too
   many crashes in short order end the peer, in order and with the reason. A life that cannot be started (no process, no
   file descriptor, a folder that is not writable) is no crash: the start is tried again after a pause that doubles, as
   long as that lasts, and status, metrics and alerts say so meanwhile.
5. A training script is not ours to start. One that died is waited for, for ``reattach_s``: whoever started it may do so
   again (``torchrun --max-restarts``). The peer stays in the swarm meanwhile. A run that is over before its script is
   there waits for it, too, so that the script gets the result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack

from p2pdiloco.peer.checkpoint import LEARNER
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import Host, LearnerLife, within
from p2pdiloco.peer.learner_updates import KEPT, Shifts
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import FragmentId, LearnerId, digest_of, learner_id, peer_of
from p2pdiloco.protocol.view import MachineView
from p2pdiloco.timing import Backoff
from p2pdiloco.util import logs
from p2pdiloco.util.logs import short
from p2pdiloco.wire import learner_ipc
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT

# -- Snapshots ---------------------------------------------------------------------------------------------------------
# What the learner is asked to copy, and how much of it is in memory at once.
# Rules of this file:
# 1. A fragment's copy takes memory from the question for it until all that is given of it is encoded. Of twice as many
#    fragments as are due at a step there are copies at once, of more only if they are small (``KEPT`` parameters). So
#    where every fragment has a turn at once, as when a learner has stopped, their copies follow each other.
# 2. Questions that wait keep their order. Another life of the learner has other questions.
# 3. Memory that a device has locked stays anyway: then nothing waits.


class Snapshots:
    """Schedules the snapshots of one learner process; ``ask`` sends it a question."""

    def __init__(self, driver: Driver, state: ModelState, sync_every: int, ask: Callable[[ef.Snapshot], None]) -> None:
        self._driver = driver
        self._layout = state.layout
        self._shifts = state.shifts
        self._ask = ask
        self._at_once = 2 * -(-len(state.layout.fragments) // sync_every)
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
        """Feed the snapshot: the machine asks for what is to be encoded now, and the next job comes after all of
        that."""
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
        if self._shifts.memory.is_pinned:
            return True
        if fragment in self._under_way:
            return False
        shards = (shard for one in (fragment, *self._under_way) for shard in self._layout.fragments[one])
        return len(self._under_way) < self._at_once or sum(self._layout.shards[s].elements for s in shards) <= KEPT

    def _start(self, question: ef.Snapshot) -> None:
        self._driver.submit(lambda: self._shifts.begin_snapshot(question.fragment), lambda _: self._ask(question))


# -- Learner supervisor ------------------------------------------------------------------------------------------------
# The learner's lives: started, told what the machine wants, listened to, and started again when it crashes.


log = logs.get("node")

RESTARTS = 3
"""Lives that a learner may lose in a row before the peer leaves."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a start that failed is tried again, or a life that was lost is followed by another."""
STABLE_S = 600.0
"""A life that lasted this long proves the learner sound: earlier crashes are forgotten."""
SCRIPT_S = 600.0
"""How long a node looks for the training script that started it."""
MOST_TEXT = 1000
"""Letters of what a learner's model writes."""
MOST_NAMED = 8
"""Peers of a merge that are named to a person."""
MISUSED = 2
"""Exit status of a learner that the user must repair; another life would end the same way."""


class SupervisedLearner:
    """One learner process, as its node looks after it."""

    def __init__(self, learner: LearnerId, snapshots: Snapshots) -> None:
        self.learner = learner
        self.snapshots = snapshots
        self.process: LearnerLife | None = None
        """None before it is there, and when it has ended."""
        self.is_ready = False
        self.is_given = False
        """It is given the global parameters."""
        self.is_loaded = False
        """It has been given all of them."""
        self.has_blocks = False


class LearnerSupervisor:
    """One peer's learner. ``gave_up`` gets an exit status and a sentence when no further life is tried; ``sent_bytes``
    tells what the peer has sent so far, for the metrics."""

    def __init__(
        self,
        driver: Driver,
        view: MachineView,
        state: ModelState,
        host: Host,
        options: PeerOptions,
        metrics: Metrics,
        *,
        manifest: bytes,
        gave_up: Callable[[int, str], None],
        sent_bytes: Callable[[], int],
    ) -> None:
        self._driver = driver
        self._view = view
        self._state = state
        self._shifts = state.shifts
        self._host = host
        self._options = options
        self._metrics = metrics
        self._gave_up = gave_up
        self._sent_bytes = sent_bytes
        self.child: SupervisedLearner | None = None
        """The latest."""
        self._manifest = manifest if options.learner.script else None
        self._reunion = options.learner.script or f"p2pdiloco-{digest_of(str(options.folder.absolute()).encode())}"
        """Where a learner of this folder's last life waits."""
        self._losses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        """Lives that were lost in a row."""
        self.trouble = ""
        """Why nothing that the learner trains can be merged; empty: it can."""
        self.absence = ""
        """Why no learner can be started; empty: there is one, or one is on its way."""
        self.resting = ""
        """Why the learner makes no steps for now; empty: it does."""
        self.first_batches: tuple[str, ...] = ()
        """Digests of what a training script has trained first."""
        self._script_met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The learner has got the global parameters, or nobody waits for that any more."""
        self.is_over = False
        """The peer is ending: no life is started any more."""

    @property
    def learner(self) -> LearnerId | None:
        """Id of the latest learner process."""
        return None if self.child is None else self.child.learner

    def new_child(self, name: str) -> SupervisedLearner:
        """Return a new learner process, not started yet."""
        snapshots = Snapshots(self._driver, self._state, self._view.sync_every, self._ask_for_snapshot)
        return SupervisedLearner(learner_id(self._view.me, name), snapshots)

    async def live(self, lives: AsyncExitStack) -> None:
        """Start the learner; after a crash again. Whoever closes ``lives`` ends the learner in order."""
        starts = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while not self.is_over:
            ward = self.child = self.new_child(self._host.draw_name())
            ended: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

            def gone(reason: str, status: int, ended: asyncio.Future[tuple[str, int]] = ended) -> None:
                if not ended.done():
                    ended.set_result((reason, status))

            began = self._host.now()
            process = self._host.start_learner(
                self._arguments(ward.learner),
                heard=self._on_message,
                ended=gone,
                reunion=self._reunion,
                manifest=self._manifest,
                patience_s=self._options.learner.reattach_s if self._losses.failures else SCRIPT_S,
            )
            try:
                ward.process = await lives.enter_async_context(process)
            except TimeoutError as error:
                if not self.is_over:
                    self._gave_up(1, str(error))
                return
            except OSError as error:
                await self._cannot_start(error, starts.next_s())
                continue
            if self.is_over:  # meanwhile, and ``lives`` is closed
                await lives.aclose()
                return
            self._on_started()
            starts.reset()
            if ward.process.is_adopted and self._manifest is None:
                log.info("found the learner of this peer's last life, which has gone on training")
                self._metrics.write("learner-adopted", pid=ward.process.pid)
            reason, status = await ended
            ward.process = None
            if self.is_over:
                return
            self._set_trouble("")
            self._driver.submit(self._shifts.unload, lambda _: None)
            self._metrics.write("learner-lost", reason=reason, status=status)
            if ward.is_loaded:
                self._driver.feed(ev.LearnerStopped(reason))
            if self._host.now() - began >= STABLE_S:
                self._losses.reset()
            pause_s = self._losses.next_s()
            if self._manifest is not None:
                if not self._options.learner.reattach_s:
                    self._gave_up(1, f"the training script has left without a word: {reason}")
                    return
                log.warning(
                    "the training script is gone, waiting for its next life", s=self._options.learner.reattach_s
                )
                continue
            if status == MISUSED or self._losses.failures > RESTARTS:
                self._gave_up(MISUSED if status == MISUSED else 1, f"the learner cannot go on: {reason}")
                return
            life = self._losses.failures + 1
            log.warning("learner lost, starting it again", reason=reason, pause_s=pause_s, life=life)
            await self._host.sleep(pause_s)

    async def _cannot_start(self, error: OSError, pause_s: float) -> None:
        """Say so, and wait before the next try."""
        self.absence = f"the learner cannot be started: {error.strerror or error}"
        self._metrics.write("learner-not-started", reason=str(error), pause_s=pause_s)
        log.warning(
            "the learner cannot be started, trying again: free what it needs (processes, file descriptors, disk space, "
            "permission to write its log)",
            reason=str(error),
            pause_s=pause_s,
        )
        await self._host.sleep(pause_s)

    def _on_started(self) -> None:
        """Note that a learner process has started."""
        if self.absence:
            self.absence = ""
            log.info("the learner is started again")
        self._metrics.learner_began()

    async def wait_for_script(self) -> None:
        """Wait until the training script has got the global parameters, for ``reattach_s`` at most."""
        if self._manifest is not None and not self._script_met.done():
            log.info("waiting for the training script, which has not been here yet", s=self._options.learner.reattach_s)
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
            arguments += ["--reunion", self._reunion, "--reattach-s", str(options.learner.reattach_s)]
        arguments += ["--device", options.learner.device, "--threads", str(options.learner.threads)]
        places = (
            ("--model", options.learner.model),
            ("--data", options.learner.data),
            ("--tokenizer", options.learner.tokenizer),
        )
        return arguments + [word for option, place in places if place for word in (option, place)]

    # -- what it says --------------------------------------------------------------------------------------------------

    def _on_message(self, message: learner_ipc.FromLearner) -> None:
        driver = self._driver
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
                driver.feed(ev.LearnerPaused(message.steps, message.tokens))
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
                log.warning("learner in trouble, it goes on", reason=message.reason)
            case learner_ipc.Batches():
                self.first_batches = tuple(digest[:16] for digest in message.digests[:4])
            case learner_ipc.Unable():
                self._set_trouble(message.reason)
            case learner_ipc.Failed():
                pass  # its process's end follows, with this reason

    def _set_trouble(self, reason: str) -> None:
        """Set or clear the reason why nothing that the learner trains can be merged."""
        if reason:
            if self.trouble:
                return  # what is merged meanwhile is no cause of it
            merged = self._last_merge()
            reason = reason[: TROUBLE_LIMIT - len(merged)] + merged
            self._metrics.write("learner-unable", reason=reason)
            log.warning("nothing that the learner trains can be merged", reason=reason)
        elif self.trouble:
            self._metrics.write("learner-able")
            log.info("what the learner trains can be merged again")
        self.trouble = reason[:TROUBLE_LIMIT]

    def _last_merge(self) -> str:
        """Describe the last merge that this peer took, its owner and its contributors, for a person who looks for a
        cause."""
        commits = self._view.newest_commits()
        header = max(commits, key=lambda header: (header.step, header.shard), default=None)
        if header is None or not header.contributors:
            return ""
        givers = sorted({short(peer_of(given.learner)) for given in header.contributors})
        named = ", ".join(givers[:MOST_NAMED])
        more = f" and {len(givers) - MOST_NAMED} more" if len(givers) > MOST_NAMED else ""
        what = f"version {header.version} of shard {header.shard}"
        return f"; merged last: {what}, by {short(header.owner)}, of what {named}{more} trained"

    # -- what it is told -----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Give the learner the global parameters, once both are there."""
        ward = self.child
        if ward is not None and ward.is_ready and not ward.is_given and self._view.is_current:
            ward.is_given = True
            self._driver.submit(lambda: self._shifts.load(ward.learner), self._shifts_to(ward))

    def _on_loaded(self, ward: SupervisedLearner, process: LearnerLife) -> None:
        """Let the learner begin: it has taken all global parameters."""
        ward.is_loaded = True
        process.send(learner_ipc.Begin(step=self._view.step))
        self.stop_waiting()
        self._driver.feed(ev.LearnerStarted(ward.learner, ward.has_blocks))
        if self.resting:
            self.rest(self.resting)

    def rest(self, reason: str) -> None:
        """Have no steps made as long as there is a ``reason``, one for people; the learner goes on answering."""
        self.resting = reason
        self._send(learner_ipc.Rest(is_resting=bool(reason)))

    @property
    def pid(self) -> int | None:
        """Process id of the learner."""
        process = None if self.child is None else self.child.process
        return None if process is None else process.pid

    def _shifts_to(self, ward: SupervisedLearner | None) -> Callable[[Shifts], None]:
        """Return a callback that sends shifts to this learner, not to the next one: jobs may wait for longer than a
        process."""
        return lambda shifts: self.send_shifts(shifts) if self.child is ward else None

    def send_shifts(self, shifts: Shifts) -> None:
        """Tell the learner which shifts to take."""
        ward = self.child
        process = None if ward is None else ward.process
        if ward is not None and process is not None:
            if shifts.added:
                process.send(learner_ipc.Shift(shards=shifts.added, replace=False))
            if shifts.replaced:
                process.send(learner_ipc.Shift(shards=shifts.replaced, replace=True))
            if shifts.is_last_piece and ward.is_given and not ward.is_loaded:
                self._on_loaded(ward, process)

    def save(self) -> None:
        """Have the inner optimizer's state written."""
        self._send(learner_ipc.Save())

    def tell_swarm(self, told: learner_ipc.Swarm) -> None:
        """Tell a training script of the others."""
        self._send(told)

    def send_effect(self, effect: ef.ForLearner) -> None:
        """Pass a command of the machine on to the learner."""
        match effect:
            case ef.Snapshot():
                if self.child is not None:
                    self.child.snapshots.request(effect)
            case ef.Train():
                self._send(learner_ipc.Train(block=effect.block))
            case ef.AdoptStep():
                self._send(learner_ipc.AdoptStep(step=effect.step, tokens=effect.tokens))
            case ef.PauseLearner():
                self._send(learner_ipc.Pause())
            case ef.Evaluate():
                self._send(learner_ipc.Evaluate(version=effect.version))

    def _ask_for_snapshot(self, question: ef.Snapshot) -> None:
        self._send(learner_ipc.Snapshot(fragment=question.fragment, step=question.step))

    def _send(self, command: learner_ipc.FromNode) -> None:
        """Send a command to a learner that has its parameters; a later process begins with what the node has then."""
        ward = self.child
        if ward is not None and ward.process is not None and ward.is_loaded:
            ward.process.send(command)
