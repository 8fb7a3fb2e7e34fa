"""The demo's scenario: a swarm on this machine, with a kill, a late joiner and a dead bootstrap node.

Rules of this file:
1. Every peer is a real process that communicates over loopback sockets and a real DHT. It is started with the commands
   that a user types, and observed only through the files that it writes.
2. All processes have a mark in their environment, so that the demo can count and kill leftover ones.
3. The numbers of the report are measured from outside: the losses by evaluating version 0 and the checkpoint that the
   founder saved.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

from p2pdiloco.demo.local_swarm import Member, Swarm, SwarmError
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.util.status_pipe import PageAt


class Story:
    """Events of a demo, with their times."""

    def __init__(self, began_unix: float) -> None:
        self.began_unix = began_unix
        self.killed: Member | None = None
        self.killed_unix = 0.0
        self.version_at_kill = 0
        self.late: Member | None = None
        # 0: the bootstrap node was not killed.
        self.bootstrap_killed_unix = 0.0
        self.members: list[Member] = []
        self.leftovers: list[str] = []

    @property
    def took_s(self) -> float:
        """Seconds from the first process to the end of the last peer's training."""
        return max(member.view.trained_at for member in self.members) - self.began_unix


# Share of the run's steps after which one peer is killed.
KILL_AT = 0.35
JOIN_AT = 0.45
BOOTSTRAP_KILL_AT = 0.75
POLL_S = 0.5
# Interval between two progress lines if standard output is not a terminal.
LINE_S = 5.0


def play(swarm: Swarm, config: RunConfig, limit_s: float, is_interrupted: Callable[[], bool]) -> Story | None:
    """Play the scenario: found, join, kill a peer, join late, kill the bootstrap node, and wait for the end.

    Returns None if ``is_interrupted()`` became true.

    Raises:
        SwarmError: a peer failed, or the run did not end within ``limit_s`` seconds.
    """
    began = time.monotonic()
    print("starting a bootstrap node and three peers on this machine ...", flush=True)
    address = swarm.start_bootstrap()
    founder = swarm.start_founder("A", swarm.out / "run.toml", address, "--page", "auto")
    for name in ("B", "C"):
        swarm.join(name, address)
    story = Story(began_unix=time.time())
    screen = _Screen(config.inner.steps)
    is_page_told = False
    while any(member.is_running for member in swarm.members if not member.was_killed):
        if is_interrupted():
            print("\nstopping the swarm ...", flush=True)
            swarm.stop()
            return None
        if time.monotonic() - began > limit_s:
            raise SwarmError(
                f"the run is at step {founder.view.step} after {limit_s:.0f} s, and not over: on a slow machine, allow "
                "more time with --time-limit, or fewer steps with --steps"
            )
        for member in swarm.members:
            member.refresh()
            if member.ended_badly:
                raise SwarmError(f"peer {member.name} ended with status {member.status}, see {member.log_path}")
        if not is_page_told and (page := founder.reports.find(PageAt)) is not None:
            is_page_told = True
            screen.say(f"{page}  to see it live")
        share = founder.view.step / config.inner.steps
        if share >= KILL_AT and story.killed is None:
            story.killed = swarm["B"]
            story.killed_unix, story.version_at_kill = time.time(), founder.view.version
            swarm["B"].kill()
            screen.say(f"peer B killed with SIGKILL at step {founder.view.step}")
        if share >= JOIN_AT and story.late is None:
            story.late = swarm.join("D", address)
            screen.say("a fourth peer, D, joins with nothing but the bootstrap address")
        if share >= BOOTSTRAP_KILL_AT and not story.bootstrap_killed_unix:
            story.bootstrap_killed_unix = time.time()
            swarm.bootstrap.kill()
            screen.say("the bootstrap node is killed, too; the peers go on")
        screen.show(swarm.members, time.monotonic() - began)
        time.sleep(POLL_S)
    swarm.stop()
    story.leftovers = swarm.leftovers()
    story.members = swarm.members
    return story


class _Screen:
    """Shows progress: a table redrawn in place on a terminal, and a line every LINE_S elsewhere."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._is_terminal = sys.stdout.isatty()
        self._drawn = 0
        self._line_at = 0.0

    def say(self, text: str) -> None:
        """Print a line about an event above the table."""
        self._erase()
        print(f"  * {text}", flush=True)

    def show(self, members: Sequence[Member], elapsed_s: float) -> None:
        if self._is_terminal:
            self._erase()
            lines = [self._summary(members, elapsed_s), *(m.line() for m in members)]
            print("\n".join(line[: shutil.get_terminal_size().columns - 1] for line in lines), flush=True)
            self._drawn = len(lines)
        elif elapsed_s - self._line_at >= LINE_S:
            self._line_at = elapsed_s
            print(self._summary(members, elapsed_s), flush=True)

    def _summary(self, members: Sequence[Member], elapsed_s: float) -> str:
        step = min(self._total, max(m.view.step for m in members))
        version = max(m.view.version for m in members)
        live = sum(m.is_running for m in members)
        losses = [m.view.held_out[-1] for m in members if m.view.held_out]
        held_out = f"{max(losses)[1]:.3f}" if losses else "-"
        merged = max(m.view.merged_tokens for m in members)
        sent = sum(m.view.sent_bytes for m in members)
        return (
            f"[{elapsed_s:5.0f} s] {live} peers  step {step}/{self._total}  version {version}  "
            f"held-out loss {held_out}  {merged:,} tokens merged  {sent / 1e6:.1f} MB sent"
        )

    def _erase(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}F\x1b[J", end="")
            self._drawn = 0
