"""A testbed in the kernel: made from a topology, changed while it runs, taken down, found again by other processes.

::

    site:  eth0 -- access [edge] wan -- (router process)                      where the kernel has no netem
    site:  eth0 -- access [edge] wan -- wan [pop] to3 -- to0 [pop] wan -- ... where it has
                   ^ tbf: down   ^ tbf: up        ^ netem, one for each direction of each path

Rules of this file:
1. What exists is in the kernel and under ``FOLDER``; a ``Testbed`` only knows its name and what it is like now. So any
   process can use, change or remove what another one made.
2. Making begins with removing what has the same name. A failure removes what was made; a SIGKILL leaves something that
   ``clean`` removes whole: namespaces by their prefix, processes by their namespaces (``namespaces.py``).
3. One lock file keeps two tools from making or removing at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.netbed.kernel_features import Engine, choose_engine, probe
from benchmarks.netbed.namespaces import PREFIX, TestbedError, configure, listed, need_root, remove
from benchmarks.netbed.nat_routers import make_narrow, names, wire_behind
from benchmarks.netbed.qdisc import set_bucket, set_netem, set_offloads
from benchmarks.netbed.router import RouterPlan, Way
from benchmarks.netbed.topology import Change, Route, Topology, address, address6, changed, parse_topology
from benchmarks.netbed.wiring import join_pop, start_router, wire_ip6, wire_pop, wire_site

FOLDER = Path("/run/p2pdiloco-testbed")


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes must know."""

    source: str
    engine: Engine
    router: int | None
    played: int = 0
    is_verified: bool = False


class Testbed:
    """One that is up."""

    __test__ = False  # not a class of tests

    def __init__(self, topology: Topology, state: _State) -> None:
        self.topology = topology
        self._state = state

    @property
    def engine(self) -> Engine:
        """Who delays and loses."""
        return self._state.engine

    @property
    def is_verified(self) -> bool:
        """Whether the last measurement since it was made agreed with the request."""
        return self._state.is_verified

    @property
    def router(self) -> int | None:
        """The router's process, if there is one."""
        return self._state.router

    def site(self, index: int) -> str:
        """The namespace that is a site."""
        return f"{_prefix(self.topology.name)}{self.topology.sites[index].name}"

    def outside(self, index: int) -> str:
        """The namespace that has a site's address: the site, or its outermost router."""
        return names(self.site(index), self.topology.sites[index].nat)[0]

    def edge(self, index: int) -> str:
        """Where a site's line is limited."""
        return f"{self.site(index)}.edge"

    def pop(self, index: int) -> str:
        """Where a site's paths begin, with netem."""
        return f"{self.site(index)}.pop"

    def set_verified(self, is_verified: bool) -> None:
        """Remember for everybody what a measurement found."""
        self._keep(msgspec.structs.replace(self._state, is_verified=is_verified))

    def play_next(self) -> None:
        """Put the next change of the schedule in force.

        Raises:
            TestbedError: it is down.
        """
        change = self.topology.changes[self._state.played]
        self.apply(change)
        self._keep(msgspec.structs.replace(self._state, played=self._state.played + 1))

    def apply(self, change: Change) -> None:
        """Put a change in force that need not be in the schedule; other processes do not learn of it.

        Raises:
            TestbedError: it is down.
            TopologyError: it names what is not there.
        """
        new = changed(self.topology, change)
        for i, (before, after) in enumerate(zip(self.topology.sites, new.sites, strict=True)):
            if before != after:
                self._shape_line(i, new)
        if new.paths != self.topology.paths:
            self._shape_paths(new)
        self.topology = new
        self._keep(msgspec.structs.replace(self._state, is_verified=False))

    def rewind(self) -> None:
        """As it was before any change."""
        self._keep(msgspec.structs.replace(self._state, played=0, is_verified=False))
        self.topology = parse_topology(self._state.source)
        self._shape()

    @property
    def played(self) -> int:
        """How many changes are in force."""
        return self._state.played

    def _keep(self, state: _State) -> None:
        self._state = state
        _write(_folder(self.topology.name) / "state.json", msgspec.json.encode(state))

    def _shape(self) -> None:
        for i in range(len(self.topology.sites)):
            self._shape_line(i, self.topology)
        self._shape_paths(self.topology)

    def _shape_line(self, i: int, topology: Topology) -> None:
        site = topology.sites[i]

        def work(net: Any) -> None:
            set_bucket(net, "access", site.down_bps, site.queue_s)
            set_bucket(net, "wan", site.up_bps, site.queue_s, is_tun=self.engine == "router")

        configure(self.edge(i), work)

    def _shape_paths(self, topology: Topology) -> None:
        if self.engine == "router":
            _write(_plan_path(topology.name), msgspec.json.encode(self._router_plan(topology)))
            if self.router is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.router, signal.SIGHUP)
            return
        others = range(len(topology.sites))
        for i in others:
            routes = {j: topology.path(i, j) for j in others if j != i}
            configure(self.pop(i), partial(_set_netems, routes=routes))
            set_offloads(self.outside(i), "eth0", on=not any(route.loss for route in routes.values()))

    def _router_plan(self, topology: Topology) -> RouterPlan:
        sites = range(len(topology.sites))
        nowhere = Way(delay_s=0.0, jitter_s=0.0, loss=0.0)
        return RouterPlan(
            home=self.edge(0),
            namespaces=tuple(self.edge(i) for i in sites),
            addresses=tuple((address(i), address6(i)) for i in sites),
            ways=tuple(tuple(nowhere if i == j else _way(topology, i, j) for j in sites) for i in sites),
        )

    def _add_ip6(self) -> None:
        """Raises TestbedError: netem's paths carry none."""
        for i, site in enumerate(self.topology.sites):
            if site.ip != "4":
                if self.engine != "router":
                    raise TestbedError(f"site {site.name} has IPv6, which needs --engine router")
                wire_ip6(i, self.site(i), self.edge(i), is_alone=site.ip == "6")

    def _start_router(self) -> int:
        path = _plan_path(self.topology.name)
        _write(path, msgspec.json.encode(self._router_plan(self.topology)))
        edges = [self.edge(i) for i in range(len(self.topology.sites))]
        return start_router(path, path.with_suffix(".log"), edges)

    def _wire(self) -> None:
        sites = range(len(self.topology.sites))
        for i in sites:
            wire_site(i, self.outside(i), self.edge(i))
            wire_behind(self.site(i), self.topology.sites[i].nat, self.topology.sites[i].firewall)
        if self.engine == "netem":
            pops = [self.pop(i) for i in sites]
            for i in sites:
                wire_pop(i, self.edge(i), pops)
            for i in sites:
                join_pop(i, pops)

    def _narrow(self) -> None:
        for i, site in enumerate(self.topology.sites):
            if site.mtu is not None:
                make_narrow(self.edge(i), address(i), site.mtu)


def up(source: bytes, wanted: Engine | None = None) -> Testbed:
    """Make the testbed that TOML describes, in place of one of the same name.

    Raises:
        TopologyError: the text is wrong.
        TestbedError: not root, or the kernel lacks something.
    """
    topology = parse_topology(source)
    need_root()
    engine = choose_engine(probe(), wanted)
    with _locked():
        _remove(topology.name)
        _folder(topology.name).mkdir(parents=True)
        testbed = Testbed(topology, _State(source=source.decode(), engine=engine, router=None))
        try:
            testbed._wire()
            router = testbed._start_router() if engine == "router" else None
            testbed._narrow()
            testbed._add_ip6()
            testbed._shape()
            testbed._keep(_State(source=source.decode(), engine=engine, router=router))
        except BaseException:
            _remove(topology.name)
            raise
    return testbed


def standing(name: str) -> Testbed | None:
    """The testbed of that name, if it is up."""
    try:
        state = msgspec.json.decode((_folder(name) / "state.json").read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        return None
    topology = parse_topology(state.source)
    for change in topology.changes[: state.played]:
        topology = changed(topology, change)
    testbed = Testbed(topology, state)
    present = set(listed(_prefix(name)))
    return testbed if all(testbed.edge(i) in present for i in range(len(topology.sites))) else None


def is_of(testbed: Testbed, source: bytes) -> bool:
    """Whether it was made from this very text."""
    return testbed._state.source == source.decode()


def down(name: str) -> bool:
    """Remove the testbed of that name; whether there was any of it.

    Raises:
        TestbedError: not root.
    """
    need_root()
    with _locked():
        return _remove(name)


def clean() -> tuple[list[str], list[int]]:
    """Remove all testbeds, whole or in pieces: the namespaces' names, and the processes that were killed in them.

    Raises:
        TestbedError: not root, or something could not be removed.
    """
    need_root()
    with _locked():
        names = listed()
        killed = remove(names)
        for path in FOLDER.iterdir():
            if path.is_dir():
                _remove_folder(path)
        return names, killed


def _remove(name: str) -> bool:
    names = listed(_prefix(name))
    remove(names)
    had_folder = _folder(name).exists()
    if had_folder:
        _remove_folder(_folder(name))
    return bool(names) or had_folder


def _remove_folder(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise TestbedError(
            f"{error.filename or path} cannot be removed ({error.strerror}): remove it by hand"
        ) from error


def _prefix(name: str) -> str:
    return f"{PREFIX}{name}--"


def _folder(name: str) -> Path:
    return FOLDER / name


def _plan_path(name: str) -> Path:
    return _folder(name) / "router.json"


def _way(topology: Topology, i: int, j: int) -> Way:
    route = topology.path(i, j)
    return Way(delay_s=route.round_trip_s / 2, jitter_s=route.jitter_s, loss=route.loss)


def _write(path: Path, data: bytes) -> None:
    """Whole, or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _set_netems(net: Any, routes: Mapping[int, Route]) -> None:
    for j, route in routes.items():
        set_netem(net, f"to{j}", route)
