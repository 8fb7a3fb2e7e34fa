"""Two machines on one network, of which no other address is known: real processes in network namespaces on a bridge.
They need root."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.netbed.namespaces import PREFIX, TestbedError, configure, create, interface, need_root, remove
from benchmarks.wan.homes import CONFIG, START_S, WORDS, Home, wait_for
from p2pdiloco.access.invite_code import decode_invite, encode_invite
from p2pdiloco.cli.errors import NOBODY_THERE
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Invited

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy]  # namespaces are the machine's

SWITCH, ANN, BOB = (f"{PREFIX}lan-{name}" for name in ("switch", "ann", "bob"))
HOSTS = {ANN: "10.77.0.1", BOB: "10.77.0.2"}
GONE = "/ip4/10.77.0.66/tcp/31337"
"""An address that nobody has any more."""


class Machine(Home):
    """A process in a namespace."""

    def __init__(self, namespace: str, folder: Path, words: list[str]) -> None:
        self.name = namespace
        self.folder = folder
        folder.mkdir(parents=True)
        self._log = folder / "log"
        words = [words[0], "--state", str(folder / "state"), "--log-format", "json", *words[1:]]
        with self._log.open("ab") as log, status_pipe.opened() as (self.reports, status_fd):
            self.process: subprocess.Popen[bytes] = self.begin(namespace, words, log, status_fd)


@contextmanager
def bridged() -> Iterator[None]:
    """Two namespaces whose interfaces are ports of one bridge. They have no route to anywhere else."""
    names = [SWITCH, *HOSTS]
    remove(names)
    create(names)
    try:

        def switch(net: Any) -> None:
            net.link("add", ifname="br0", kind="bridge")
            bridge = interface(net, "br0")
            net.link("set", index=bridge, state="up")
            for port, namespace in enumerate(HOSTS):
                net.link("add", ifname=f"port{port}", kind="veth", peer={"ifname": "eth0", "net_ns_fd": namespace})
                index = interface(net, f"port{port}")
                net.link("set", index=index, master=bridge, state="up")

        configure(SWITCH, switch)
        for namespace, host in HOSTS.items():

            def plug_in(net: Any, host: str = host) -> None:
                index = interface(net, "eth0")
                net.addr("add", index=index, address=host, prefixlen=24)
                net.link("set", index=index, state="up")

            configure(namespace, plug_in)
        yield
    finally:
        remove(names)


def run_file(folder: Path) -> Path:
    corpus, path = folder / "corpus", folder / "run.toml"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(" ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(1000)))
    values = {**CONFIG, "access": "invite", "data.path": str(corpus), "inner.steps": 100_000}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_invite_whose_addresses_are_stale_leads_to_a_peer_on_the_same_network(tmp_path: Path) -> None:
    """The founder's machine has another address than when it made the invite. There is no bootstrap and no internet."""
    try:
        need_root()
    except TestbedError as error:
        pytest.skip(str(error))
    path = run_file(tmp_path)
    own = ["--threads", "1", "--data", str(tmp_path / "corpus"), "--stay-s", "0", "--page", "off"]
    try:
        with bridged():
            ann = Machine(ANN, tmp_path / "ann", ["start", str(path), *own])
            invited: Invited = wait_for(lambda: ann.reports.find(Invited), [ann], START_S, "an invite")
            invite = decode_invite(invited.invite)
            stale = encode_invite(msgspec.structs.replace(invite, addresses=(GONE,), others=()))
            kim = Machine(BOB, tmp_path / "kim", ["join", stale, "--no-lan", *own])
            assert kim.process.wait(START_S) == NOBODY_THERE, kim.told()
            bob = Machine(BOB, tmp_path / "bob", ["join", stale, *own])
            homes = [ann, bob]
            wait_for(lambda: all(home.live == 2 for home in homes), homes, START_S, "both are connected")
            (found,) = [line for line in bob.lines() if line["event"] == "found a peer on the local network"]
            assert found["address"].startswith(f"/ip4/{HOSTS[ANN]}/tcp/"), os.fspath(bob.folder)
    except TestbedError as error:
        pytest.skip(str(error))
