"""The common part of ``start``, ``join`` and ``resume``: a peer's own options, and how it ends."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.access.invite_code import PREFIX, Invite, InviteError, decode_invite
from p2pdiloco.peer.options import (
    LearnerOptions,
    LinkOptions,
    MachineOptions,
    PeerOptions,
    PublishOptions,
    WatchOptions,
)
from p2pdiloco.swarm.run_lookup import DirectoryOptions, check_directory_addresses
from p2pdiloco.transport import addresses
from p2pdiloco.transport.identity import KEY_FILE, Identity
from p2pdiloco.transport.sockets import check_numeric, everywhere
from p2pdiloco.util import status_pipe
from p2pdiloco.util.logs import bottom_line, printable
from p2pdiloco.util.status_pipe import StatusMessage

if TYPE_CHECKING:
    from p2pdiloco.peer.ending import Ending  # which loads torch, and who only looks does without


def peer_options(arguments: argparse.Namespace, folder: Path) -> PeerOptions:
    """The peer's own settings, from the command line.

    Raises:
        ValueError: an address to announce or to listen on is none.
    """
    for address in arguments.announce:
        addresses.parse(address)
    for address in arguments.listen or ():
        check_numeric(addresses.parse(address))
    if getattr(arguments, "chat", False) and arguments.page == "off":
        raise ValueError("--chat is on the page: leave out --page off")
    return PeerOptions(
        folder=folder,
        link=LinkOptions(
            listen=tuple(arguments.listen or everywhere()),
            announce=tuple(arguments.announce),
            maps_port=arguments.map,
            relay_bytes_per_s=arguments.relay,
            up_bytes_per_s=arguments.up,
            down_bytes_per_s=arguments.down,
        ),
        learner=LearnerOptions(
            device=arguments.device,
            data=arguments.data,
            tokenizer=arguments.tokenizer,
            model=arguments.model,
            threads=arguments.threads,
            script=arguments.learner,
            reattach_s=arguments.reattach_s,
        ),
        is_follower=getattr(arguments, "follow", False) or arguments.command == "fetch",
        checkpoint_s=60.0 if arguments.checkpoint_s is None else arguments.checkpoint_s,
        are_checkpoints_timed=arguments.checkpoint_s is not None,
        write_bytes_per_day=1e9 * arguments.write_gb,
        keep_checkpoints=arguments.keep_checkpoints,
        leave_s=arguments.leave_s,
        stay_s=getattr(arguments, "stay_s", 0.0),
        is_fetching=arguments.command == "fetch",
        machine=MachineOptions(
            spot=getattr(arguments, "spot", None),
            most_memory_bytes=getattr(arguments, "max_memory", None),
            only_when_idle=getattr(arguments, "only_when_idle", False),
            is_battery_used=getattr(arguments, "on_battery", False),
            tensor_threads=arguments.merge_threads,
        ),
        watch=WatchOptions(
            page=getattr(arguments, "page", "off"),
            has_chat=getattr(arguments, "chat", False),
            notify=getattr(arguments, "notify", ""),
        ),
        publish=_publish_options(arguments),
    )


def _publish_options(arguments: argparse.Namespace) -> PublishOptions | None:
    """Return what ``--publish`` and the options beside it say; None: nothing is published.

    Raises:
        ValueError: one of them is given without ``--publish``.
    """
    folder = getattr(arguments, "publish", None)
    if folder is not None:
        return PublishOptions(
            folder=folder,
            every_s=60.0 if arguments.publish_s is None else arguments.publish_s,
            keep=2 if arguments.publish_keep is None else arguments.publish_keep,
            format=arguments.format,
            like=arguments.like,
            command=arguments.on_publish or "",
        )
    for option in ("publish_s", "publish_keep", "on_publish", "format", "like"):
        if getattr(arguments, option, None) is not None:
            raise ValueError(f"--{option.replace('_', '-')} is for --publish DIR: add that, or leave it out")
    return None


def open_identity(arguments: argparse.Namespace, state: Path | None = None) -> Identity:
    """The peer's key, made at the first time. ``state``: the peer's folder, if it is not --state."""
    return Identity.load_or_create(arguments.identity or (state or arguments.state) / KEY_FILE)


def kept_identity(arguments: argparse.Namespace, state: Path) -> Identity | None:
    """The key of the peer whose folder is ``state``, if it has one; writes nothing. A key file that the user has named
    is that of --state."""
    named = arguments.identity if state == arguments.state else None
    return Identity.load(named or state / KEY_FILE)


def directory_options(arguments: argparse.Namespace, initial_peers: list[str]) -> DirectoryOptions:
    """Return the options of the directory. ``initial_peers``: addresses; one may be an invite, which has some.

    Raises:
        ValueError: it is none, or there are several; an address to announce or to listen on is none.
    """
    invite, first = with_invite(initial_peers)
    check_directory_addresses(first)
    for address in arguments.directory_announce:
        addresses.parse(address)
    for address in arguments.directory_listen or ():
        check_numeric(addresses.parse(address))
    return DirectoryOptions(
        listen=tuple(arguments.directory_listen or everywhere()),
        announce=tuple(arguments.directory_announce),
        initial_peers=first,
        invite=invite,
        has_lan=arguments.lan,
    )


def with_invite(words: list[str]) -> tuple[Invite | None, tuple[str, ...]]:
    """The invite among the words of a command line, and all addresses, its own first.

    Raises:
        InviteError: it is none, or there are several.
    """
    invites = [decode_invite(word) for word in words if _is_meant_as_invite(word)]
    if len(invites) > 1:
        raise InviteError("one invite at a time: each is to one run")
    others = tuple(word for word in words if not _is_meant_as_invite(word))
    return (invites[0], (*invites[0].initial_peers(), *others)) if invites else (None, others)


def _is_meant_as_invite(word: str) -> bool:
    """Return whether a word begins as an invite does, though it may be incomplete. Not for names of runs."""
    return word.strip().startswith(PREFIX)


def say(told: str | StatusMessage) -> None:
    """Print a line for the user at once; without control characters on a terminal, since a model writes what it was
    taught, and without secrets elsewhere, since logs are kept. A message also goes to the program that started this
    one, if it reads the status pipe: after the line, so that the program finds it printed."""
    line = str(told)
    try:
        if sys.stdout.isatty():
            with bottom_line.lifted():
                print(printable(line, keeps="\n\t"), flush=True)
        else:
            print(told.public if isinstance(told, StatusMessage) else line, flush=True)
    finally:
        if isinstance(told, StatusMessage):
            status_pipe.writer.report(told)


def ask(question: str) -> str | None:
    """The user's answer; None if there is no terminal, or it was left with Ctrl+D. Blocks the event loop, on the main
    thread, and so handles Ctrl+C itself.

    Raises:
        KeyboardInterrupt: Ctrl+C.
    """
    if not sys.stdin.isatty():
        return None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(printable(question, keeps="\n")).strip()
    except EOFError:
        print()
        return None
    finally:
        signal.signal(signal.SIGINT, before)


def report_ending(ending: Ending) -> int:
    """Tell the user how the peer ended; returns the exit status."""
    bottom_line.clear()  # of a download that came to no end
    status_pipe.writer.report_exit(ending.status, ending.reason)
    if ending.status:
        print("p2pdiloco:", printable(ending.reason, keeps="\n"), file=sys.stderr)
    else:
        say(f"ended: {ending.reason}")
    return ending.status
