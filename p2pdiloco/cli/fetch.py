"""``p2pdiloco fetch``: Download the model of a run, finished or not, from the peers that hold it. It is stored in
--state, for p2pdiloco generate and export.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pdiloco.access.invite_code import is_invite
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError
from p2pdiloco.cli.join import choose
from p2pdiloco.node.launcher import join


async def run(arguments: argparse.Namespace) -> int:
    """Join as one who does not train, and leave with the state."""
    addresses, wanted = _addresses_and_name(arguments)
    options = peer_options.peer_options(arguments, arguments.state)
    directory = peer_options.directory_options(arguments, addresses)
    identity = peer_options.open_identity(arguments)
    with identity.hold():
        ending = await join(wanted, options, directory, identity, choose, peer_options.say)
    return ending.status if not ending.status else peer_options.report_ending(ending)


def _addresses_and_name(arguments: argparse.Namespace) -> tuple[list[str], str | None]:
    """Addresses or an invite, and the run's name, which may stand in their place where the directory was met before."""
    addresses = [word for word in arguments.address if word.startswith("/") or is_invite(word)]
    names = [word for word in arguments.address if word not in addresses] + ([arguments.run] if arguments.run else [])
    if len(names) > 1:
        raise CommandError(f"one run at a time, not {' and '.join(names)}: fetch them one after the other", REPAIR)
    known: Path = arguments.state / "directory.json"
    if not addresses and not known.is_file():
        raise CommandError(
            f"{names[0]}: {arguments.state} has met no directory yet: give an invite or an address, as p2pdiloco start "
            "and bootstrap print it (p2pdiloco fetch ADDR --run NAME)",
            REPAIR,
        )
    return addresses, names[0] if names else None
