"""Arguments of all commands. This module imports nothing that commands need, so help and usage errors appear at
once.

Every option that takes a value says at the end of its help what happens without it: ``(default: X)``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.access.certificates import USES_LIMIT
from p2pdiloco.cli.argument_types import (
    at_least,
    between,
    bytes_per_second,
    cloud,
    command,
    folder,
    lifetime,
    notified,
    page_place,
    relay_rate,
    served_place,
    size,
    up_budget,
)
from p2pdiloco.cli.invite_sources import add_addresses
from p2pdiloco.protocol.config import LONGEST_RUN, MOST_BUDGET
from p2pdiloco.util.files import state_home

MOST_THREADS = 1024
"""OpenMP ends the process where there are many more."""
MOST_STEPS = 1_000_000

# -- Options of several commands ---------------------------------------------------------------------------------------


def add_common_arguments(sub: argparse.ArgumentParser, *, is_quiet: bool) -> None:
    """Add the options of all commands: ``--state``, if the command has not placed it itself, and those of logs."""
    if "--state" not in sub._option_string_actions:
        _add_state(sub)
    group = _group(sub, "reporting")
    group.add_argument(
        "--log-level",
        default="warning" if is_quiet else "info",
        choices=["debug", "info", "warning", "error"],
        help="least severe level that is logged (default: %(default)s)",
    )
    group.add_argument(
        "--log-format", default="text", choices=["text", "json"], help="format of log lines (default: %(default)s)"
    )


def _group(sub: argparse.ArgumentParser, title: str) -> argparse._ActionsContainer:
    found = [group for group in sub._action_groups if group.title == title]
    return found[0] if found else sub.add_argument_group(title)


def _add_state(sub: argparse._ActionsContainer, *, is_used: bool = True) -> None:
    sub.add_argument(
        "--state",
        type=lambda text: Path(text) if text else state_home(),
        default="",  # which argparse converts only if there is no --state
        metavar="DIR",
        help="folder for keys, checkpoints and caches of one peer (default: ~/.local/state/p2pdiloco)"
        if is_used
        else argparse.SUPPRESS,
    )


def _add_identity(sub: argparse._ActionsContainer, default: str = "identity.key") -> None:
    sub.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help=f"file with the peer's private key, created if missing (default: STATE/{default})",
    )


def _add_run(sub: argparse._ActionsContainer, holder: str) -> None:
    """``holder``: what may know several runs."""
    sub.add_argument(
        "--run",
        metavar="NAME",
        help=f"name of the run, or the beginning of its id (default: the only run in {holder})",
    )


def _add_only_run(sub: argparse._ActionsContainer, verb: str) -> None:
    help = f"{verb} only this run, by name or beginning of its id (default: all runs)"
    sub.add_argument("--run", metavar="NAME", help=help)


def _add_bootstrap(sub: argparse._ActionsContainer, text: str, default: str) -> None:
    sub.add_argument(
        "--bootstrap",
        action="extend",
        nargs="*",
        default=[],
        metavar="ADDR",
        help=f"{text}; takes all words that follow (default: {default})",
    )


def _add_listen(sub: argparse._ActionsContainer, default: str = "any port, IPv4 and IPv6") -> None:
    sub.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help=f"address to listen on, such as /ip4/0.0.0.0/tcp/4242; repeatable (default: {default})",
    )


def _add_announce(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="address to publish, for a forwarded port; repeatable (default: this machine's own)",
    )


def _add_relay(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--relay",
        type=relay_rate,
        default="auto",
        metavar="RATE|off",
        help="maximum rate for relaying between other peers that cannot connect, less if this peer's line leaves less; "
        "auto: 50mbit, or a quarter of a faster line, none: no limit, off: do not relay (default: %(default)s)",
    )


def _add_network(sub: argparse._ActionsContainer) -> None:
    """Add options for addresses and bandwidth."""
    _add_listen(sub)
    _add_announce(sub)
    sub.add_argument(
        "--no-port-mapping",
        dest="map",
        action="store_false",
        help="do not ask the router for a port mapping (PCP, NAT-PMP, UPnP)",
    )
    sub.add_argument(
        "--no-lan",
        dest="lan",
        action="store_false",
        help="do not look for peers of the run on the local network (multicast DNS)",
    )
    sub.add_argument(
        "--directory-listen",
        nargs="*",
        metavar="MULTIADDR",
        help="addresses to listen on for the directory (default: any port, IPv4 and IPv6)",
    )
    sub.add_argument(
        "--directory-announce",
        nargs="*",
        default=[],
        metavar="MULTIADDR",
        help="directory addresses to publish, for a forwarded port (default: this machine's own)",
    )
    _add_relay(sub)
    sub.add_argument(
        "--up",
        type=up_budget,
        default="auto",
        metavar="RATE",
        help="maximum send rate, such as 2.5gbit, 100mbit or none; auto: 90 %% of the measured capacity "
        "(default: %(default)s)",
    )
    sub.add_argument(
        "--down", type=bytes_per_second, metavar="RATE", help="maximum receive rate, such as 100mbit (default: none)"
    )


def _add_device(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--data",
        metavar="DIR",
        help="folder, or file of documents, to train on; a run cannot choose one for you (default: the standard "
        "library, if the run trains on it)",
    )
    sub.add_argument(
        "--device", default="cpu", help="device to train on: cpu, cuda, cuda:1, mps (default: %(default)s)"
    )


def _add_training_files(
    sub: argparse._ActionsContainer,
    tokenizer: str = "folder with tokenizer.json (default: --data)",
    model: str = "for runs that train adapters (LoRA): folder with the safetensors files of the base model (default: "
    "none)",
) -> None:
    sub.add_argument("--tokenizer", metavar="DIR", help=tokenizer)
    sub.add_argument("--model", metavar="DIR", help=model)


def _add_threads(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        metavar="N",
        help="number of torch threads for training; 0: chosen by measured step times (default: %(default)s)",
    )


# -- bootstrap, start, join, resume, fetch -----------------------------------------------------------------------------


def _bootstrap(sub: argparse.ArgumentParser) -> None:
    _add_listen(sub, "port 31337, IPv4 and IPv6")
    _add_announce(sub)
    _add_bootstrap(sub, "other directory nodes to connect to", "none")
    sub.add_argument(
        "--rendezvous",
        action="append",
        metavar="MULTIADDR",
        help="rendezvous address for peers that cannot connect, which may be one of --listen; repeatable (default: the "
        "port after each of --listen)",
    )
    _add_relay(sub)
    _add_identity(sub, "bootstrap.key")


def _start(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped one, such as stdlib-tiny")
    sub.add_argument("--name", metavar="NAME", help="name of the run (default: the file's)")
    sub.add_argument(
        "--access",
        choices=["open", "invite", "list"],
        help="who may join; open: anyone, invite: holders of an invite, list: only peers that you name (default: the "
        "file's, else invite)",
    )
    _add_bootstrap(sub, "addresses of directory nodes, or an invite", "none, this peer is the first")
    _add_peer(sub)


def _join(sub: argparse.ArgumentParser) -> None:
    add_addresses(
        sub,
        metavar="INVITE|ADDR",
        help="an invite; for an open run, the multiaddr of a directory node, with /p2p/ID",
    )
    _add_run(sub, "the directory")
    sub.add_argument("--follow", action="store_true", help="follow the global model without training")
    _add_peer(sub)


def _resume(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="state folders of the run's peers, or copies of them"
    )
    _add_run(sub, "the folders")
    _add_bootstrap(sub, "addresses of directory nodes, or an invite", "none, this peer is the first")
    _add_peer(sub)


def _prolong(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folder", type=Path, metavar="DIR", help="state folder of the founder's or an admin's peer, or the run's in it"
    )
    ends = sub.add_mutually_exclusive_group(required=True)
    ends.add_argument(
        "--steps",
        type=at_least(1, LONGEST_RUN),
        metavar="N",
        help="global step at which the run ends, counted from its beginning (default: the run has a token budget)",
    )
    ends.add_argument(
        "--tokens",
        type=at_least(1, MOST_BUDGET),
        metavar="N",
        help="merged tokens at which a run with a token budget ends, counted from its beginning (default: the run has "
        "none)",
    )
    _add_run(sub, "DIR")
    _add_state(sub, is_used=False)
    _add_identity(sub)


def _fetch(sub: argparse.ArgumentParser) -> None:
    add_addresses(
        sub,
        metavar="INVITE|RUN|ADDR",
        help="an invite; for an open run, the multiaddr of any directory node or peer, with /p2p/ID; or the name of a "
        "run whose directory is known from before",
    )
    _add_run(sub, "the directory")
    _add_state(sub)
    _add_network(_group(sub, "network"))
    _add_identity(_group(sub, "storage"))
    sub.set_defaults(
        device="cpu",
        threads=0,
        data=None,
        tokenizer=None,
        model=None,
        checkpoint_s=1e6,
        write_gb=19.0,
        keep_checkpoints=2,
        merge_threads=0,
        leave_s=20.0,
        reattach_s=0.0,
        learner="",
    )


def _add_peer(sub: argparse.ArgumentParser) -> None:
    """Add the options that start, join and resume share, those that most users need first."""
    _add_device(sub)
    _add_state(sub)
    _add_network(_group(sub, "network"))
    _add_storage(_group(sub, "storage"))
    _add_machine(_group(sub, "machine"))
    _add_publishing(_group(sub, "publishing"))
    _add_reporting(_group(sub, "reporting"))
    sub.add_argument("--learner", default="", metavar="NAME", help=argparse.SUPPRESS)  # p2pdiloco.DiLoCo's node


def _add_storage(sub: argparse._ActionsContainer) -> None:
    _add_identity(sub)
    _add_training_files(sub)
    sub.add_argument(
        "--checkpoint-s",
        type=between(1, 1e6, "seconds"),
        metavar="T",
        help="maximum seconds between checkpoints; if given, checkpoints ignore --write-gb (default: 60, or longer if "
        "--write-gb requires it)",
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
        help="number of recent checkpoints to keep (default: %(default)s)",
    )


def _add_machine(sub: argparse._ActionsContainer) -> None:
    _add_threads(sub)
    sub.add_argument(
        "--merge-threads",
        type=at_least(0, MOST_THREADS),
        default=0,
        metavar="N",
        help="number of threads for merging; 0: half of the cores, at most 4 (default: %(default)s)",
    )
    sub.add_argument(
        "--max-memory",
        type=size,
        metavar="SIZE",
        help="maximum memory of node and learner, such as 8gb; a peer that needs more leaves (default: no limit)",
    )
    sub.add_argument("--only-when-idle", action="store_true", help="pause training while others use the processors")
    sub.add_argument("--on-battery", action="store_true", help="continue training while the machine runs on battery")
    sub.add_argument(
        "--spot",
        type=cloud,
        metavar="CLOUD",
        help="leave when this cloud preempts the machine: aws, gcp or azure (default: none)",
    )
    sub.add_argument(
        "--leave-s",
        type=between(0, 3600, "seconds"),
        default=20.0,
        metavar="T",
        help="maximum seconds for a graceful shutdown (default: %(default)g)",
    )
    sub.add_argument(
        "--stay-s",
        type=between(0, 1e9, "seconds"),
        metavar="T",
        help="seconds to serve the model after the run is complete; 0: leave at once (default: 600)",
    )
    sub.add_argument(
        "--reattach-s",
        type=between(0, 86400, "seconds"),
        default=60.0,
        metavar="T",
        help="seconds that the learner trains on after its node was killed, until a node with the same --state takes "
        "it over; 0: it ends at once (default: %(default)g)",
    )


def _add_reporting(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--page",
        type=page_place,
        default="auto",
        metavar="[HOST:]PORT|off",
        help="address of this peer's page for browsers; auto: a free port of this machine; where other machines can "
        "reach HOST, the page requires a token (default: %(default)s)",
    )
    sub.add_argument(
        "--chat",
        action="store_true",
        help="let the page continue texts with the run's current model, and require a token for the page; each answer "
        "may write a checkpoint beyond --write-gb, at most one in 30 s (default: off)",
    )
    sub.add_argument(
        "--notify",
        type=notified,
        default="",
        metavar="COMMAND|URL",
        help="command to run, or URL to post to, when this peer is stuck, alone, diverging, short of disk, or done "
        "(default: none)",
    )


def _add_publishing(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--publish",
        type=folder,
        metavar="DIR",
        help="folder in which to publish the run's model while it trains: each version as export writes it, --model "
        "and --tokenizer included, and DIR/latest as a link to the newest. Any peer can; --follow leaves the processor "
        "to it (default: none)",
    )
    sub.add_argument(
        "--publish-s",
        type=between(1, 1e6, "seconds"),
        metavar="T",
        help="minimum seconds between publications, each with a checkpoint beyond --write-gb (default: 60)",
    )
    sub.add_argument(
        "--publish-keep",
        type=at_least(1),
        metavar="N",
        help="number of publications to keep, the newest included (default: 2)",
    )
    sub.add_argument(
        "--on-publish",
        type=command,
        metavar="COMMAND",
        help="command to run after each publication, with its folder as last argument, such as one that makes a server "
        "load it; ten minutes at most (default: none)",
    )
    _add_format(sub)


def _add_format(sub: argparse._ActionsContainer) -> None:
    """Add what ``export`` and ``--publish`` write."""
    sub.add_argument(
        "--format",
        choices=["hf", "safetensors", "peft", "gguf"],
        help="hf for transformers, gguf for llama.cpp, peft for adapters (LoRA), or safetensors for plain tensors "
        "(default: safetensors for runs of training scripts, peft for other runs with adapters, else hf)",
    )
    sub.add_argument(
        "--like",
        metavar="DIR",
        help="for a run of training scripts: folder with the config.json of the same model, or with the "
        "adapter_config.json of its adapters (default: none)",
    )


# -- export, generate, evaluate ----------------------------------------------------------------------------------------


def export(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    _add_format(sub)
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: the run's name)")
    _add_training_files(
        sub,
        "folder with a tokenizer.json to copy into the export (default: none)",
        "folder with the safetensors files that the run began with, to complete what it trained (default: none)",
    )
    sub.add_argument(
        "--license", default="", metavar="ID", help="the model's license, for its card, such as mit (default: unknown)"
    )


def generate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub, also=", or a folder that export has written")
    sub.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: a line break)")
    _add_sampling(sub, tokens=200)
    _add_training_files(sub, "folder with the run's tokenizer.json, for models that read tokens (default: none)")


def chat(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    _add_sampling(sub, tokens=120)
    _add_training_files(sub, "folder with the run's tokenizer.json, for models that read tokens (default: none)")


def _add_sampling(sub: argparse.ArgumentParser, tokens: int) -> None:
    sub.add_argument(
        "--tokens",
        type=at_least(1),
        default=tokens,
        metavar="N",
        help="maximum number of tokens (default: %(default)s)",
    )
    sub.add_argument(
        "--temperature",
        type=between(0, 100),
        default=0.7,
        metavar="T",
        help="sampling temperature; 0: always take the likeliest token (default: %(default)g)",
    )
    sub.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="random seed (default: %(default)s)")


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
    _add_training_files(sub)


def _add_source(sub: argparse.ArgumentParser, also: str = "") -> None:
    """A run's state on this machine."""
    sub.add_argument(
        "source",
        metavar="RUN",
        help=f"name of a run in --state, or the beginning of its id; or a peer's state folder{also}",
    )
    _add_run(sub, "RUN")


# -- status, watch -----------------------------------------------------------------------------------------------------


def _status(sub: argparse.ArgumentParser) -> None:
    add_addresses(
        sub,
        metavar="INVITE|ADDR|NAME",
        help="an invite; for open runs, the multiaddr of a directory node, with /p2p/ID; for a run on this machine, "
        "its name",
    )
    _add_only_run(sub, "show")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    _add_identity(sub)


def watch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        help="a peer's state folder, a folder with event logs, or the address of a peer's page (default: --state)",
    )
    sub.add_argument(
        "--page",
        type=served_place,
        metavar="[HOST:]PORT",
        help="serve the recording of a folder as a page for browsers at this address; auto: a free port of this "
        "machine (default: draw in this terminal)",
    )
    sub.add_argument("--events", action="store_true", help="print the events that peers have logged")
    sub.add_argument(
        "--speed",
        type=between(0, 10_000, "times"),
        metavar="X",
        help="playback speed of a recording; 0: show its end, or print events without pauses (default: 10; with "
        "--events 0)",
    )
    group = sub.add_argument_group("with --events")
    group.add_argument("--follow", action="store_true", help="also print new events, until interrupted")
    group.add_argument(
        "--kind",
        metavar="KIND,...",
        help="print only these kinds, such as joined,left; docs/watching.md lists them (default: all)",
    )
    group.add_argument(
        "--peer", default="", metavar="ID", help="print only events of the peer whose id ends with ID (default: all)"
    )
    group.add_argument(
        "--since",
        type=lifetime,
        metavar="TIME",
        help="print only events of the last TIME, such as 90m, 12h or 30d (default: all)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object per line")


# -- members -----------------------------------------------------------------------------------------------------------


def _members_add(sub: argparse.ArgumentParser) -> None:
    _add_run(sub, "--state")
    sub.add_argument(
        "--role",
        choices=["follower", "learner", "admin"],
        default="learner",
        help="role of those who join with the invite; an admin can add and ban (default: %(default)s)",
    )
    sub.add_argument(
        "--expires",
        type=lifetime,
        metavar="TIME",
        help="lifetime of the invite and of memberships by it, such as 12h or 30d (default: unlimited)",
    )
    admits = sub.add_mutually_exclusive_group()
    admits.add_argument(
        "--uses",
        type=at_least(1, USES_LIMIT),
        default=1,
        metavar="N",
        help=f"number of peers that the invite admits, 1 to {USES_LIMIT}; its holder counts as so many "
        "(default: %(default)s)",
    )
    admits.add_argument(
        "--peer", metavar="ID", help="make the invite for this peer alone (default: for the first that use it)"
    )
    sub.add_argument(
        "--max-weight",
        type=between(0, 1e9),
        metavar="W",
        help="maximum weight of the new members when owners are selected; peers ask for 1 (default: no limit)",
    )
    _add_bootstrap(sub, "addresses of directory nodes that the invite names", "the run's")
    _add_identity(sub)


def _members_ban(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "who",
        metavar="PEER|INVITE",
        help="id of a peer to remove; or an invite, or its id, to remove all peers that joined with it",
    )
    sub.add_argument(
        "--keep-members",
        action="store_true",
        help="close the invite to new peers, and keep those that joined with it",
    )
    _add_run(sub, "--state")
    _add_identity(sub)


def _members_list(sub: argparse.ArgumentParser) -> None:
    _add_only_run(sub, "show")
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sub.add_argument("--id", action="store_true", help="print only the peer id of this machine, created if missing")
    _add_identity(sub)


# -- Other commands ----------------------------------------------------------------------------------------------------


def demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="folder to write (default: %(default)s)"
    )
    sub.add_argument(
        "--config",
        default="stdlib-tiny",
        metavar="CONFIG",
        help=argparse.SUPPRESS,  # for developers
    )
    sub.add_argument(
        "--steps",
        type=at_least(1, MOST_STEPS),
        metavar="N",
        help="number of global steps (default: the configuration's)",
    )
    sub.add_argument(
        "--time-limit",
        type=between(1, 86400, "seconds"),
        default=1200.0,
        metavar="SECONDS",
        help="seconds after which an unfinished demo fails; a slow machine may need more (default: %(default)g)",
    )
    _add_state(sub, is_used=False)


def _pause(sub: argparse.ArgumentParser) -> None:
    _add_only_run(sub, "pause")
    sub.add_argument("--end", action="store_true", help="end the pause")


def plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", help="a run's TOML file, or the name of a shipped one")
    sub.add_argument(
        "--peers", type=at_least(2, 1_000_000), required=True, metavar="N", help="number of learners (required)"
    )
    sub.add_argument(
        "--up",
        type=bytes_per_second,
        required=True,
        metavar="RATE",
        help="send rate of each peer's link, such as 20mbit (required)",
    )
    sub.add_argument(
        "--down", type=bytes_per_second, metavar="RATE", help="receive rate of each peer's link (default: as --up)"
    )
    sub.add_argument(
        "--rtt",
        type=between(0, 10_000, "milliseconds"),
        default=50.0,
        metavar="MS",
        help="round-trip time in milliseconds (default: %(default)g)",
    )
    sub.add_argument(
        "--step-time",
        type=between(0.001, 3600, "seconds"),
        required=True,
        metavar="S",
        help="seconds per inner step (required)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    _add_state(sub, is_used=False)


def _doctor(sub: argparse.ArgumentParser) -> None:
    add_addresses(sub, metavar="INVITE|ADDR", help="invite or address with which you would join", is_required=False)
    _add_run(sub, "the directory")
    _add_device(sub)
    _add_training_files(sub)
    _add_threads(sub)
    sub.add_argument(
        "--seconds",
        type=between(0, 600, "seconds"),
        default=8.0,
        metavar="T",
        help="seconds of trial training; 0: none (default: %(default)g)",
    )
    _add_listen(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _add_identity(sub)


# -- All commands ------------------------------------------------------------------------------------------------------


def _nothing(_: argparse.ArgumentParser) -> None:
    pass


class Command(NamedTuple):
    """A command; its module has ``async run(arguments) -> exit status``, and a docstring that describes it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _nothing
    is_quiet: bool = False
    """The answer goes to the terminal; only warnings are logged."""
    parts: Mapping[str, Command] = {}
    """Commands that are typed after this one. The module has ``async run_PART``, with a docstring, for each."""
    usual_part: str = ""
    """The one that is run if none is typed."""


MEMBERS = {
    "add": Command("make an invite to one of your runs", _members_add, is_quiet=True),
    "ban": Command("remove a peer, or all peers that joined with an invite", _members_ban, is_quiet=True),
    "list": Command("list the members of this machine's runs", _members_list, is_quiet=True),
}

COMMANDS = {
    "demo": Command("run a small swarm on this machine that trains, loses and gains peers", demo, is_quiet=True),
    "bootstrap": Command(
        "run a bootstrap node: a directory node that other peers use as their first address", _bootstrap
    ),
    "start": Command("create a run and train it", _start),
    "join": Command("join a running run", _join),
    "resume": Command("continue a run whose peers have all stopped", _resume),
    "prolong": Command("let a run end later, whether it trains or has finished", _prolong, is_quiet=True),
    "fetch": Command("download the model of a run, finished or not, without joining it", _fetch, is_quiet=True),
    "export": Command("write a run's model to files for other programs", export, is_quiet=True),
    "generate": Command("sample text from a run's model", generate, is_quiet=True),
    "chat": Command("continue texts that you type with a run's model, also while it trains", chat, is_quiet=True),
    "evaluate": Command("measure the held-out loss of a run's model", evaluate, is_quiet=True),
    "status": Command("show runs and their peers", _status, is_quiet=True),
    "watch": Command("watch a run, live or recorded: in this terminal, as a page, or as events", watch, is_quiet=True),
    "members": Command("add, ban or list the members of your runs", parts=MEMBERS, usual_part="list"),
    "pause": Command("pause the learners on this machine", _pause, is_quiet=True),
    "plan": Command("estimate the bandwidth and memory of a run", plan, is_quiet=True),
    "doctor": Command("check what this machine can do as a peer", _doctor, is_quiet=True),
}
"""Each is a module of this package. Only the chosen one is imported: what needs no torch does not wait for it."""
