"""What stands between a site and its line: routers that translate addresses, a firewall, a hole for long packets.

::

    nat = "keep", "random":  site eth0 -- lan [home] eth0 -- the line
    nat = "cgn":             site eth0 -- lan [home] eth0 -- lan [carrier] eth0 -- the line

The outermost of them has the site's address. A router lets in what belongs to a connection from within, and nothing
else; its own kernel answers echoes and measurements.

Rules of this file:
1. Rules of nftables are written by pyroute2, which the testbed has anyway: no program but the kernel is needed.
2. "keep" and "cgn" keep the source port wherever they can, "random" never does.
"""

from __future__ import annotations

import ipaddress
import itertools
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.netbed.namespace_exec import opened_in
from benchmarks.netbed.namespaces import TestbedError, configure, create, interface
from benchmarks.netbed.topology import Nat
from benchmarks.netbed.wiring import MTU, set_up_kernel

INSIDE = "192.168.1"
"""In every home: as many homes have the same addresses."""
CARRIER = "100.64.1"
OUT, IN = "eth0", "lan"
IPV4 = 2
ACCEPT, DROP = 1, 0
META_IN, META_OUT, META_L4 = 6, 7, 16
CT_STATE, CT_STATUS = 0, 2
ESTABLISHED_OR_RELATED = 6
TRANSLATED = 1 << 5
"""Of a connection's status: its destination is another one than was dialled."""
DESTINATION_NAT = -100
TO_DESTINATION = 1
NOT_EQUAL = 1
TRANSPORT_HEADER = 2
TCP, ICMP = 6, 1
NAME_BYTES = 16
SOURCE_NAT = 100
"""The priority at which the kernel wants it."""


def names(site: str, nat: Nat | None) -> list[str]:
    """The namespaces from the line inwards; the last is the site."""
    return {None: [site], "cgn": [f"{site}.carrier", f"{site}.home", site]}.get(nat, [f"{site}.home", site])


def wire_behind(site: str, nat: Nat | None, firewall: int | None) -> None:
    """The namespaces behind the outermost one, which has its line already, and what each lets through.

    Raises:
        TestbedError: the kernel has no nftables, or no address translation.
    """
    chain = names(site, nat)
    create(chain[1:])
    for router, inner in itertools.pairwise(chain):
        net = INSIDE if inner == site else CARRIER
        opened_in(inner, set_up_kernel)
        configure(router, partial(_join, inner=inner, gateway=f"{net}.1", address=f"{net}.2"))
        configure(inner, partial(_route_out, gateway=f"{net}.1"))
        _translate(router, is_random=nat == "random")
    if firewall is not None:
        _let_out(site, firewall)


def make_narrow(edge: str, site_address: str, mtu: int) -> None:
    """Whatever is longer vanishes at the edge, in both directions, and nobody is told."""

    def work(net: Any) -> None:
        net.route("add", dst=f"{site_address}/32", oif=interface(net, "access"), metrics={"mtu": mtu})
        for known in net.get_routes(dst="10.99.0.0/16"):
            hop = {"gateway": known.get_attr("RTA_GATEWAY")} if known.get_attr("RTA_GATEWAY") else {}
            net.route("replace", dst="10.99.0.0/16", oif=interface(net, "wan"), metrics={"mtu": mtu}, **hop)

    configure(edge, work)
    _install(edge, "silent", "output", "filter", 0, [(*_protocol(ICMP), *_verdict(DROP))])


def forward(router: str, port: int, host: str, inner: int) -> None:
    """Have TCP ``port`` of a router lead to ``inner`` of ``host``, behind it.

    Raises:
        TestbedError: the kernel refuses.
    """
    values = [_expression("immediate", {"dreg": 1, "data": _value(ipaddress.IPv4Address(host).packed)})]
    values.append(_expression("immediate", {"dreg": 2, "data": _value(inner.to_bytes(2, "big"))}))
    where = {"type": TO_DESTINATION, "family": IPV4, "reg_addr_min": 1, "reg_proto_min": 2}
    rule = (*_interface(META_IN, OUT), *_protocol(TCP), *_port(port), *values, _expression("nat", where))
    _install(router, f"map{port}", "prerouting", "nat", DESTINATION_NAT, [rule])


def stop_forwarding(router: str, port: int) -> None:
    """Undo ``forward``; who is connected stays so."""

    def work() -> None:
        from pyroute2.nftables.main import NFTables

        with NFTables(nfgen_family=IPV4) as nft:
            nft.table("del", name=f"map{port}")

    opened_in(router, work)


def _route_out(net: Any, gateway: str) -> None:
    net.route("add", dst="default", gateway=gateway)


def _join(net: Any, inner: str, gateway: str, address: str) -> None:
    net.link("add", ifname=IN, kind="veth", mtu=MTU, peer={"ifname": OUT, "net_ns_fd": inner, "mtu": MTU})
    index = interface(net, IN)
    net.addr("add", index=index, address=gateway, prefixlen=24)
    net.link("set", index=index, state="up")

    def within(own: Any) -> None:
        index = interface(own, OUT)
        own.addr("add", index=index, address=address, prefixlen=24)
        own.link("set", index=index, state="up")

    configure(inner, within)


def _translate(router: str, *, is_random: bool) -> None:
    masquerade = _expression("masq", {"flags": ("NF_NAT_RANGE_PROTO_RANDOM_FULLY",)} if is_random else {})
    _install(router, "nat", "postrouting", "nat", SOURCE_NAT, [(*_interface(META_OUT, OUT), masquerade)])
    strangers = (*_interface(META_IN, OUT), *_verdict(DROP))
    known = [(*_known(), *_verdict(ACCEPT)), (*_forwarded(), *_verdict(ACCEPT))]
    _install(router, "inwards", "forward", "filter", 0, [*known, strangers])
    to_itself = (*_interface(META_IN, OUT), *_protocol(TCP), *_verdict(DROP))
    _install(router, "own", "input", "filter", 0, [(*_known(), *_verdict(ACCEPT)), to_itself])


def _let_out(site: str, port: int) -> None:
    """TCP to this port alone; what comes in belongs to that, or is lost."""
    allowed = (*_interface(META_OUT, OUT), *_protocol(TCP), *_port(port), *_verdict(ACCEPT))
    rules = [(*_known(), *_verdict(ACCEPT)), allowed, (*_interface(META_OUT, OUT), *_verdict(DROP))]
    _install(site, "outwards", "output", "filter", 0, rules)
    strangers = (*_interface(META_IN, OUT), *_verdict(DROP))
    _install(site, "inwards", "input", "filter", 0, [(*_known(), *_verdict(ACCEPT)), strangers])


# ------------------------------------------------------------------------------------------------------------ nftables

Rule = Sequence[dict[str, Any]]


def _install(namespace: str, table: str, hook: str, kind: str, priority: int, rules: Sequence[Rule]) -> None:
    def work() -> None:
        from pyroute2.nftables.main import NFTables

        with NFTables(nfgen_family=IPV4) as nft:
            nft.begin()
            nft.table("add", name=table)
            nft.chain("add", table=table, name="all", hook=hook, type=kind, priority=priority, policy=ACCEPT)
            for rule in rules:
                nft.rule("add", table=table, chain="all", expressions=(rule,))
            nft.commit()

    try:
        opened_in(namespace, work)
    except Exception as error:
        if getattr(error, "code", None) is None:  # pyroute2's NetlinkError carries the kernel's
            raise
        raise TestbedError(
            f"{namespace}: the kernel refuses rules of nftables ({error}): nat, mtu and firewall need "
            "CONFIG_NF_TABLES, CONFIG_NFT_NAT and CONFIG_NFT_MASQ (modprobe nft_masq)"
        ) from error


def _expression(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    data = [(f"NFTA_{name.upper()}_{key.upper()}", value) for key, value in fields.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": data})]}


def _value(data: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", data)]}


def _is(data: bytes, op: int = 0) -> dict[str, Any]:
    return _expression("cmp", {"sreg": 1, "op": op, "data": _value(data)})


def _interface(key: int, name: str) -> Rule:
    return [_expression("meta", {"key": key, "dreg": 1}), _is(name.encode().ljust(NAME_BYTES, b"\0"))]


def _protocol(number: int) -> Rule:
    return [_expression("meta", {"key": META_L4, "dreg": 1}), _is(bytes([number]))]


def _port(number: int) -> Rule:
    """Of TCP's destination."""
    where = {"dreg": 1, "base": TRANSPORT_HEADER, "offset": 2, "len": 2}
    return [_expression("payload", where), _is(number.to_bytes(2, "big"))]


def _known() -> Rule:
    """It belongs to a connection that was let through."""
    mask = struct.pack("=I", ESTABLISHED_OR_RELATED)
    masked = {"sreg": 1, "dreg": 1, "len": 4, "mask": _value(mask), "xor": _value(bytes(4))}
    return [_expression("ct", {"key": CT_STATE, "dreg": 1}), _expression("bitwise", masked), _is(bytes(4), NOT_EQUAL)]


def _forwarded() -> Rule:
    """It was let in by ``forward``."""
    mask = struct.pack("=I", TRANSLATED)
    masked = {"sreg": 1, "dreg": 1, "len": 4, "mask": _value(mask), "xor": _value(bytes(4))}
    return [_expression("ct", {"key": CT_STATUS, "dreg": 1}), _expression("bitwise", masked), _is(bytes(4), NOT_EQUAL)]


def _verdict(code: int) -> Rule:
    data = {"attrs": [("NFTA_DATA_VERDICT", {"attrs": [("NFTA_VERDICT_CODE", code)]})]}
    return [_expression("immediate", {"dreg": 0, "data": data})]
