"""Bytes and CPU time that membership adds to a greeting, on one thread: ``python -m benchmarks.wire.members``."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pdiloco.access.certificates import NEVER, NO_CAP, Grant, Role
from p2pdiloco.access.invite_code import decode_invite, encode_invite
from p2pdiloco.access.members import Members
from p2pdiloco.access.membership_log import ban
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.credentials import Credentials, credentials_from_invite, make_invite
from p2pdiloco.transport.identity import Identity, verify

RUN = RunId("ab" * 20)
TIMES = 500


def main() -> None:
    """Print it."""
    founder, joiner = Identity.ephemeral(), Identity.ephemeral()
    address = f"/ip4/203.0.113.5/tcp/31337/p2p/{founder.peer_id}"
    mine = Credentials(RUN, b"", founder)
    terms = make_invite(mine, bytes(16), role=Role.LEARNER, cap=NO_CAP, not_after=NEVER, addresses=(address,))
    text = encode_invite(terms)
    chain = credentials_from_invite(decode_invite(text), joiner).chain
    known = Members(RUN, founder.peer_id, "invite", verify)
    known.admit(joiner.peer_id, chain, 0.0)
    print(f"invite with one address {len(text)} characters, chain of an invited peer {len(chain)} bytes")

    def first() -> None:
        Members(RUN, founder.peer_id, "invite", verify).admit(joiner.peer_id, chain, 0.0)

    _print("a peer's chain, seen for the first time", first)
    _print("again", lambda: known.admit(joiner.peer_id, chain, 0.0))
    _print("certifying oneself by an invite", lambda: credentials_from_invite(decode_invite(text), joiner))
    by = Grant(subject=founder.peer_id)
    bans = [ban(RUN, Identity.ephemeral().peer_id, by, founder.sign) for _ in range(TIMES)]
    waiting = iter(bans)
    _print(f"a ban ({len(bans[0])} bytes), learned", lambda: known.learn(next(waiting)))


def _print(what: str, action: Callable[[], object]) -> None:
    began = time.process_time()
    for _ in range(TIMES):
        action()
    print(f"{what:<44}{(time.process_time() - began) / TIMES * 1e6:>8.0f} us")


if __name__ == "__main__":
    main()
