"""Arguments of all commands. This module imports nothing that commands need, so help and usage errors appear at
once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.cli.argument_types import (
    at_least,
    between,
    bytes_per_second,
    cloud,
    lifetime,
    logged,
    notified,
    page_place,
    size,
    up_budget,
)
from p2pdiloco.util.files import state_home

# -- Options of export, evaluate, generate and fetch -------------------------------------------------------------------


def export(sub: argparse.ArgumentParser) -> None:
    _add_source(sub, model="folder with the weights (safetensors) that the run began with and did not train")
    sub.add_argument(
        "--format",
        choices=["hf", "safetensors", "peft"],
        help="default: hf; peft for adapters (LoRA), safetensors for runs of scripts",
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: ./NAME)")
    _add_average(sub)
    sub.add_argument(
        "--like",
        metavar="DIR",
        help="for a run of training scripts: folder with the config.json of the same model, or with the "
        "adapter_config.json of its adapters (LoRA)",
    )


def generate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    _add_average(sub)
    sub.add_argument("--prompt", default="", metavar="TEXT", help="what is continued (default: a line's end)")
    sub.add_argument("--tokens", type=at_least(1), default=200, metavar="N", help="at most (default: %(default)s)")
    sub.add_argument(
        "--temperature", type=between(0, 100), default=0.7, metavar="T", help="0: the likeliest token (default: 0.7)"
    )
    sub.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of what is drawn (default: %(default)s)")


def evaluate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    sub.add_argument(
        "--data",
        metavar="DIR",
        help="folder (or file of documents) whose held-out part is read (default: the run's own samples, if any)",
    )
    sub.add_argument(
        "--samples", type=at_least(1), metavar="N", help="windows of --data (default: as many as its peers measure)"
    )


def _add_source(
    sub: argparse.ArgumentParser, model: str = "folder with the safetensors that the run's adapters are for"
) -> None:
    """A run's state on this machine."""
    sub.add_argument(
        "source", metavar="RUN", help="a peer's state folder, or the name (or beginning of the id) of a run in --state"
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the folder holds several runs")
    sub.add_argument("--tokenizer", metavar="DIR", help="folder with the run's tokenizer.json")
    sub.add_argument("--model", metavar="DIR", help=model)


def _add_average(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--average",
        action="store_true",
        help="the running average of the model, where a follower (or a peer with --average) has kept one",
    )


# -- Network options ---------------------------------------------------------------------------------------------------
# Options about connections, which several commands have.


def add_network(sub: argparse.ArgumentParser) -> None:
    """How a peer is reached, and what it may send."""
    sub.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="data port, e.g. /ip4/0.0.0.0/tcp/4242; may be given several times (default: any, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--announce", action="append", default=[], metavar="MULTIADDR", help="data address to publish (port forwarding)"
    )
    sub.add_argument(
        "--no-map", dest="map", action="store_false", help="do not ask the router for a port (PCP, NAT-PMP, UPnP)"
    )
    sub.add_argument(
        "--host_maddrs",
        "--directory-listen",
        nargs="*",
        metavar="MULTIADDR",
        help="directory port (default: any, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--announce_maddrs", nargs="*", default=[], metavar="MULTIADDR", help="directory addresses to publish"
    )
    add_relay(sub)
    sub.add_argument(
        "--up",
        type=up_budget,
        default="auto",
        metavar="RATE",
        help="send at most this, e.g. 2.5gbit, 100mbit, none (default: auto, 90 %% of what the link is seen to carry)",
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="let others send at most this")


def add_relay(sub: argparse.ArgumentParser) -> None:
    """What is carried for others."""
    sub.add_argument(
        "--relay",
        type=bytes_per_second,
        default="50mbit",
        metavar="RATE",
        help="carry at most this for pairs that have no way to each other (default: %(default)s; none: no limit)",
    )
    sub.add_argument("--no-relay", dest="relay", action="store_const", const=0.0, help="carry nothing for others")


# -- Options of top, page and events -----------------------------------------------------------------------------------
# What can be typed after the commands that look; see ``arguments``, which those of peers have.


def page(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="where peers have logged what happened")
    sub.add_argument("--port", type=page_place, default="auto", metavar="[HOST:]PORT", help="default: a free one")
    sub.add_argument("--speed", type=between(0, 10_000, "times"), default=10.0, metavar="X", help="default: 10")


def top(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("what", nargs="?", metavar="WHAT", help="a page's address, or a folder (default: --state)")
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=10.0,
        metavar="X",
        help="of what is recorded; 0: stand at its end (default: 10)",
    )


def events(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where they have logged (default: --state)")
    sub.add_argument("--follow", action="store_true", help="go on with what is logged from now on, until interrupted")
    sub.add_argument("--kind", metavar="KIND,...", help="only these kinds, such as joined,left (docs/watching.md)")
    sub.add_argument("--peer", default="", metavar="ID", help="only of the peer whose id ends so")
    sub.add_argument("--since", type=lifetime, metavar="TIME", help="only the last 90m, 12h or 30d")
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=0.0,
        metavar="X",
        help="replay: pause between them as they came, X times as fast (default: 0, all at once)",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object a line, as logged, with who told it")


# -- Options of demo and plan ------------------------------------------------------------------------------------------
# Arguments of ``demo`` and ``plan``; see ``arguments``, which those of peers have.


MOST_STEPS, MOST_SEEDS, LARGEST_SEED, MOST_PROCESSES = 1_000_000, 1_000_000_000, 2**63 - 1, 1024
"""Beyond any use, and no more than what is done with the numbers bears."""


def demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: %(default)s")
    sub.add_argument("--config", default="stdlib-tiny", metavar="CONFIG", help="TOML file, or a shipped one's name")
    sub.add_argument(
        "--steps", type=at_least(1, MOST_STEPS), metavar="N", help="global steps instead of the configuration's"
    )
    sub.add_argument(
        "--time-limit",
        type=between(1, 86400, "seconds"),
        default=420.0,
        metavar="SECONDS",
        help="give up after this long (default: 420)",
    )


def plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="a run's TOML file, or the name of a shipped one")
    sub.add_argument("--peers", type=at_least(2, 1_000_000), required=True, metavar="N", help="that train")
    sub.add_argument(
        "--link", type=bytes_per_second, required=True, metavar="RATE", help="each peer's line up, such as 20mbit"
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="each peer's line down (default: as --link)")
    sub.add_argument("--rtt", type=between(0, 10_000, "milliseconds"), default=50.0, metavar="MS", help="round trip")
    sub.add_argument(
        "--step-time", type=between(0.001, 3600, "seconds"), required=True, metavar="S", help="an inner step's"
    )
    sub.add_argument("--price", type=between(0, 1000), default=0.0, metavar="P", help="of a GB that leaves a peer")
    sub.add_argument("--json", action="store_true", help="for programs")


# -- All commands ------------------------------------------------------------------------------------------------------
# What can be typed. Nothing here imports what commands need, so that help and complaints come at once.


class Command(NamedTuple):
    """A command; its module has ``async run(arguments) -> exit status``, and a docstring that describes it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    is_quiet: bool = False
    """The answer goes to the terminal; only warnings are logged."""


MOST_THREADS = 1024
"""OpenMP ends the process where there are many more."""


def _bootstrap(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="where to listen, e.g. /ip4/0.0.0.0/tcp/31337 (the default; may be given several times)",
    )
    sub.add_argument(
        "--announce", action="append", default=[], metavar="MULTIADDR", help="address to publish (port forwarding)"
    )
    sub.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="key file, made if missing; keeps the address the same over restarts",
    )
    sub.add_argument(
        "--initial-peers", nargs="*", default=[], metavar="ADDR", help="other directory nodes to connect to"
    )
    sub.add_argument(
        "--meet",
        action="append",
        metavar="MULTIADDR",
        help="where peers meet that have no way to each other yet; may be one of --listen (default: the port after it)",
    )
    add_relay(sub)


def _start(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="TOML file, or a shipped one's name, such as stdlib-tiny")
    sub.add_argument("--name", metavar="NAME", help="found it under this name instead of the file's")
    sub.add_argument(
        "--access",
        choices=["open", "invite", "list"],
        help="who may take part, instead of the file's word: everybody, who has an invite (the default), whom you name",
    )
    _add_bootstrap(sub)
    _add_peer(sub)


def _join(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|ADDR",
        help="an invite; of an open run a directory's multiaddr, with /p2p/ID",
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    sub.add_argument("--follow", action="store_true", help="track the global model without training")
    _add_peer(sub)


def _resume(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="state folders of the run's peers, or copies of them"
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the folders hold several runs")
    sub.add_argument(
        "--known-good",
        action="store_true",
        help="go back to the newest checkpoint after which training went on as before, and put newer ones aside",
    )
    _add_bootstrap(sub)
    _add_peer(sub)


def _status(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|ADDR|NAME",
        help="an invite; of open runs a directory's multiaddr, with /p2p/ID; of a run here its name",
    )
    sub.add_argument("--run", metavar="NAME", help="only this one")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    _add_identity(sub)


def _invite(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if --state holds several runs")
    sub.add_argument("--role", choices=["follower", "learner", "admin"], default="learner", help="default: %(default)s")
    sub.add_argument(
        "--expires", type=lifetime, metavar="TIME", help="such as 12h or 30d, membership too (default: never)"
    )
    sub.add_argument(
        "--max-weight", type=between(0, 1e9), metavar="W", help="most weight in the drawing of owners; others have 1"
    )
    sub.add_argument("--peer", metavar="ID", help="for this peer alone, by its id")
    sub.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="directory node to name (default: the run's)",
    )
    _add_identity(sub)


def _ban(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "who",
        metavar="PEER|INVITE",
        help="a peer: it is out, and the invite by which it came lets in nobody "
        "new; or an invite, or its id: all who came by it are out",
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if --state holds several runs")
    _add_identity(sub)


def _members(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run", metavar="NAME", help="only this one")
    sub.add_argument("--json", action="store_true", help="JSON instead of a table")
    sub.add_argument("--id", action="store_true", help="only this machine's own peer id, which is made if it has none")
    _add_identity(sub)


def _fetch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|RUN|ADDR",
        help="an invite; of an open run the multiaddr of any directory node or peer, with /p2p/ID; or a run's name, if "
        "this state folder has met the directory before",
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    add_network(sub)
    _add_identity(sub)
    sub.set_defaults(
        device="cpu",
        threads=0,
        data=None,
        tokenizer=None,
        model=None,
        checkpoint_s=1e6,
        write_gb=19.0,
        keep_checkpoints=2,
        tensor_threads=0,
        leave_s=20.0,
        reattach_s=0.0,
        learner="",
        journal=False,
    )


def _pause(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run", metavar="NAME", help="only this one, by name or the beginning of its id")
    sub.add_argument("--end", action="store_true", help="let them go on")


def _launch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("invite", metavar="INVITE", help="what they join with")
    sub.add_argument(
        "--dollars", type=between(0.01, 1e7, "dollars"), required=True, metavar="USD", help="spent at most"
    )
    sub.add_argument("--hours", type=between(0.1, 8760, "hours"), default=4.0, metavar="T", help="each (default: 4)")
    sub.add_argument("--machines", type=at_least(1, 1000), default=1, metavar="N", help="default: %(default)s")
    sub.add_argument("--gpu", default="", metavar="KIND", help="such as A100:1 or L4:1, as SkyPilot calls it")
    sub.add_argument(
        "--infra", default="", metavar="WHERE", help="such as aws or gcp/us-central1 (default: the cheapest)"
    )
    sub.add_argument("--no-spot", action="store_true", help="machines that are not taken back, and cost more")
    sub.add_argument("--options", default="", metavar="WORDS", help="further ones of p2pdiloco join, in one word")
    sub.add_argument("--source", metavar="WHAT", help="what pip installs there (default: this checkout, or release)")
    sub.add_argument("--out", type=Path, metavar="FILE", help="only write the task there (- for standard output)")


def _completion(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=["bash", "zsh"], help='in ~/.bashrc: eval "$(p2pdiloco completion bash)"')


def _doctor(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("address", nargs="*", metavar="INVITE|ADDR", help="what you would join with")
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    sub.add_argument("--listen", action="append", metavar="MULTIADDR", help="data port to try (default: any)")
    sub.add_argument(
        "--seconds", type=between(0, 600, "seconds"), default=8.0, metavar="T", help="to train; 0: not (default: 8)"
    )
    sub.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    _add_learner(sub)
    _add_identity(sub)


def _add_learner(sub: argparse.ArgumentParser) -> None:
    """What trains, and on what."""
    sub.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: %(default)s)")
    sub.add_argument(
        "--threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        help="torch threads for training; 0: by measured steps",
    )
    sub.add_argument(
        "--data", metavar="DIR", help="folder (or file of documents) to train on; a run cannot name one for you"
    )
    sub.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json, if it is not among the data")
    sub.add_argument(
        "--model", metavar="DIR", help="folder with the safetensors that the run's adapters (LoRA) are trained on"
    )


def _add_peer(sub: argparse.ArgumentParser) -> None:
    """What they share."""
    _add_learner(sub)
    add_network(sub)
    _add_identity(sub)
    sub.add_argument(
        "--checkpoint-s",
        type=between(1, 1e6, "seconds"),
        metavar="T",
        help="at most between checkpoints, whatever they write, outside --write-gb (default: 60, or longer by that)",
    )
    sub.add_argument(
        "--write-gb",
        type=between(0.001, 1e6, "gigabytes"),
        default=19.0,
        metavar="GB",
        help="a day: commits, checkpoints (an hour apart at most without those), other payloads (default: %(default)g)",
    )
    sub.add_argument(
        "--keep-checkpoints",
        type=at_least(1),
        default=2,
        metavar="N",
        help="newest ones that stay (default: 2)",
    )
    sub.add_argument(
        "--tensor-threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        metavar="N",
        help="to merge; 0: half of the cores, at most 4",
    )
    sub.add_argument(
        "--average",
        action=argparse.BooleanOptionalAction,
        help="a running average of the model, too, for export --average: 4 bytes a parameter (default: with --follow)",
    )
    sub.add_argument(
        "--leave-s", type=between(0, 3600, "seconds"), default=20.0, metavar="T", help="an orderly leave's longest"
    )
    sub.add_argument(
        "--reattach-s",
        type=between(0, 86400, "seconds"),
        default=60.0,
        metavar="T",
        help="seconds that training goes on when the node was killed, waiting for its restart with the same --state; "
        "0: end with it (default: %(default)s)",
    )
    sub.add_argument(
        "--stay-s",
        type=between(0, 1e9, "seconds"),
        metavar="T",
        help="seconds that this peer serves the model after the run's end (default: 600; 0: go at once)",
    )
    sub.add_argument(
        "--spot", type=cloud, metavar="CLOUD", help="aws, gcp or azure: leave when it takes this machine back"
    )
    sub.add_argument(
        "--max-memory",
        type=size,
        metavar="SIZE",
        help="of node and learner, such as 8gb: a peer that needs more leaves",
    )
    sub.add_argument("--only-when-idle", action="store_true", help="rest while others use this machine's processors")
    sub.add_argument("--on-battery", action="store_true", help="train on battery, too; else a learner rests then")
    sub.add_argument(
        "--page",
        type=page_place,
        default="auto",
        metavar="[HOST:]PORT|off",
        help="where this peer shows itself to browsers (default: a free port, for this machine alone; another HOST "
        "asks for a token)",
    )
    sub.add_argument(
        "--price", type=between(0, 1e6), metavar="PER_HOUR", help="what this machine costs, for its account"
    )
    sub.add_argument(
        "--notify",
        type=notified,
        default="",
        metavar="COMMAND|URL",
        help="run it, or post to it, when this peer is stuck, alone, diverging, short of disk, or done",
    )
    sub.add_argument(
        "--log-to",
        type=logged,
        action="append",
        default=[],
        metavar="KIND:PLACE",
        help="numbers of /metrics every ten seconds to tensorboard:DIR, wandb:PROJECT, trackio:PROJECT or otlp:URL",
    )
    sub.add_argument("--learner", default="", metavar="NAME", help=argparse.SUPPRESS)  # p2pdiloco.DiLoCo's node
    sub.add_argument(
        "--journal", action="store_true", help="record every event, for python -m tests.machine_sim.replay"
    )


def _add_identity(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--identity_path", type=Path, metavar="FILE", help="key file (default: STATE/identity.key)")


def _add_bootstrap(sub: argparse.ArgumentParser) -> None:
    """For those who may be the first of a network."""
    sub.add_argument(
        "--bootstrap",
        "--initial_peers",
        nargs="*",
        default=[],
        metavar="ADDR",
        help="first addresses of the directory, or an invite; none: be the first",
    )


def add_common_arguments(sub: argparse.ArgumentParser, *, is_quiet: bool) -> None:
    """What all commands take."""
    levels = ["debug", "info", "warning", "error"]
    sub.add_argument("--log-level", default="warning" if is_quiet else "info", choices=levels)
    sub.add_argument("--log-format", default="text", choices=["text", "json"], help="one line an event either way")
    sub.add_argument(
        "--state",
        type=Path,
        default=state_home(),
        metavar="DIR",
        help="identity, checkpoints, caches (default: %(default)s); one running peer a folder",
    )


COMMANDS = {
    "demo": Command("see a swarm on this machine found, train, lose and gain peers", demo, is_quiet=True),
    "bootstrap": Command("run a directory node that others use as their first address", _bootstrap),
    "start": Command("found a run and train it", _start),
    "join": Command("join a running run", _join),
    "resume": Command("go on with a run whose peers have all died", _resume),
    "fetch": Command("get what a run has come to, finished or not, without taking part", _fetch, is_quiet=True),
    "export": Command("make files of a run's model that other programs load", export, is_quiet=True),
    "generate": Command("have a run's model continue a text", generate, is_quiet=True),
    "evaluate": Command("measure the held-out loss of a run's model, and of its average", evaluate, is_quiet=True),
    "status": Command("show runs and their peers", _status, is_quiet=True),
    "top": Command("show a run, live or recorded, in this terminal", top, is_quiet=True),
    "page": Command("play a recorded run on the page that a live peer serves", page, is_quiet=True),
    "events": Command("tell what peers have logged, and go on as they log", events, is_quiet=True),
    "invite": Command("make an invite to a run of yours", _invite, is_quiet=True),
    "ban": Command("end a peer's membership, or an invite's and of all who came with it", _ban, is_quiet=True),
    "members": Command("show who is a member of this machine's runs, by whom, until when", _members, is_quiet=True),
    "pause": Command("let this machine's peers rest, until told otherwise", _pause, is_quiet=True),
    "launch": Command("rent machines that join a run, through SkyPilot, within a budget", _launch, is_quiet=True),
    "completion": Command("print a completion script for a shell", _completion, is_quiet=True),
    "plan": Command("say what a run would ask of lines, memory and money", plan, is_quiet=True),
    "doctor": Command("check what this machine can do as a peer", _doctor, is_quiet=True),
}
"""Each is a module of this package. Only the chosen one is imported: what needs no torch does not wait for it."""
