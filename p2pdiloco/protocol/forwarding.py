"""Recipients of commits, and forwarding of turns, contributions and commits between peers that do not hear each other.

Contributions and commits are signed by their makers, so any peer may deliver them.

Rules of this file:
1. A message is forwarded to a peer whose own list says that it does not hear the sender. Of all peers that hear both,
   the one with the smallest fingerprint forwards.
2. A contribution is forwarded once: from its learner's peer to a peer that hears the owner, and from there to the
   owner.
3. Only news is forwarded, so nothing is forwarded twice.
4. A newcomer without states gets a new head but not its commit, which it could not apply. On a slow link
   a stream of commits would delay the states that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.protocol.ids import PeerId, peer_of
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contribution, Head, Heads, Turn, commit_id
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import Core

MEETING_BEATS = 4
"""Own heartbeats for which a newcomer may still be connecting to the others."""


def send_commit(core: Core, peers: Sequence[PeerId], header: CommitHeader) -> None:
    """Send ``header`` to those of ``peers`` that have states, and only its head to the others."""
    views = core.membership.peers
    newcomers = [p for p in peers if (beat := views[p].beat) is not None and beat.phase == "joining"]
    core.send(tuple(p for p in peers if p not in newcomers), Commit(header))
    if newcomers:
        head = Head(header.shard, header.version, commit_id(header), header.tokens)
        core.send(tuple(newcomers), Heads((head,), core.step))


def hand_on_turn(core: Core, sender: PeerId, turn: Turn) -> None:
    """Forward a turn that is news, in the form in which this peer announces it."""
    core.send(_deaf_to(core, sender), turn)


def hand_on_commit(core: Core, sender: PeerId, header: CommitHeader) -> None:
    """Forward a commit that extends this peer's head to peers that hear neither its sender nor its owner."""
    hears = core.membership.connectivity.hears
    deaf = [p for p in _deaf_to(core, sender) if p != header.owner and not hears(p, header.owner)]
    send_commit(core, deaf, header)


def hand_on_contribution(core: Core, sender: PeerId, contribution: Contribution) -> None:
    """Forward a contribution to the owner, if the contributing peer does not hear the owner."""
    me, membership, giver = core.config.peer, core.membership, peer_of(contribution.contributor.learner)
    if giver == me or giver != sender or not contribution.payload:
        return
    version = contribution.base.version + 1
    owner = ranked_owners(core.config.run, contribution.shard, version, membership.owners.candidates)[0]
    if owner not in (me, giver) and not membership.connectivity.hears(giver, owner):
        core.send((owner,), contribution)


def is_handed_on(core: Core, sender: PeerId, contribution: Contribution) -> bool:
    """Return whether ``sender`` may forward this contribution: it must say that it hears the learner's peer.

    An empty contribution carries no signature and is never forwarded.
    """
    giver = peer_of(contribution.contributor.learner)
    return bool(contribution.payload) and core.membership.connectivity.has_listed(sender, giver)


def _deaf_to(core: Core, speaker: PeerId) -> tuple[PeerId, ...]:
    membership = core.membership
    return membership.connectivity.forwards_to(speaker, membership.live, core.now - MEETING_BEATS * membership.beat_s())
