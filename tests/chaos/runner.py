"""A chaos run: start a swarm, do to it what the schedule says, let it settle, end it, and write down what happened.

Rules of this file:
1. ``schedule.json`` is written before anything starts; ``happened.jsonl`` grows while it runs. The judge needs these
   and what the peers wrote, and nothing else.
2. Whoever ends without having been killed or asked is written down as such, and started again so that the run goes on.
3. Whatever way the run ends, no process of it is left; if this process is killed, the reaper sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from p2pdiloco.demo.local_swarm import OPEN, Member, Swarm, SwarmError
from p2pdiloco.util.status_pipe import Exited, Invited, Listening
from tests.chaos.changed_peers import launch
from tests.chaos.event_log import Diary, Status
from tests.chaos.fault_proxy import Network
from tests.chaos.faults import Hand, NotNow, Peer, twin_of
from tests.chaos.reaper import reaper
from tests.chaos.schedule import LEAVE_S, Fault, Schedule

TICK_S = 0.1
READY_S = 120.0
"""Deadline until all peers train, at the start and before the settling."""
RETRY_S = 2.0
TRIES = 20
"""Starts of a peer that finds nobody (exit status 3), before it counts as ended by itself."""
NOBODY_THERE = 3
END_S = 40.0
"""How long leaving in order may take."""
GONE_S = 10.0
"""How long the children of ended processes may take to notice."""
PORTS = range(20000, 32000)
"""Below the ports that the kernel gives to outgoing connections."""
CHECKPOINT_S = 5.0
REATTACH_S = 60.0
"""The default of users: a learner outlives its node."""


class Runner:
    """One run of ``schedule`` in the folder ``out``. ``tell`` is called about twice a second."""

    def __init__(self, schedule: Schedule, out: Path, tell: Callable[[Status], None]) -> None:
        self.plan = schedule.plan
        self.out = out
        self.leftovers: list[str] = []
        """Processes that outlived the orderly end."""
        self._faults = schedule.faults
        self._diary = Diary(out / "happened.jsonl", tell)
        options = ["--checkpoint-s", f"{CHECKPOINT_S:g}", "--leave-s", f"{LEAVE_S:g}"]
        options += ["--reattach-s", f"{REATTACH_S:g}"]
        self._swarm = Swarm(out, options)
        ports = _free_ports(len(self.plan.names))
        self._peers = {n: Peer(n, self.plan.region_of(n), p) for n, p in zip(self.plan.names, ports, strict=True)}
        self._network = Network({peer.name: peer.port for peer in self._peers.values()}, self._peer_at_port)
        self._hand = Hand(self._peers, self._network, self.plan)
        self._active: list[Fault] = []
        self._twins: dict[int, Member] = {}
        """Copies that run beside their originals, by fault."""
        self._address = ""
        self._founding: list[str] = []
        write_toml(out / "run.toml", msgspec.to_builtins(self.plan.run))
        (out / "schedule.json").write_bytes(msgspec.json.format(msgspec.json.encode(schedule)))

    async def run(self) -> None:
        """From the start to the end.

        Raises:
            SwarmError: the swarm did not come up.
        """
        with reaper(self._swarm.mark), self._diary:
            try:
                async with self._network:
                    await self._start()
                    await self._storm()
                    await self._settle()
                    await self._end()
            finally:
                await self._kill_all()

    def remaining(self) -> list[str]:
        """Processes of the run that are there now."""
        return self._swarm.leftovers()

    # -- the phases ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        bootstrap = self._swarm.launch_bootstrap()
        self._address = (await asyncio.to_thread(bootstrap.wait_for, Listening)).addresses[0]
        first, *others = self._peers.values()
        self._founding = ["start", str(self.out / "run.toml"), *OPEN, "--bootstrap", self._address]
        await asyncio.to_thread(self._launch(first).wait_for, Invited)
        for peer in others:
            self._launch(peer)
        await self._all_train("the swarm did not come up")
        if self.plan.bootstrap_dies:
            bootstrap.kill()
        self._diary.begin()

    async def _storm(self) -> None:
        self._diary.phase = "faults"
        waiting = list(self._faults)
        while (now := self._diary.now()) < self.plan.seconds or waiting:
            while waiting and waiting[0].at <= now:
                self._strike(waiting.pop(0))
            await self._tick()

    async def _settle(self) -> None:
        """Everything is mended and everybody comes back; then quiet."""
        self._diary.phase = "coming back"
        for fault in list(self._active):
            self._undo(fault)
        for peer in self._peers.values():
            if peer.back_at is not None:
                peer.back_at = min(peer.back_at, self._diary.now())
        await self._all_train("not all peers came back")
        self._diary.phase = "quiet"
        self._diary.note("settling")
        until = self._diary.now() + self.plan.settle_s
        while self._diary.now() < until:
            await self._tick()
        self._diary.note("settled")

    async def _end(self) -> None:
        """All but one leave together, then the last: whatever the others had trained is in its state."""
        self._diary.phase = "leaving"
        *others, last = sorted(self._peers.values(), key=lambda peer: -peer.member.began_unix if peer.member else 0.0)
        for group in (others, [last]):
            for peer in group:
                self._diary.note("leaving", peer=peer.name)
                peer.is_leaving = True
                if peer.member is not None and peer.is_up:
                    peer.member.process.send_signal(signal.SIGTERM)
            deadline = self._diary.now() + END_S
            while (
                any(peer.member is not None for peer in group) and self._diary.now() < deadline
            ):  # until its end is written down
                await self._tick()
        self._swarm.bootstrap.process.send_signal(signal.SIGTERM)
        deadline = self._diary.now() + GONE_S
        while (left := self._swarm.leftovers()) and self._diary.now() < deadline:
            await self._tick()
        self.leftovers = left
        self._diary.note("over", text=json.dumps(left))

    async def _kill_all(self) -> None:
        for member in (*self._swarm.members, *([self._swarm.bootstrap] if self._address else [])):
            if member.is_running:
                member.kill()
        deadline = time.monotonic() + 10.0
        while self._swarm.leftovers() and time.monotonic() < deadline:
            self._swarm.kill_leftovers()
            await asyncio.sleep(TICK_S)

    # -- one moment ----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        now = self._diary.now()
        for fault in [fault for fault in self._active if fault.end <= now]:
            self._undo(fault)
        for peer in self._peers.values():
            if peer.member is not None and not peer.member.is_running:
                self._handle_end(peer, peer.member)
            if peer.back_at is not None and peer.back_at <= now:
                self._bring_back(peer)
        if self._diary.is_due():
            self._refresh()
        await asyncio.sleep(TICK_S)

    def _refresh(self) -> None:
        for peer in self._peers.values():
            if peer.member is not None:
                peer.member.refresh()
            if peer.is_training and peer.fault is not None:
                self._diary.note("back", peer=peer.name, fault=peer.fault)
                peer.fault, peer.tries = None, 0
        states = tuple((peer.name, _state(peer)) for peer in self._peers.values())
        version = max((peer.member.view.version for peer in self._peers.values() if peer.member), default=0)
        self._diary.tell(states, version)

    def _strike(self, fault: Fault) -> None:
        try:
            text = self._hand.strike(fault)
        except (NotNow, psutil.Error) as error:
            self._diary.note("skipped", fault=fault.number, text=str(error))
            return
        self._diary.last = text
        self._diary.note("struck", fault=fault.number, text=text)
        self._active.append(fault)
        if fault.kind == "kill-saving":
            self._peers[fault.peers[0]].hunt = fault.number
        if fault.kind == "twins":
            self._twins[fault.number] = self._swarm.join(twin_of(fault), self._address)
        if fault.kind in ("kill", "region", "blackout", "power-cut", "leave"):
            for name in fault.peers:
                self._peers[name].fault = fault.number
        if fault.kind in ("kill", "region", "blackout"):
            for name in fault.peers:
                self._peers[name].back_at = max(fault.end, self._diary.now())
        if fault.kind == "blackout":
            self._blackout(fault)
        if fault.kind == "power-cut":
            self._power_cut(fault)

    def _blackout(self, fault: Fault) -> None:
        """End all other faults; one peer resumes later, then the others join it."""
        for other in [other for other in self._active if other is not fault]:
            self._undo(other)
        first, *others = fault.peers
        self._founding = []
        for name in others:
            self._peers[name].follows = first
        self._peers[first].follows = None

    def _power_cut(self, fault: Fault) -> None:
        """End all other faults, and the learners and the bootstrap; each peer is started again at a time of its own."""
        for other in [other for other in self._active if other is not fault]:
            self._undo(other)
        self._swarm.bootstrap.kill()
        self._swarm.kill_leftovers()
        for name, after_s in zip(fault.peers, fault.returns_s, strict=True):
            self._peers[name].back_at = self._diary.now() + after_s

    def _undo(self, fault: Fault) -> None:
        self._active.remove(fault)
        with contextlib.suppress(NotNow, psutil.Error):
            self._hand.undo(fault)
            if fault.kind == "rollback":
                self._peers[fault.peers[0]].fault = fault.number
        if fault.kind == "twins":
            self._end_twin(fault, self._twins.pop(fault.number))
        self._diary.note("undone", fault=fault.number)

    def _end_twin(self, fault: Fault, twin: Member) -> None:
        """End a copy of a peer, which should have ended by itself with a reason."""
        status, exited = twin.status, twin.reports.find(Exited)
        if twin.is_running:
            for process in psutil.Process(twin.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()  # its learner would wait for it
            twin.kill()
        self._diary.note("twin", peer=fault.peers[0], fault=fault.number, status=status, text=str(exited or ""))

    def _handle_end(self, peer: Peer, member: Member) -> None:
        """Its node is gone: written down once, and started again unless it was the end of the run."""
        peer.member = None
        member.refresh()
        is_expected = member.was_killed or peer.is_leaving
        found_nobody = member.status == NOBODY_THERE and peer.tries < TRIES
        self._diary.note("ended", peer=peer.name, status=member.status, is_expected=is_expected or found_nobody)
        if self._diary.phase == "leaving":
            return
        if found_nobody:
            peer.tries += 1
        elif not is_expected:
            self._diary.last = f"{peer.name} ended by itself with status {member.status}"
        if member.was_killed and peer.back_at is None:
            peer.back_at = self._diary.now() + RETRY_S
            if peer.hunt is not None:
                peer.fault, peer.hunt = peer.hunt, None
        if not member.was_killed:
            leave = next((f for f in self._active if f.kind == "leave" and peer.name in f.peers), None)
            peer.back_at = self._diary.now() + (leave.duration_s if leave else RETRY_S)
        peer.is_leaving = False

    def _bring_back(self, peer: Peer) -> None:
        if peer.follows is not None and not self._peers[peer.follows].is_current:
            return
        peer.back_at = peer.follows = None
        self._launch(peer, resumes=not self._founding and not any(other.is_up for other in self._peers.values()))

    def _launch(self, peer: Peer, *, resumes: bool = False) -> Member:
        folders = [str(self._swarm.out / f"peer-{name}") for name in self._peers]
        if resumes:
            command = ["resume", *folders, "--bootstrap", self._address]
        elif self._founding and peer is next(iter(self._peers.values())):
            command = self._founding
        else:
            command = ["join", self._address]
        where = "/ip4/127.0.0.1/tcp/{}"
        listen = ["--listen", where.format(peer.port), "--announce", where.format(self._network.port(peer.name))]
        clock_off_s, lies = self.plan.clock_off_s(peer.name), self.plan.lies(peer.name)
        peer.member = launch(
            self._swarm, peer.name, command, *listen, clock_off_s=clock_off_s, lies=lies, is_recorded=True
        )
        self._diary.note("launched", peer=peer.name, text=command[0])
        return peer.member

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _all_train(self, complaint: str) -> None:
        deadline = time.monotonic() + READY_S
        honest = [peer for name, peer in self._peers.items() if not self.plan.lies(name)]
        while not all(peer.is_training for peer in honest):
            if time.monotonic() > deadline:
                missing = ", ".join(peer.name for peer in honest if not peer.is_training)
                raise SwarmError(f"{complaint} within {READY_S:.0f} s: {missing}; see {self.out}")
            await self._tick()

    def _peer_at_port(self, port: int) -> str | None:
        """The peer whose node holds a local port."""
        for peer in self._peers.values():
            if peer.member is None or not peer.is_up:
                continue
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(peer.member.process.pid).net_connections("tcp4")
                if any(connection.laddr and connection.laddr.port == port for connection in connections):
                    return peer.name
        return None


def _state(peer: Peer) -> str:
    if not peer.is_up:
        return "down"
    if peer.is_stopped:
        return "stopped"
    return "training" if peer.is_training else "starting"


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def write_toml(path: Path, values: dict[str, Any]) -> None:
    """Write tables as TOML: one dotted key a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_lines("", values)))


def _lines(prefix: str, values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _lines(f"{prefix}{key}.", value)
        elif value is not None:
            yield f"{prefix}{key} = {json.dumps(value)}\n"
