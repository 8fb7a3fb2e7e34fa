"""What a testbed is to be like: sites with access lines, paths between them, and how they change, from a TOML file.

Rules of this file:
1. Pure but for reading the file. Rates are bits per second on the wire (with the Ethernet header, as tc counts), times
   are seconds, losses are shares of packets in each direction.
2. A path is the same both ways: each direction delays half the round trip, plus or minus up to the jitter (uniform),
   and never reorders.
3. Whatever is wrong is said in a sentence that names the field and what is allowed.
4. A change gives a whole new topology; who applies it compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

RATE_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
SLOWEST_BPS = 32_000
FASTEST_BPS = 10_000_000_000
SHIPPED = Path(__file__).parent / "topologies"

Name = Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*\Z")]
Milliseconds = Annotated[float, Meta(ge=0.0, le=2_000.0)]
Loss = Annotated[float, Meta(ge=0.0, le=0.5)]
Nat = Literal["keep", "random", "cgn"]
"""A router that keeps source ports; one that does not; a home's behind a carrier's, both of which do."""
Ip = Literal["4", "6", "46"]
"""IPv4, IPv6 alone, both."""
Mtu = Annotated[int, Meta(ge=576, le=1500)]


class TopologyError(Exception):
    """The file cannot be used; the message names the field and what is allowed."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One place with its access line."""

    name: str
    up_bps: int
    down_bps: int
    queue_s: float
    """How long a packet waits at most before either end of the line."""
    nat: Nat | None = None
    mtu: int | None = None
    """Longer packets vanish."""
    firewall: int | None = None
    """The only TCP port that can be dialled from here; nobody dials in."""
    ip: Ip = "4"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between two sites' lines."""

    round_trip_s: float
    jitter_s: float
    loss: float


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At some time after the start, new values for one site's line or one path; what is not named stays."""

    at_s: Annotated[float, Meta(ge=0.0, le=86_400.0)]
    site: str | None = None
    between: tuple[str, str] | None = None
    up: str | None = None
    down: str | None = None
    round_trip_ms: Milliseconds | None = None
    jitter_ms: Milliseconds | None = None
    loss: Loss | None = None


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Sites, the path of each pair of them by their indices (smaller first), changes in order of time."""

    name: str
    sites: tuple[Site, ...]
    paths: Mapping[tuple[int, int], Route]
    changes: tuple[Change, ...] = ()

    def path(self, a: int, b: int) -> Route:
        """Between two different sites."""
        return self.paths[min(a, b), max(a, b)]

    def index(self, site: str) -> int:
        """Of a site by its name.

        Raises:
            TopologyError: there is no such site.
        """
        for i, candidate in enumerate(self.sites):
            if candidate.name == site:
                return i
        raise TopologyError(f"there is no site {site!r}: {self.name} has {', '.join(s.name for s in self.sites)}")


class _Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    up: str | None = None
    down: str | None = None
    queue_ms: Annotated[float, Meta(ge=1.0, le=2_000.0)] | None = None
    nat: Nat | None = None
    mtu: Mtu | None = None
    firewall: Literal["443"] | None = None
    ip: Ip = "4"


class _Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    between: tuple[str, str]
    round_trip_ms: Milliseconds | None = None
    jitter_ms: Milliseconds | None = None
    loss: Loss | None = None


class _Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    up: str = "1gbit"
    down: str = "1gbit"
    queue_ms: Annotated[float, Meta(ge=1.0, le=2_000.0)] = 50.0
    round_trip_ms: Milliseconds = 0.0
    jitter_ms: Milliseconds = 0.0
    loss: Loss = 0.0


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    site: Annotated[tuple[_Site, ...], Meta(min_length=2, max_length=128)]
    about: str = ""
    defaults: _Defaults = _Defaults()
    link: tuple[_Link, ...] = ()
    change: tuple[Change, ...] = ()


def find_topology(text: str) -> Path:
    """A path as it is, or the name of a shipped topology.

    Raises:
        TopologyError: neither.
    """
    path = Path(text)
    if path.suffix == ".toml" or path.exists():
        return path
    shipped = SHIPPED / f"{text}.toml"
    if not shipped.is_file():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml")))
        raise TopologyError(f"{text!r} is neither a file nor one of the shipped topologies: {names}")
    return shipped


def parse_topology(data: bytes | str) -> Topology:
    """The topology that TOML describes.

    Raises:
        TopologyError: it says what cannot be.
    """
    try:
        file = msgspec.toml.decode(data, type=_File)
    except (msgspec.DecodeError, ValueError) as error:
        raise TopologyError(str(error)) from error
    names = [site.name for site in file.site]
    if len(set(names)) != len(names):
        raise TopologyError("site.name: two sites have the same name")
    base = _path(file.defaults.round_trip_ms, file.defaults.jitter_ms, file.defaults.loss, "defaults")
    paths = {(i, j): base for j in range(len(names)) for i in range(j)}
    topology = Topology(name=file.name, sites=tuple(_site(one, file.defaults) for one in file.site), paths=paths)
    given: set[frozenset[str]] = set()
    for link in file.link:
        if frozenset(link.between) in given:
            raise TopologyError(f"link.between: {' and '.join(link.between)} have two links")
        given.add(frozenset(link.between))
        paths[_pair(topology, link.between, "link")] = _updated(base, link, f"link {'-'.join(link.between)}")
    changes = tuple(sorted(file.change, key=lambda change: change.at_s))
    final = topology
    for change in changes:
        final = changed(final, change)
    return msgspec.structs.replace(topology, changes=changes)


def changed(topology: Topology, change: Change) -> Topology:
    """The topology after ``change``.

    Raises:
        TopologyError: it names what is not there, or what is not allowed.
    """
    where = f"change at {change.at_s:g} s"
    if (change.site is None) == (change.between is None):
        raise TopologyError(f"{where}: name either site or between")
    if change.site is not None:
        if (change.round_trip_ms, change.jitter_ms, change.loss) != (None, None, None):
            raise TopologyError(f"{where}: round_trip_ms, jitter_ms and loss belong to a pair: say between, not site")
        i = topology.index(change.site)
        site = topology.sites[i]
        new = msgspec.structs.replace(
            site,
            up_bps=site.up_bps if change.up is None else bits_per_second(change.up, f"{where}: up"),
            down_bps=site.down_bps if change.down is None else bits_per_second(change.down, f"{where}: down"),
        )
        return msgspec.structs.replace(topology, sites=(*topology.sites[:i], new, *topology.sites[i + 1 :]))
    assert change.between is not None
    if (change.up, change.down) != (None, None):
        raise TopologyError(f"{where}: up and down belong to one site: say site, not between")
    pair = _pair(topology, change.between, where)
    path = _updated(topology.paths[pair], change, where)
    return msgspec.structs.replace(topology, paths={**topology.paths, pair: path})


def bits_per_second(text: str, field: str) -> int:
    """``2.5gbit``, ``50mbit``, ``800kbit`` as a number.

    Raises:
        TopologyError: no rate, or out of bounds.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    rate = 0 if found is None else round(float(found[1]) * RATE_UNITS[found[2]])
    if not SLOWEST_BPS <= rate <= FASTEST_BPS:
        raise TopologyError(f"{field}: {text!r} is no rate from 32kbit to 10gbit, like 2.5gbit or 50mbit")
    return rate


def rate_text(bps: float) -> str:
    """As people say it: ``2.5 Gbit/s``."""
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bps >= size:
            return f"{bps / size:.4g} {unit}"
    return f"{bps / 1e3:.4g} kbit/s"


def address(site: int) -> str:
    """By which others reach a site, by its index: its own, or its outermost router's."""
    return f"10.99.{site + 1}.1"


def address6(site: int) -> str:
    """The same by IPv6."""
    return f"2a0e:99:{site + 1:x}::1"


def _site(one: _Site, defaults: _Defaults) -> Site:
    if one.ip != "4" and (one.nat, one.mtu, one.firewall) != (None, None, None):
        raise TopologyError(f"site {one.name}: ip is for sites without nat, mtu and firewall, which are made of IPv4")
    queue_ms = defaults.queue_ms if one.queue_ms is None else one.queue_ms
    return Site(
        name=one.name,
        up_bps=bits_per_second(one.up or defaults.up, f"site {one.name}: up"),
        down_bps=bits_per_second(one.down or defaults.down, f"site {one.name}: down"),
        queue_s=queue_ms / 1e3,
        nat=one.nat,
        mtu=one.mtu,
        firewall=None if one.firewall is None else int(one.firewall),
        ip=one.ip,
    )


def _pair(topology: Topology, names: tuple[str, str], where: str) -> tuple[int, int]:
    try:
        a, b = (topology.index(name) for name in names)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error
    if a == b:
        raise TopologyError(f"{where}: between names {names[0]} twice")
    return min(a, b), max(a, b)


def _updated(path: Route, new: Any, where: str) -> Route:
    return _path(
        path.round_trip_s * 1e3 if new.round_trip_ms is None else new.round_trip_ms,
        path.jitter_s * 1e3 if new.jitter_ms is None else new.jitter_ms,
        path.loss if new.loss is None else new.loss,
        where,
    )


def _path(round_trip_ms: float, jitter_ms: float, loss: float, where: str) -> Route:
    if jitter_ms > round_trip_ms / 2:
        raise TopologyError(f"{where}: jitter_ms must be at most half of round_trip_ms ({round_trip_ms:g})")
    return Route(round_trip_s=round_trip_ms / 1e3, jitter_s=jitter_ms / 1e3, loss=loss)
