"""``p2pdiloco invite``: Make an invite to a run of which this machine's peer is the founder or an admin. It is one
line of text: everyone who has it can join with ``p2pdiloco join``. No peer needs to be running.
"""

from __future__ import annotations

import argparse
import time

from p2pdiloco.access.certificates import NEVER, Role
from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError, as_command_errors
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.invitations import credentials_of, invite_text, kept_addresses, load_grant
from p2pdiloco.swarm.run_index import ConfigError, kept_run
from p2pdiloco.transport.identity import IdentityError
from p2pdiloco.wire.peer_ids import key_of


async def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    with as_command_errors(repair=(ConfigError, IdentityError, ValueError), nobody=()):
        kept = kept_run(arguments.state, arguments.run)
        manifest, folder = kept.manifest, kept.folder
        if arguments.peer is not None:
            key_of(PeerId(arguments.peer))
        mine = credentials_of(manifest, peer_options.open_identity(arguments, kept.state), folder)
        now_s = time.time()
        addresses = tuple(arguments.address) or kept_addresses(folder)
        if not addresses:
            raise CommandError("it is not known where newcomers find the run: name a directory node, --address", REPAIR)
        print(
            invite_text(
                manifest,
                mine,
                load_grant(manifest, mine, folder, now_s),
                addresses,
                role=Role[arguments.role.upper()],
                max_weight=arguments.max_weight,
                not_after=NEVER if arguments.expires is None else int(now_s) + arguments.expires,
                peer=None if arguments.peer is None else PeerId(arguments.peer),
            )
        )
    return 0
