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
    sub.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: a line break)")
    sub.add_argument(
        "--tokens", type=at_least(1), default=200, metavar="N", help="number of tokens, at most (default: %(default)s)"
    )
    sub.add_argument(
        "--temperature",
        type=between(0, 100),
        default=0.7,
        metavar="T",
        help="sampling temperature; 0 takes the likeliest token (default: 0.7)",
    )
    sub.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="seed of the sampling (default: %(default)s)"
    )


def evaluate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    sub.add_argument(
        "--data",
        metavar="DIR",
        help="folder, or file of documents, whose held-out part is used (default: the run's own samples, if any)",
    )
    sub.add_argument(
        "--samples",
        type=at_least(1),
        metavar="N",
        help="number of windows of --data (default: as many as the run's peers use)",
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
        help="use the running average of the weights, which followers and peers with --average keep",
    )


# -- Network options ---------------------------------------------------------------------------------------------------
# Options about connections, which several commands have.


def add_network(sub: argparse._ActionsContainer) -> None:
    """Add options for addresses and bandwidth."""
    sub.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="address to listen on for peers, such as /ip4/0.0.0.0/tcp/4242; repeatable (default: any port, IPv4 and "
        "IPv6)",
    )
    sub.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="address to publish to peers, if a port is forwarded; repeatable",
    )
    sub.add_argument(
        "--no-map",
        dest="map",
        action="store_false",
        help="do not ask the router for a port mapping (PCP, NAT-PMP, UPnP)",
    )
    sub.add_argument(
        "--host_maddrs",
        "--directory-listen",
        nargs="*",
        metavar="MULTIADDR",
        help="addresses to listen on for the directory (default: any port, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--announce_maddrs",
        nargs="*",
        default=[],
        metavar="MULTIADDR",
        help="directory addresses to publish, if a port is forwarded",
    )
    add_relay(sub)
    sub.add_argument(
        "--up",
        type=up_budget,
        default="auto",
        metavar="RATE",
        help="maximum send rate, such as 2.5gbit, 100mbit or none (default: auto, 90 %% of the measured capacity)",
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="maximum receive rate (default: no limit)")


def add_relay(sub: argparse._ActionsContainer) -> None:
    """Add options for relaying between other peers."""
    sub.add_argument(
        "--relay",
        type=bytes_per_second,
        default="50mbit",
        metavar="RATE",
        help="maximum rate for relaying between peers that cannot connect; none: no limit (default: %(default)s)",
    )
    sub.add_argument("--no-relay", dest="relay", action="store_const", const=0.0, help="do not relay for others")


# -- Options of top, page and events -----------------------------------------------------------------------------------
# What can be typed after the commands that look; see ``arguments``, which those of peers have.


def page(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="folder with event logs of peers")
    sub.add_argument(
        "--port",
        type=page_place,
        default="auto",
        metavar="[HOST:]PORT",
        help="address of the page (default: a free port)",
    )
    sub.add_argument(
        "--speed", type=between(0, 10_000, "times"), default=10.0, metavar="X", help="playback speed (default: 10)"
    )


def top(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "what", nargs="?", metavar="WHAT", help="address of a page, or folder with event logs (default: --state)"
    )
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=10.0,
        metavar="X",
        help="playback speed of a recording; 0: show its end (default: 10)",
    )


def events(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="folder with event logs (default: --state)")
    sub.add_argument("--follow", action="store_true", help="also print new events, until interrupted")
    sub.add_argument(
        "--kind", metavar="KIND,...", help="print only these kinds, such as joined,left (docs/watching.md)"
    )
    sub.add_argument("--peer", default="", metavar="ID", help="print only events of the peer whose id ends with ID")
    sub.add_argument(
        "--since", type=lifetime, metavar="TIME", help="print only events of the last TIME, such as 90m, 12h or 30d"
    )
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        default=0.0,
        metavar="X",
        help="replay with the original pauses, X times as fast (default: 0, without pauses)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object a line, with the peer that logged it")


# -- Options of demo and plan ------------------------------------------------------------------------------------------
# Arguments of ``demo`` and ``plan``; see ``arguments``, which those of peers have.


MOST_STEPS, MOST_SEEDS, LARGEST_SEED, MOST_PROCESSES = 1_000_000, 1_000_000_000, 2**63 - 1, 1024
"""Beyond any use, and no more than what is done with the numbers bears."""


def demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="folder for the report (default: %(default)s)"
    )
    sub.add_argument("--config", default="stdlib-tiny", metavar="CONFIG", help="TOML file, or name of a shipped one")
    sub.add_argument(
        "--steps",
        type=at_least(1, MOST_STEPS),
        metavar="N",
        help="number of global steps (default: the configuration's)",
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
    sub.add_argument("--peers", type=at_least(2, 1_000_000), required=True, metavar="N", help="number of learners")
    sub.add_argument(
        "--link",
        type=bytes_per_second,
        required=True,
        metavar="RATE",
        help="send rate of each peer's link, such as 20mbit",
    )
    sub.add_argument(
        "--down", type=bytes_per_second, metavar="RATE", help="receive rate of each peer's link (default: as --link)"
    )
    sub.add_argument(
        "--rtt",
        type=between(0, 10_000, "milliseconds"),
        default=50.0,
        metavar="MS",
        help="round-trip time in ms (default: 50)",
    )
    sub.add_argument(
        "--step-time", type=between(0.001, 3600, "seconds"), required=True, metavar="S", help="seconds per inner step"
    )
    sub.add_argument("--price", type=between(0, 1000), default=0.0, metavar="P", help="price of a GB sent (default: 0)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


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
        help="address to listen on; repeatable (default: /ip4/0.0.0.0/tcp/31337)",
    )
    sub.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="address to publish, if a port is forwarded; repeatable",
    )
    sub.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="key file, created if missing; with it the address stays the same after a restart",
    )
    sub.add_argument(
        "--initial-peers", nargs="*", default=[], metavar="ADDR", help="other directory nodes to connect to"
    )
    sub.add_argument(
        "--meet",
        action="append",
        metavar="MULTIADDR",
        help="rendezvous address for peers that cannot connect; may be one of --listen (default: the port after it)",
    )
    add_relay(sub)


def _start(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped one, such as stdlib-tiny")
    sub.add_argument("--name", metavar="NAME", help="name of the run (default: the file's)")
    sub.add_argument(
        "--access",
        choices=["open", "invite", "list"],
        help="who may join: anyone, holders of an invite, or only peers that you name (default: the file's, else "
        "invite)",
    )
    _add_bootstrap(sub)
    _add_peer(sub)


def _join(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|ADDR",
        help="an invite; for an open run, the multiaddr of a directory node, with /p2p/ID",
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    sub.add_argument("--follow", action="store_true", help="follow the global model without training")
    _add_peer(sub)


def _resume(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="state folders of the run's peers, or copies of them"
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the folders hold several runs")
    sub.add_argument(
        "--known-good",
        action="store_true",
        help="go back to the newest checkpoint after which training continued normally, and put newer ones aside",
    )
    _add_bootstrap(sub)
    _add_peer(sub)


def _status(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|ADDR|NAME",
        help="an invite; for open runs, the multiaddr of a directory node, with /p2p/ID; for a run on this machine, "
        "its name",
    )
    sub.add_argument("--run", metavar="NAME", help="show only this run")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    _add_identity(sub)


def _invite(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if --state holds several runs")
    sub.add_argument("--role", choices=["follower", "learner", "admin"], default="learner", help="default: %(default)s")
    sub.add_argument(
        "--expires",
        type=lifetime,
        metavar="TIME",
        help="lifetime of the invite and of memberships by it, such as 12h or 30d (default: unlimited)",
    )
    sub.add_argument(
        "--max-weight", type=between(0, 1e9), metavar="W", help="maximum weight when owners are selected (default: 1)"
    )
    sub.add_argument("--peer", metavar="ID", help="make the invite for this peer alone")
    sub.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="directory node that the invite names; repeatable (default: the run's)",
    )
    _add_identity(sub)


def _ban(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "who",
        metavar="PEER|INVITE",
        help="a peer, which is removed, and whose invite then admits nobody new; or an invite or its id, with which "
        "all "
        "peers that came by it are removed",
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if --state holds several runs")
    _add_identity(sub)


def _members(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--run", metavar="NAME", help="show only this run")
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sub.add_argument("--id", action="store_true", help="print only the peer id of this machine, created if missing")
    _add_identity(sub)


def _fetch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "address",
        nargs="+",
        metavar="INVITE|RUN|ADDR",
        help="an invite; for an open run, the multiaddr of any directory node or peer, with /p2p/ID; or the name of a "
        "run whose directory is known from before",
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
    sub.add_argument("--run", metavar="NAME", help="pause only this run, by name or beginning of the id")
    sub.add_argument("--end", action="store_true", help="end the pause")


def _launch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("invite", metavar="INVITE", help="invite with which the machines join")
    sub.add_argument("--dollars", type=between(0.01, 1e7, "dollars"), required=True, metavar="USD", help="maximum cost")
    sub.add_argument(
        "--hours", type=between(0.1, 8760, "hours"), default=4.0, metavar="T", help="hours per machine (default: 4)"
    )
    sub.add_argument(
        "--machines", type=at_least(1, 1000), default=1, metavar="N", help="number of machines (default: %(default)s)"
    )
    sub.add_argument(
        "--gpu", default="", metavar="KIND", help="accelerator in SkyPilot's notation, such as A100:1 or L4:1"
    )
    sub.add_argument(
        "--infra",
        default="",
        metavar="WHERE",
        help="cloud or region, such as aws or gcp/us-central1 (default: the cheapest)",
    )
    sub.add_argument(
        "--no-spot", action="store_true", help="rent on-demand machines, which are not preempted and cost more"
    )
    sub.add_argument(
        "--options", default="", metavar="WORDS", help="further options for p2pdiloco join, as one quoted string"
    )
    sub.add_argument(
        "--source", metavar="WHAT", help="what pip installs on the machines (default: this checkout, or release)"
    )
    sub.add_argument("--out", type=Path, metavar="FILE", help="only write the task to FILE (-: standard output)")


def _completion(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=["bash", "zsh"], help='in ~/.bashrc: eval "$(p2pdiloco completion bash)"')


def _doctor(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("address", nargs="*", metavar="INVITE|ADDR", help="invite or address with which you would join")
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    sub.add_argument(
        "--listen", action="append", metavar="MULTIADDR", help="address to try to listen on (default: any port)"
    )
    sub.add_argument(
        "--seconds",
        type=between(0, 600, "seconds"),
        default=8.0,
        metavar="T",
        help="seconds of trial training; 0: none (default: 8)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _add_learner(sub)
    _add_identity(sub)


def _add_learner(sub: argparse._ActionsContainer) -> None:
    """Add options for the device and the data."""
    sub.add_argument(
        "--device", default="cpu", help="device to train on: cpu, cuda, cuda:1, mps (default: %(default)s)"
    )
    sub.add_argument(
        "--threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        help="number of torch threads for training; 0: chosen by measured step times (default: 0)",
    )
    sub.add_argument(
        "--data", metavar="DIR", help="folder, or file of documents, to train on; a run cannot choose one for you"
    )
    sub.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json (default: --data)")
    sub.add_argument(
        "--model", metavar="DIR", help="folder with the safetensors that the run's adapters (LoRA) are trained on"
    )


def _add_peer(sub: argparse.ArgumentParser) -> None:
    """Add the options that start, join and resume share."""
    _add_learner(sub.add_argument_group("training"))
    add_network(sub.add_argument_group("network"))
    _add_storage(sub.add_argument_group("storage"))
    _add_machine(sub.add_argument_group("machine and shutdown"))
    _add_reporting(sub.add_argument_group("reporting"))
    sub.add_argument("--learner", default="", metavar="NAME", help=argparse.SUPPRESS)  # p2pdiloco.DiLoCo's node


def _add_storage(sub: argparse._ActionsContainer) -> None:
    _add_identity(sub)
    sub.add_argument(
        "--checkpoint-s",
        type=between(1, 1e6, "seconds"),
        metavar="T",
        help="maximum seconds between checkpoints, which then ignore --write-gb (default: 60, or longer to keep to it)",
    )
    sub.add_argument(
        "--write-gb",
        type=between(0.001, 1e6, "gigabytes"),
        default=19.0,
        metavar="GB",
        help="disk-write budget in GB per day; a checkpoint is written at least hourly nonetheless (default: "
        "%(default)g)",
    )
    sub.add_argument(
        "--keep-checkpoints",
        type=at_least(1),
        default=2,
        metavar="N",
        help="number of recent checkpoints to keep (default: 2)",
    )
    sub.add_argument(
        "--average",
        action=argparse.BooleanOptionalAction,
        help="keep a running average of the weights, 4 bytes per parameter (default: only with --follow)",
    )


def _add_machine(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--tensor-threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        metavar="N",
        help="number of threads for merging; 0: half of the cores, at most 4 (default: 0)",
    )
    sub.add_argument(
        "--leave-s",
        type=between(0, 3600, "seconds"),
        default=20.0,
        metavar="T",
        help="maximum seconds for a graceful shutdown (default: 20)",
    )
    sub.add_argument(
        "--reattach-s",
        type=between(0, 86400, "seconds"),
        default=60.0,
        metavar="T",
        help="seconds that the learner trains on after its node was killed, until it is restarted with the same "
        "--state; "
        "0: end at once (default: %(default)g)",
    )
    sub.add_argument(
        "--stay-s",
        type=between(0, 1e9, "seconds"),
        metavar="T",
        help="seconds to serve the model after the run is complete; 0: leave at once (default: 600)",
    )
    sub.add_argument(
        "--spot", type=cloud, metavar="CLOUD", help="leave when this cloud preempts the machine: aws, gcp or azure"
    )
    sub.add_argument(
        "--max-memory",
        type=size,
        metavar="SIZE",
        help="maximum memory of node and learner, such as 8gb; a peer that needs more leaves (default: no limit)",
    )
    sub.add_argument("--only-when-idle", action="store_true", help="pause the learner while others use the processors")
    sub.add_argument("--on-battery", action="store_true", help="train on battery too (default: pause)")


def _add_reporting(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--page",
        type=page_place,
        default="auto",
        metavar="[HOST:]PORT|off",
        help="address of this peer's page for browsers; a HOST other than this machine requires a token (default: a "
        "free "
        "port on this machine)",
    )
    sub.add_argument(
        "--price",
        type=between(0, 1e6),
        metavar="PER_HOUR",
        help="cost of this machine per hour, for the summary at the end",
    )
    sub.add_argument(
        "--notify",
        type=notified,
        default="",
        metavar="COMMAND|URL",
        help="command to run, or URL to post to, when this peer is stuck, alone, diverging, short of disk, or done",
    )
    sub.add_argument(
        "--log-to",
        type=logged,
        action="append",
        default=[],
        metavar="KIND:PLACE",
        help="also send metrics every ten seconds to tensorboard:DIR, wandb:PROJECT, trackio:PROJECT or otlp:URL; "
        "repeatable",
    )
    sub.add_argument(
        "--journal", action="store_true", help="record every event, for python -m tests.machine_sim.replay"
    )


def _add_identity(sub: argparse._ActionsContainer) -> None:
    sub.add_argument("--identity_path", type=Path, metavar="FILE", help="key file (default: STATE/identity.key)")


def _add_bootstrap(sub: argparse.ArgumentParser) -> None:
    """For those who may be the first of a network."""
    sub.add_argument(
        "--bootstrap",
        "--initial_peers",
        nargs="*",
        default=[],
        metavar="ADDR",
        help="addresses of directory nodes, or an invite (default: this peer is the first)",
    )


def add_common_arguments(sub: argparse.ArgumentParser, *, is_quiet: bool) -> None:
    """What all commands take."""
    levels = ["debug", "info", "warning", "error"]
    sub.add_argument("--log-level", default="warning" if is_quiet else "info", choices=levels)
    sub.add_argument(
        "--log-format", default="text", choices=["text", "json"], help="format of log lines (default: text)"
    )
    sub.add_argument(
        "--state",
        type=Path,
        default=state_home(),
        metavar="DIR",
        help="folder for keys, checkpoints and caches of one peer (default: %(default)s)",
    )


COMMANDS = {
    "demo": Command("run a small swarm on this machine that trains, loses and gains peers", demo, is_quiet=True),
    "bootstrap": Command("run a directory node that other peers use as their first address", _bootstrap),
    "start": Command("create a run and train it", _start),
    "join": Command("join a running run", _join),
    "resume": Command("continue a run whose peers have all stopped", _resume),
    "fetch": Command("download the model of a run, finished or not, without joining it", _fetch, is_quiet=True),
    "export": Command("write a run's model to files for other programs", export, is_quiet=True),
    "generate": Command("sample text from a run's model", generate, is_quiet=True),
    "evaluate": Command("measure the held-out loss of a run's model, and of its average", evaluate, is_quiet=True),
    "status": Command("show runs and their peers", _status, is_quiet=True),
    "top": Command("show a run, live or recorded, in this terminal", top, is_quiet=True),
    "page": Command("replay a recorded run on the page that live peers serve", page, is_quiet=True),
    "events": Command("print the events that peers have logged", events, is_quiet=True),
    "invite": Command("make an invite to one of your runs", _invite, is_quiet=True),
    "ban": Command("remove a peer, or all peers that came by an invite", _ban, is_quiet=True),
    "members": Command("list the members of this machine's runs", _members, is_quiet=True),
    "pause": Command("pause the learners on this machine", _pause, is_quiet=True),
    "launch": Command("rent machines that join a run, through SkyPilot, within a budget", _launch, is_quiet=True),
    "completion": Command("print a completion script for a shell", _completion, is_quiet=True),
    "plan": Command("estimate the bandwidth, memory and cost of a run", plan, is_quiet=True),
    "doctor": Command("check what this machine can do as a peer", _doctor, is_quiet=True),
}
"""Each is a module of this package. Only the chosen one is imported: what needs no torch does not wait for it."""
