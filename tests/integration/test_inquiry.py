"""What peers tell whoever only looks, with real sockets: they may be anybody."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pdiloco.cli import doctor, status
from p2pdiloco.cli.peer_options import say
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.node.diagnostics import Finding
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm.run_lookup import RunAnswer, ask_status, observer_transport
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Answer, Observer, Transport
from p2pdiloco.wire.control_messages import PeerStatus, encode
from p2pdiloco.wire.directory_records import RunRecord

HOSTILE = "\x1b]0;mine\x07\x9b2J\n\u202eok  "


class Teller(Observer):
    """Answers everything with one status."""

    def __init__(self) -> None:
        self.told: PeerStatus | None = None

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        return Answer(encode(self.told))


def status_of(peer: PeerId) -> PeerStatus:
    needed = len(PeerStatus.__struct_fields__) - len(PeerStatus.__struct_defaults__)
    numbers = dict.fromkeys(PeerStatus.__struct_fields__[:needed], 0)
    words = {"run": RunId("r"), "name": "run", "peer": peer, "phase": HOSTILE, "trouble": HOSTILE}
    return msgspec.convert(numbers | words, PeerStatus)


def asked(*, in_the_name_of: PeerId | None = None) -> PeerStatus | None:
    async def work() -> PeerStatus | None:
        teller = Teller()
        identity = Identity.ephemeral()
        there = Transport(identity, listen="/ip4/127.0.0.1/tcp/0", run="", version=WIRE_VERSION)
        teller.told = status_of(in_the_name_of or identity.peer_id)
        async with there.serve(teller), observer_transport(Identity.ephemeral()) as here:
            await here.dial(there.listen_addresses()[0])
            return await ask_status(here, identity.peer_id)

    return asyncio.run(work())


def test_a_status_has_nothing_that_a_terminal_obeys() -> None:
    told = asked()
    assert told is not None
    assert all(word.isprintable() for word in (told.name, told.phase, told.trouble))
    assert told.trouble.rstrip().endswith("ok")


def test_what_status_and_doctor_say_of_a_run_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Why nobody was reached may be told in another peer's words."""
    status.show([RunAnswer(RunId("a" * 40), RunRecord("story", 1), trouble=HOSTILE)], as_json=False)
    doctor.show([Finding("failure", "run story", HOSTILE, HOSTILE)], {}, as_json=False)
    doctor.show([Finding("failure", "run story", HOSTILE, HOSTILE)], {}, as_json=True)
    captured = capsys.readouterr()
    lines = (captured.out + captured.err).split("\n")
    assert len(lines) == 7
    assert sum("ok" in line for line in lines) == 4
    assert all(line.isprintable() for line in lines)


def test_nobody_tells_a_status_in_anothers_name() -> None:
    assert asked(in_the_name_of=Identity.ephemeral().peer_id) is None


def test_what_a_model_writes_steers_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(HOSTILE)
    assert capsys.readouterr().out == HOSTILE + "\n", "a file has every letter"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say("a\tb" + HOSTILE)
    assert capsys.readouterr().out == "a\tb ]0;mine  2J\n ok  \n"
