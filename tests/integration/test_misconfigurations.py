"""What users get wrong, induced: the command itself or ``doctor`` names it, with its fix. docs/troubleshooting.md lists
all of them by what is said, and nothing else: a row there that no test induces fails here, and the other way round."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import base58
import msgspec
import pytest
from stands import directory_with, stand
from swarm import PEER, write_corpus

from benchmarks.netbed import namespaces
from p2pdiloco.access.certificates import NEVER, NO_CAP, Role
from p2pdiloco.access.invite_code import PREFIX, _checksum, decode_invite, encode_invite
from p2pdiloco.access.membership_log import ban, closing
from p2pdiloco.cli import doctor, join, watch
from p2pdiloco.discovery import directory
from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.node import diagnostics
from p2pdiloco.observability.view_sources import Page, UnseenError
from p2pdiloco.observability.web_server import PageServer
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId
from p2pdiloco.protocol.manifest import (
    MANIFEST,
    DataConfig,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.swarm import run_lookup
from p2pdiloco.swarm.credentials import (
    Credentials,
    MemberFiles,
    credentials_from_invite,
    invite_key,
    make_invite,
    members_of,
)
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training import data_sources
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.files import lock
from tests.typed import main

pytestmark = [pytest.mark.usefixtures("own_logging"), pytest.mark.heavy]
FAILED, REPAIR, NOBODY_THERE = 1, 2, 3
DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
INDUCED = ("Errors of commands", "Findings of `doctor`")
"""Sections of the document whose rows are induced here."""
PLAIN = re.compile(
    r"write |choose one of|did you mean|must be |give --|name one with|is not a (?:number|port)|is a file|No such file"
)
"""Messages that the document leaves out: they say what is allowed, or what to do."""
FEWEST = 30
NOBODY = "12D3KooWFBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvC"
BANNED = Identity.from_secret(b"p2pdiloco test", b"banned")
OTHER_RELEASE = PREFIX + base58.b58encode(bytes(80) + _checksum(bytes(80))).decode()
"""An invite whose content this release does not know."""
DEAD = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
TINY = "name = 'x'\nmodel.width = 32\nmodel.depth = 1\nmodel.heads = 2\nmodel.context = 32\ndata.kind = 'files'\n"
LLAMA = "name = 'x'\nmodel.kind = 'huggingface'\nmodel.config.model_type = 'llama'\nmodel.config.vocab_size = 64\n"
FILES = {
    "broken.toml": "name = \n",
    "typo.toml": "name = 'x'\ninner.step = 400\n",
    "negative.toml": "name = 'x'\ninner.steps = -1\n",
    "codec.toml": "name = 'x'\ncodec.up = 'int3'\n",
    "rare.toml": "name = 'x'\ninner.steps = 40\ninner.warmup = 5\nschedule.sync_every = 80\nschedule.fragments = 2\n",
    "uneven.toml": "name = 'x'\nschedule.fragments = 3\nschedule.sync_every = 10\n",
    "many.toml": f"{TINY}data.path = 'corpus'\ndata.pattern = '*.txt'\ndata.held_out_share = 0.3\n"
    "schedule.sync_every = 300\nschedule.fragments = 300\n",
    "nowhere.toml": "name = 'x'\ndata.kind = 'files'\ndata.path = '/nowhere'\n",
    "pathless.toml": "name = 'x'\ndata.kind = 'text'\n",
    "pattern.toml": f"{TINY}data.path = 'corpus'\ndata.pattern = '*.rst'\n",
    "short.toml": f"{TINY}data.path = 'short'\ndata.pattern = '*.txt'\n",
    "llama.toml": f"{LLAMA}data.kind = 'text'\ndata.path = 'short'\n",
    "weightless.toml": "name = 'x'\nmodel.kind = 'huggingface'\nmodel.folder = 'short'\ndata.kind = 'stdlib'\n",
    "script.toml": "name = 'x'\nmodel.kind = 'external'\n",
    "short/a.txt": "too short",
    "short/b.txt": "as well",
    "notes.txt": "no journal, no key, no checkpoint",
    "nothing/readme.txt": "no run was here",
    "half/checkpoint/state-00000001.json": "{",
}


class Mistake(NamedTuple):
    """One that is induced."""

    says: str
    """As the document has it: ``...`` and words in capitals stand for anything."""
    words: str
    """The command."""
    fix: str
    """What to do, as it is told at once."""
    status: int = REPAIR


TYPED = [
    Mistake("there is no command ...: did you mean ...?", "jion ADDR", "did you mean join?"),
    Mistake("there is no option ...: did you mean ...?", "join x --devcie cuda", "did you mean --device?"),
    Mistake("... is not a rate: write ...", "join x --up 0mbit", "write 2.5gbit, 100mbit"),
    Mistake("... is not a number of gigabytes from ... to ...", "join x --write-gb 0", "from 0.001"),
    Mistake("a value has to follow", "join x --up -5mbit", "--OPTION=-1"),
    Mistake("argument --notify: there is no command ...", "join x --notify 'no-such-thing -v'", "chmod +x"),
    Mistake("argument --page: ... is not a port, HOST:PORT, auto or off", "join x --page 99999", "HOST:PORT"),
    Mistake("...: no such file; did you mean ...? shipped with p2pdiloco: ...", "start stdlib-tyni", "stdlib-tiny?"),
    Mistake("FILE is not valid TOML (...): write ...", "start broken.toml", "write lines such as"),
    Mistake("there is no key ...: did you mean ...?", "start typo.toml", "did you mean inner.steps?"),
    Mistake("KEY = VALUE: write ...", "start negative.toml", "a whole number of at least 1"),
    Mistake("KEY = VALUE: choose one of ...", "start codec.toml", "int4"),
    Mistake("schedule.sync_every = N is more than inner.steps = M", "start rare.toml", "write inner.steps = 3200"),
    Mistake("schedule.sync_every = N must be a multiple of ...", "start uneven.toml", "schedule.fragments = 3"),
    Mistake("schedule.fragments = N must be at most the model's ... tensors", "start many.toml", "must be at most"),
    Mistake('model.kind = "external" is for training scripts', "start script.toml", "with p2pdiloco.DiLoCo"),
    Mistake("FOLDER is not a folder: set data.path, or give --data", "start nowhere.toml", "--data"),
    Mistake("the run trains on files (...), and each peer supplies its own", "start pathless.toml", "--data FOLDER"),
    Mistake("FOLDER has no file that matches ...", "start pattern.toml", "change data.pattern"),
    Mistake("the ... split of FOLDER has ..., a sample needs ...", "start short.toml", "add files"),
    Mistake("no tokenizer.json in FOLDER", "start llama.toml", "--tokenizer"),
    Mistake("model.folder = ...: config.json cannot be read", "start weightless.toml", "save_pretrained"),
    Mistake("... is not a multiaddr: write it as ...", "join 127.0.0.1:4100", "write it as /ip4/127.0.0.1/tcp/4100"),
    Mistake("... is not a multiaddr (...): write it as ...", f"join /ip4/127.0.0.1/tcp/99999/p2p/{NOBODY}", "/dns/"),
    Mistake("... lacks the peer id at its end", "join /ip4/127.0.0.1/tcp/4100", "copy the whole address"),
    Mistake(
        "none of the initial peers answers (...: connection refused)", f"join {DEAD}", "start it again", NOBODY_THERE
    ),
    Mistake(
        "none of the initial peers answers (...: its name cannot be resolved)",
        f"join /dns/nowhere.invalid/tcp/4100/p2p/{NOBODY}",
        "correct the name in the address",
        NOBODY_THERE,
    ),
    Mistake(
        "the invite has a typo, or a piece of it is missing", "join p2pdiloco3S555bYZnQ5L1aRe5rLem", "copy it again"
    ),
    Mistake("the invite comes from another release of p2pdiloco", f"join {OTHER_RELEASE}", "ask for a new one"),
    Mistake(
        "cannot listen on ...; that is no address of this machine",
        "bootstrap --listen /ip4/203.0.113.7/tcp/4000",
        "--announce",
    ),
    Mistake("listen on a numeric address", "bootstrap --listen /dns/localhost/tcp/0", "/ip4/0.0.0.0/tcp/0"),
    Mistake(
        "the identity file ... is not a libp2p Ed25519 private key",
        f"join {DEAD} --identity notes.txt",
        "restore it",
    ),
    Mistake(
        "the identity file ... cannot be created", f"join {DEAD} --state /proc/x", "give another folder with --state"
    ),
    Mistake("--device NAME: torch sees no CUDA device here", f"join {DEAD} --device cuda", "--device cpu"),
    Mistake("--device NAME is not a device that torch knows", f"join {DEAD} --device gpu", "use cpu, cuda"),
    Mistake("there is no checkpoint in FOLDER", "resume nothing", "name a state folder"),
    Mistake("no checkpoint in FOLDER can be used", "resume half", "use another peer's folder"),
    Mistake("... is not the peer id of an Ed25519 key", "members ban F3j9J4", "12D3KooW"),
    Mistake("FOLDER has no run", "members add --state nothing", "is --state the folder of the peer"),
    Mistake("no peer has logged anything below FOLDER", "watch nothing --page auto", "name a state folder"),
    Mistake("FILE is not a journal", "tests.machine_sim.replay notes.txt", "tests.chaos"),
    Mistake("FILE: No such file or directory", "tests.machine_sim.replay nowhere.bin", "mend the path"),
    Mistake("--out ... is a file", "demo --out notes.txt", "name a folder"),
    Mistake("RUN: FOLDER has met no directory yet", "fetch story", "p2pdiloco fetch ADDR"),
]
OF_SURROUNDINGS = {
    "cannot listen on ...: Address already in use": "choose another port",
    "the identity ... is in use by another peer on this machine": "--state",
    "the lock file ... cannot be opened: ... (file lock)": "choose a folder on a local disk",
    "nothing can be written (...)": "make room",
    "this peer is a ROLE of run NAME, and only admins invite": "ask one of them",
    "run NAME (...) takes members only, and FOLDER has no certificate": "p2pdiloco join INVITE",
    "the invite is for the peer ..., and this one is ...": "ask for an invite for this one",
    "run NAME needs transformers": "pip install 'p2pdiloco[hf]'",
    "watch draws with textual, which is not installed here": "pip install 'p2pdiloco[watch]'",
    "namespaces and tc need root": "sudo",
    "ADDRESS refuses: the token is missing": "?token=",
}
"""What the machine has to be made like first."""
OF_OTHERS = {
    "none of the initial peers answers (...: another key answers there)": "take the address that this peer prints now",
    "none of the initial peers answers (...: no route to host)": "with IPv6 alone an /ip6 address",
    "none of the initial peers answers (...: connected, but no answer to a ping)": "the process there hangs",
    "none of the initial peers answers (...: no answer)": "open or forward its port",
    "the run ended before this peer had the model": "resume STATE --stay-s 3600",  # test_node_ending
    "the directory lists no open run": "for an invite",
    "no run is called NAME": "the directory knows: ",
    "there are several runs, name one with --run": "--run",
    "protocol versions differ": "run the same release",
    "no peer sent a valid manifest of run ...": "p2pdiloco doctor ADDR",
    "a peer of run NAME needs ..., --max-memory allows ...": "allow more",
    "a node of run NAME needs ... of memory for the model": "join from a larger one",
    "the membership of ... expired at ...": "ask for a new invite",
    "... is banned (by ...)": "the founder of the run",
    "... came with ..., which is revoked": "ask for a new invite",
    "... came with ..., which is closed to newcomers": "ask for a new invite",
    "the invite of ... admits ... and has been used": "--identity",
    "its signer is not an admin of this run": "ask the founder for an invite",
}
FOUND = {
    "... processes compete for the cores already": "--only-when-idle",
    "at most N: enough for a few peers only": "ulimit -n",
    "BBR is refused, connections use ...": "modprobe tcp_bbr",
    "torch ... sees no device for --device cuda": "--device cpu",
    "FOLDER, ... GB free, ... needed at most": "make room",
    "running: ... (process N)": "give another --state",
    "others on this machine may read ...": "chmod 600",
    "this machine's clock is ... behind that of ...": "timedatectl set-ntp true",
    "at most ... bytes to ...": "raise the MTU",
    "cannot listen at ...": "choose another port",
    "... GB needed (...), ... free": "--follow",
    "a learner cannot train here": "--data",
    "no peer of run ... can be reached (... expired at ...)": "ask for a new invite",
}
"""By ``doctor``, which says the fix in a line of its own."""


def pattern_of(says: str) -> re.Pattern[str]:
    escaped = re.escape(says).replace(re.escape("..."), ".*")
    return re.compile(
        re.sub(r"\b(?:N|M|[A-Z]{4,}|KEY|RUN)\b", ".*", escaped.replace("HOST:PORT", "host:port")), re.IGNORECASE
    )


def rows(section: str) -> dict[str, str]:
    """What it says, and what to do, of a section's table."""
    part = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {cell[0].strip("`"): cell[-1] for cell in cells}


def test_the_document_lists_them_and_nothing_else() -> None:
    documented = {says: fix for section in INDUCED for says, fix in rows(section).items()}
    induced = {mistake.says for mistake in TYPED} | {*OF_SURROUNDINGS, *OF_OTHERS, *FOUND}
    induced = {says for says in induced if not PLAIN.search(says)}
    assert documented.keys() - induced == set()
    assert induced - documented.keys() == set()
    assert len(induced) >= FEWEST
    assert all(documented.values()), "each with its fix"


class User:
    """Types commands in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def types(self, words: str | list[str]) -> tuple[int, str, str]:
        """Status, what was said on standard error but for the log, and on standard output."""
        self._capsys.readouterr()
        try:
            status = main(shlex.split(words) if isinstance(words, str) else words)
        except SystemExit as ended:
            status = int(str(ended.code))
        said = self._capsys.readouterr()
        errors = [line for line in said.err.splitlines() if re.match(r"\d{4}-\d\d-\d\dT", line) is None]
        return status, "\n".join(errors), said.out

    def is_told(self, says: str, fix: str, words: str | list[str], status: int = REPAIR) -> None:
        """The only complaint has it, with its fix, in one sentence."""
        ended, said, _ = self.types(words)
        complaints = [line for line in said.splitlines() if line.startswith("p2pdiloco")]
        assert (ended, len(complaints)) == (status, 1), said
        assert pattern_of(says).search(complaints[0]), complaints[0]
        assert fix in said, said
        assert "Traceback" not in said


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> User:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return User(capsys)


@pytest.mark.parametrize("mistake", TYPED, ids=lambda mistake: mistake.words[:60])
def test_what_is_typed_wrongly(user: User, mistake: Mistake) -> None:
    user.is_told(mistake.says, mistake.fix, mistake.words, mistake.status)


# -- the machine -------------------------------------------------------------------------------------------------------


def private_run() -> tuple[Manifest, Credentials]:
    """A run of members only, and its founder."""
    founder = Identity.ephemeral()
    tensor = TensorSpec(name="t", shape=(64,), merge="rda", fragment=FragmentId(0))
    config = RunConfig(name="secret", schedule=ScheduleConfig(fragments=1, sync_every=4))
    manifest = Manifest(founder=founder.peer_id, config=config, tensors=(tensor,), genesis=(Digest("0" * 40),))
    return manifest, Credentials(manifest.run, b"", founder)


def invite_of(
    by: Credentials, address: str = DEAD, *, secret: bytes = bytes(16), not_after: int = NEVER, peer: str = ""
) -> str:
    made = make_invite(
        by,
        secret,
        role=Role.LEARNER,
        cap=NO_CAP,
        not_after=not_after,
        addresses=(address,),
        peer=PeerId(peer) if peer else None,
    )
    return encode_invite(made)


def _lack(*_: object) -> None:
    raise OSError(errno.ENOSYS, "")


def test_what_the_machine_is_like(user: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = partial(_told, user, OF_SURROUNDINGS)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        told("cannot listen on ...: Address already in use", f"bootstrap --listen {taken}")
    with Identity.load_or_create(tmp_path / "home/p2pdiloco/identity.key").hold():
        told("the identity ... is in use by another peer on this machine", f"join {DEAD}")
    with monkeypatch.context() as without_locks:
        without_locks.setattr(fcntl, "flock", _lack)
        told("the lock file ... cannot be opened: ... (file lock)", f"join {DEAD}")
    manifest, founder = private_run()
    with monkeypatch.context() as patches:
        patches.setattr(join, "join", full_disk)
        told("nothing can be written (...)", f"join {DEAD}", FAILED)
    folder = folder_of(tmp_path / "mine", manifest.run)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(manifest.encode())
    told(
        "run NAME (...) takes members only, and FOLDER has no certificate",
        f"members add --state mine --bootstrap {DEAD}",
    )
    me = Identity.load_or_create(tmp_path / "mine/identity.key")
    MemberFiles(folder).write_chain(founder.chain_for(me.peer_id, Role.LEARNER))
    told("this peer is a ROLE of run NAME, and only admins invite", f"members add --state mine --bootstrap {DEAD}")
    told("the invite is for the peer ..., and this one is ...", f"join {invite_of(founder, peer=NOBODY)}")
    monkeypatch.setattr(data_sources, "find_spec", lambda _: None)
    told("run NAME needs transformers", "start llama.toml")
    monkeypatch.setattr(watch, "find_spec", lambda _: None)
    told("watch draws with textual, which is not installed here", "watch")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    told("namespaces and tc need root", "benchmarks.netbed up dsl")


async def full_disk(*_: object) -> NoReturn:
    """In the place of what writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _told(user: User, fixes: dict[str, str], says: str, words: str | list[str], status: int = REPAIR) -> None:
    user.is_told(says, fixes[says], words, status)


def test_a_page_without_its_token() -> None:
    says = "ADDRESS refuses: the token is missing"

    async def look() -> str:
        async with PageServer(lambda _: None, "127.0.0.1", 0, "secret") as server:  # type: ignore[arg-type, return-value]
            with pytest.raises(UnseenError) as refused:
                await Page(server.address.partition("?")[0]).look()
        return str(refused.value)

    said = asyncio.run(look())
    assert pattern_of(says).search(said), said
    assert OF_SURROUNDINGS[says] in said


# -- other peers -------------------------------------------------------------------------------------------------------


def manifest_of(name: str, shape: tuple[int, ...], **config: object) -> Manifest:
    """An open run's."""
    sound = RunConfig(name=name, access="open", schedule=ScheduleConfig(fragments=1, sync_every=4))
    tensors = (TensorSpec(name="t", shape=shape, merge="rda", fragment=FragmentId(0)),)
    shards = -(-msgspec.structs.replace(tensors[0]).elements // (2**32))
    config = {"model": ModelConfig(depth=1), "data": DataConfig(kind="files", pattern="*.txt"), **config}
    whole = msgspec.structs.replace(
        sound, **config, schedule=ScheduleConfig(fragments=1, sync_every=4, max_shard=2**32)
    )
    return Manifest(founder=PeerId(NOBODY), config=whole, tensors=tensors, genesis=(Digest("0" * 40),) * shards)


@pytest.fixture(scope="module")
def found() -> Iterator[tuple[str, Manifest, Credentials]]:
    """A directory's address, with runs that cannot be joined, and a private one with its founder."""
    manifest, founder = private_run()
    members = members_of(manifest)
    grant = members.admit(founder.identity.peer_id, b"", time.time())
    for secret in (b"b" * 16, b"r" * 16):
        subject = invite_key(secret).peer_id
        members.learn(ban(manifest.run, subject, grant, founder.identity.sign))
    members.learn(ban(manifest.run, BANNED.peer_id, grant, founder.identity.sign))
    members.learn(closing(manifest.run, invite_key(b"c" * 16).peer_id, [], grant, founder.identity.sign))
    used = credentials_from_invite(decode_invite(invite_of(founder, secret=b"u" * 16)), Identity.ephemeral())
    members.admit(used.identity.peer_id, used.chain, time.time())
    heavy, small = manifest_of("heavy", (2**36,)), manifest_of("small", (64,))
    with directory_with(
        partial(stand, run=RunId("a" * 40), name="lies"),
        partial(stand, run=RunId("b" * 40), name="tomorrow", version=WIRE_VERSION + 1),
        partial(stand, run=heavy.run, name="heavy", manifest=heavy.encode()),
        partial(stand, run=small.run, name="small", manifest=small.encode()),
        partial(stand, run=manifest.run, name="secret", authorizer=MemberAuthorizer(members, b"", time.time)),
    ) as address:
        yield address, manifest, founder


def test_what_other_peers_say(
    user: User, found: tuple[str, Manifest, Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, manifest, founder = found
    told = partial(_told, user, OF_OTHERS, status=NOBODY_THERE)
    join = ["join", *PEER, "--data", "corpus"]
    elsewhere = f"{address.rpartition('/')[0]}/{NOBODY}"
    told("none of the initial peers answers (...: another key answers there)", [*join, elsewhere])
    told("no run is called NAME", [*join, address, "--run", "nobody-knows"])
    told("there are several runs, name one with --run", [*join, address])
    told("protocol versions differ", [*join, address, "--run", "tomorrow"])
    told("no peer sent a valid manifest of run ...", [*join, address, "--run", "lies"])
    status, _, _ = user.types(["status", address, "--run", "lies"])
    assert status == NOBODY_THERE, "who says that it trains the run does not say how it stands"
    small = [*join, address, "--run", "small", "--max-memory", "1kb"]
    told("a peer of run NAME needs ..., --max-memory allows ...", small, status=REPAIR)
    told("a node of run NAME needs ... of memory for the model", [*join, address, "--run", "heavy"], status=REPAIR)
    expired = invite_of(founder, address, not_after=int(time.time()) - 5)
    told("the membership of ... expired at ...", [*join, expired])
    told("... came with ..., which is revoked", [*join, invite_of(founder, address, secret=b"r" * 16)])
    told("... came with ..., which is closed to newcomers", [*join, invite_of(founder, address, secret=b"c" * 16)])
    told("the invite of ... admits ... and has been used", [*join, invite_of(founder, address, secret=b"u" * 16)])
    impostor = Credentials(manifest.run, b"", Identity.ephemeral())
    told("its signer is not an admin of this run", [*join, invite_of(impostor, address)])
    key = Path("banned.key")
    key.write_bytes(BANNED.to_file_bytes())
    told("... is banned (by ...)", [*join, invite_of(founder, address), "--identity", str(key)])
    monkeypatch.setattr(run_lookup, "PATIENCE_S", 0.1)
    with directory_with() as empty:
        told("the directory lists no open run", ["status", empty])


@pytest.mark.parametrize(
    ("says", "daemon"),
    [
        (
            "none of the initial peers answers (...: no route to host)",
            f"Connect failed. msg=failed to dial: failed to dial {NOBODY}: all dials failed * "
            "[/ip6/2001:db8::1/tcp/4100] dial tcp6 [2001:db8::1]:4100: connect: network is unreachable",
        ),
        (
            "none of the initial peers answers (...: no answer)",
            f"Connect failed. msg=failed to dial: failed to dial {NOBODY}: all dials failed * "
            "[/ip4/203.0.113.7/tcp/4100] dial tcp4 203.0.113.7:4100: i/o timeout",
        ),
        (
            "none of the initial peers answers (...: connected, but no answer to a ping)",
            "connected, but no answer to a ping within 15.0 s",
        ),
    ],
)
def test_what_depends_on_lines_that_are_not_here(says: str, daemon: str) -> None:
    """In the words of libp2p's daemon: a machine without IPv6 whose peers have nothing else, and a firewall."""
    said = directory.explain_failures({"/ip4/203.0.113.7/tcp/4100": daemon})
    assert pattern_of(says).search(said), said
    assert OF_OTHERS[says] in said


# -- doctor ------------------------------------------------------------------------------------------------------------


class Findings:
    """Of one ``doctor``."""

    def __init__(self, text: str) -> None:
        self.all = json.loads(text)["findings"]

    def name(self, says: str, verdict: str) -> None:
        hits = [one for one in self.all if pattern_of(says).search(one["detail"])]
        assert [one["verdict"] for one in hits] == [verdict], self.all
        assert FOUND[says] in hits[0]["detail"] + hits[0]["remedy"], hits


def test_what_doctor_finds_here(user: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = tmp_path / "home/p2pdiloco"
    Identity.load_or_create(state / "identity.key")
    (state / "identity.key").chmod(0o644)
    (state / "0123456789ab").mkdir()
    held = lock(state / "0123456789ab/lock")
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    class Refusing(socket.socket):
        def setsockopt(self, *_: object) -> None:  # type: ignore[override]
            raise PermissionError

    whole = socket.socket
    monkeypatch.setattr(diagnostics.socket, "socket", Refusing)
    try:
        local = diagnostics.checked_here(state, "cuda")
    finally:
        monkeypatch.setattr(diagnostics.socket, "socket", whole)
        diagnostics.os.close(held)
    findings = Findings(msgspec.json.encode({"findings": local}).decode())
    for says, verdict in (
        ("... processes compete for the cores already", "warning"),
        ("at most N: enough for a few peers only", "warning"),
        ("BBR is refused, connections use ...", "note"),
        ("torch ... sees no device for --device cuda", "failure"),
        ("FOLDER, ... GB free, ... needed at most", "failure"),
        ("running: ... (process N)", "note"),
        ("others on this machine may read ...", "warning"),
    ):
        findings.name(says, verdict)


def test_what_doctor_finds_of_a_run(
    user: User, found: tuple[str, Manifest, Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _, founder = found
    wrong = SharedClock()
    wrong.adopt([3600.0] * 3)
    monkeypatch.setattr(doctor, "CLOCK", wrong)
    monkeypatch.setattr(doctor.diagnostics, "path_mtu", lambda host, _: diagnostics.judged_mtu(1000, host))
    monkeypatch.setattr(diagnostics, "memory_bytes", lambda: 10**6)
    words = ["doctor", address, "--run", "small", "--data", "/nowhere", "--listen", "/ip4/203.0.113.7/tcp/4000"]
    status, _, told = user.types([*words, "--seconds", "0.1", "--json"])
    assert status == FAILED
    findings = Findings(told)
    findings.name("this machine's clock is ... behind that of ...", "warning")
    findings.name("at most ... bytes to ...", "warning")
    findings.name("cannot listen at ...", "failure")
    findings.name("a learner cannot train here", "failure")
    findings.name("... GB needed (...), ... free", "failure")
    monkeypatch.setattr(run_lookup, "STRAGGLERS_S", 0.1)
    expired = invite_of(founder, address, not_after=int(time.time()) - 5)
    status, _, told = user.types(["doctor", expired, "--json"])
    assert status == FAILED
    Findings(told).name("no peer of run ... can be reached (... expired at ...)", "failure")
