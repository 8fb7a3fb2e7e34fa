"""To whom a commit goes; what is passed on between two that do not hear each other: turns, contributions, commits.

Contributions and commits are signed by who made them, so it does not matter who brings them. Rules of this file:
1. Something goes on to a peer that, by its own list, does not hear who said it. Of all who hear both, the one with the
   smallest fingerprint does it.
2. A contribution makes one such step: from its learner's peer to a peer that hears the owner, to the owner.
3. Nothing is passed on twice: only what was news here is.
4. A newcomer that has no states yet is told of a new head and gets no commit, which it could not apply: over a thin
   line commits without end would hold up the states that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.protocol.ids import PeerId, peer_of
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contribution, Head, Heads, Turn, commit_id
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import Core

MEETING_BEATS = 4
"""Own heartbeats for which a newcomer may still be about to meet the others."""


def send_commit(core: Core, peers: Sequence[PeerId], header: CommitHeader) -> None:
    """``header`` goes to those of ``peers`` that have states; the others are told that there is such a head."""
    views = core.membership.peers
    newcomers = [p for p in peers if (beat := views[p].beat) is not None and beat.phase == "joining"]
    core.send(tuple(p for p in peers if p not in newcomers), Commit(header))
    if newcomers:
        head = Head(header.shard, header.version, commit_id(header), header.tokens)
        core.send(tuple(newcomers), Heads((head,), core.step))


def hand_on_turn(core: Core, sender: PeerId, turn: Turn) -> None:
    """A turn that was news here goes on, as this peer announces it."""
    core.send(_deaf_to(core, sender), turn)


def hand_on_commit(core: Core, sender: PeerId, header: CommitHeader) -> None:
    """A commit that this peer takes on its head goes on to those that hear neither who sent it nor its owner."""
    hears = core.membership.connectivity.hears
    deaf = [p for p in _deaf_to(core, sender) if p != header.owner and not hears(p, header.owner)]
    send_commit(core, deaf, header)


def hand_on_contribution(core: Core, sender: PeerId, contribution: Contribution) -> None:
    """What a peer gave here goes on to the owner, if that peer does not hear the owner."""
    me, membership, giver = core.config.peer, core.membership, peer_of(contribution.contributor.learner)
    if giver == me or giver != sender or not contribution.payload:
        return
    version = contribution.base.version + 1
    owner = ranked_owners(core.config.run, contribution.shard, version, membership.owners.candidates)[0]
    if owner not in (me, giver) and not membership.connectivity.hears(giver, owner):
        core.send((owner,), contribution)


def is_handed_on(core: Core, sender: PeerId, contribution: Contribution) -> bool:
    """Whether ``sender`` may bring what another peer's learner gave: it says that it hears that peer. (What has no
    payload has no signature.)"""
    giver = peer_of(contribution.contributor.learner)
    return bool(contribution.payload) and core.membership.connectivity.has_listed(sender, giver)


def _deaf_to(core: Core, speaker: PeerId) -> tuple[PeerId, ...]:
    membership = core.membership
    return membership.connectivity.forwards_to(speaker, membership.live, core.now - MEETING_BEATS * membership.beat_s())
