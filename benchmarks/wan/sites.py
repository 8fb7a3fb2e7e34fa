"""Workers in the sites of a throttled network, and their reports.

1. A testbed is created and measured for each series (``must_agree``). Lines are opened wide while workers find each
   other, which is in no figure, and are restored before the first step.
2. However a program ends (SIGTERM included), its testbed and everything in it ends too. After a SIGKILL the workers die
   with it; ``python -m benchmarks.netbed clean``, or the next start, removes the rest.
3. All reports are kept with the worker that sent them: ``Words``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.netbed import namespace_exec, testbed, verification
from benchmarks.netbed.namespaces import kill_inside
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import Change, address
from benchmarks.wire.baselines import environments

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
START_S = 2.0
"""From "go" to the common start."""
SETTLE_S = 10.0
"""After which a line that was off is measured once more."""
WIDE = "1gbit"
ENVIRONMENTS = {"hivemind": "hivemind", "torchft": "torchft"}
Words = dict[str, Any]


class BenchmarkError(Exception):
    """A worker failed, or there is no result; the text says which."""


def topology_toml(
    name: str, lines: Sequence[tuple[str, str]], trips_ms: Mapping[tuple[int, int], float], loss: float = 0.0
) -> str:
    """A topology with a site for each (up, down); pairs that are not named have no delay."""
    text = [f'name = "{name}"', "[defaults]", "queue_ms = 50", f"loss = {loss}"]
    for i, (up, down) in enumerate(lines):
        text += ["[[site]]", f'name = "s{i}"', f'up = "{up}"', f'down = "{down}"']
    for (a, b), trip in trips_ms.items():
        text += ["[[link]]", f'between = ["s{a}", "s{b}"]', f"round_trip_ms = {trip:g}"]
    return "\n".join(text) + "\n"


def rate_text(bps: float) -> str:
    """For a topology."""
    return f"{bps / 1e3:.0f}kbit"


@contextlib.contextmanager
def stage(options: argparse.Namespace, toml: str) -> Iterator[tuple[Testbed, Path]]:
    """The network, and a folder for what is written: ``--keep``, or one that goes.

    Raises:
        TestbedError: as ``network``.
    """
    on_sigterm()
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-wan-") as folder, network(toml) as made:
        yield made, Path(options.keep or folder)


@contextlib.contextmanager
def network(toml: str, *, is_verified: bool = True) -> Iterator[Testbed]:
    """A testbed, measured; gone at the end.

    Raises:
        TestbedError: it cannot be made, or is off (``LinkOffError``).
    """
    made = testbed.up(toml.encode())
    try:
        if is_verified:
            verification.must_agree(made)
        yield made
    finally:
        testbed.down(made.topology.name)


def on_sigterm() -> None:
    """SIGTERM ends a program as Ctrl+C does: through its ``finally``s."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


class Worker:
    """A process in a site."""

    def __init__(self, made: Testbed, site: int, module: str, config: Mapping[str, object], log: Path) -> None:
        self.site = site
        self.name = str(config.get("name", site))
        system = str(config.get("system", ""))
        python = sys.executable
        if system in ENVIRONMENTS:
            python = str(environments.python_of(ENVIRONMENTS[system]))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                namespace_exec.command(made.site(site), [python, "-W", "ignore", "-m", module, json.dumps(config)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.log = log
        self.on_word: Callable[[Words], None] = lambda word: None
        """Called on the reading thread."""
        self.words: list[Words] = []
        self._news: queue.Queue[Words | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with contextlib.suppress(ValueError):
                word = json.loads(text)
                self.words.append(word)
                self._news.put(word)
                self.on_word(word)
        self._news.put(None)

    def tell(self, **command: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def wait_for(self, event: str, patience_s: float = PATIENCE_S) -> Words:
        """The next word of that kind; "": of any.

        Raises:
            BenchmarkError: it ended, or does not say so in time.
        """
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(queue.Empty):
            while True:
                word = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
                if word is None:
                    break
                if event in ("", word.get("event")):
                    return word
        tail = self.log.read_text(errors="replace").splitlines()[-4:]
        raise BenchmarkError(f"worker {self.name} did not say {event!r}; {self.log} ends: {' / '.join(tail)}")

    def of(self, event: str) -> list[Words]:
        """All that it said of that kind."""
        return [word for word in self.words if word["event"] == event]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def site_config(site: int) -> dict[str, object]:
    """Where a worker is."""
    return {"host": address(site), "interface": "eth0", "first": address(0)}


def widen(made: Testbed) -> None:
    """Open all lines; ``rewind`` closes them again."""
    for site in made.topology.sites:
        made.apply(Change(at_s=0.0, site=site.name, up=WIDE, down=WIDE))


class Series:
    """All workers of one system on a testbed, from their start to their end. ``with Series(...) as series``."""

    def __init__(self, made: Testbed, configs: Sequence[Mapping[str, object]], logs: Path) -> None:
        self._made = made
        self._configs = list(configs)
        self._address = ""
        self.former: list[Worker] = []
        """Those that were lost and replaced."""
        self._logs = logs
        self.workers: list[Worker] = []
        self.began = 0.0

    def __enter__(self) -> Series:
        if not self._made.is_verified:
            self._measure()
        widen(self._made)
        try:
            self.workers = [self._start(site) for site in range(len(self._configs))]
            told = [worker.wait_for("made")["address"] for worker in self.workers]
            for worker in self.workers:
                worker.tell(do="connect", address=told[0])
            self._address = told[0]
            for worker in self.workers:
                worker.wait_for("connected")
        except BaseException:
            self.__exit__()
            raise
        self._made.rewind()
        return self

    def _measure(self) -> None:
        """Once more if it is off: what the series before left on slow lines has arrived by then."""
        try:
            verification.must_agree(self._made)
        except verification.LinkOffError as error:
            print(f"{error}; measuring again in {SETTLE_S:g} s", file=sys.stderr)
            time.sleep(SETTLE_S)
            verification.must_agree(self._made)

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        kill_inside([self._made.site(i) for i in range(len(self._made.topology.sites))])
        self._made.rewind()

    def _start(self, site: int) -> Worker:
        config = self._configs[site]
        whole = {**config, **site_config(site), "index": site, "workers": len(self._configs)}
        log = self._logs / f"{config['system']}-{site}.log"
        return Worker(self._made, site, "benchmarks.wan.worker", whole, log)

    def go(self, steps: int, cap_s: float) -> None:
        """Let all begin at the same moment, ``began``."""
        self.began = time.monotonic() + START_S
        for worker in self.workers:
            worker.tell(do="go", at=self.began, steps=steps, cap_s=cap_s)

    def lose(self, site: int) -> None:
        """SIGKILL to all that runs in a site."""
        kill_inside([self._made.site(site)])
        self.workers[site].process.wait()

    def come(self, site: int, config: Mapping[str, object], steps: int, cap_s: float) -> None:
        """A worker begins there now, and trains as soon as it has joined. Its words are kept with those of the workers
        that were in the site before."""
        if site == len(self._configs):
            self._configs.append(config)
        worker = self._start(site)
        address = self._address

        def answer(word: Words) -> None:
            if word["event"] == "made":
                worker.tell(do="connect", address=address)
            elif word["event"] == "connected":
                worker.tell(do="go", at=self.began, steps=steps, cap_s=cap_s)

        worker.on_word = answer
        if site == len(self.workers):
            self.workers.append(worker)
        else:
            self.former.append(self.workers[site])
            self.workers[site] = worker

    def elapsed(self) -> float:
        """Seconds since the first step began; what workers call "at"."""
        return time.monotonic() - self.began

    def train(self, steps: int, cap_s: float) -> None:
        """Until worker 0 is done, and the others have trained."""
        self.go(steps, cap_s)
        self.finish(cap_s)

    def finish(self, cap_s: float) -> None:
        """Wait for all that were told to go."""
        self.workers[0].wait_for("trained", START_S + cap_s + PATIENCE_S)
        for worker in self.workers[1:]:
            with contextlib.suppress(BenchmarkError):  # those that wait for others that are done
                worker.wait_for("trained", 20.0)
        self.workers[0].wait_for("done")
