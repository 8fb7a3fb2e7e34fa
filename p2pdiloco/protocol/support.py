"""How many peers must stand by something before this peer acts on it: all majorities of the protocol.

- *Most*: more than half of those that are counted stand by it.
- *Nearly all*: three quarters, rounded: one of two, two of three, three of four, four of five, six of eight. If two of
  five, or three of eight, lie together, they are not the majority of nearly all.
- *Leading*: somebody stands by it, and no fewer than by anything else. This holds only after a wait.

*Donors* are the other live peers that have the shard's state. *All* are the donors and this peer, which counts itself
where the others contradict what it has found.

========  =====================================================  =========================  ===========================
rule      question                                               counted                    threshold
========  =====================================================  =========================  ===========================
H2b       does a newcomer know enough to download a state?       donors                     most
H2a, H2d  does a newcomer believe a state?                       donors                     most; founder; leading late
H2f-H2h   does it believe the state's last commit, too?          donors without its owner   founder; most; leading
H3b       does a peer believe a heavier state, if not by H3a?    donors                     most; leading in the end
H3f       does it believe a lighter state?                       all                        most, for long
V2c       does it believe what it has rejected?                  all                        most
K4a       does a peer that goes back believe a state?            donors that went back      most
K5a       does it give in, as the others have not gone back?     all                        leading, for long
K3a       is a commit abandoned?                                 those that do not abstain  most, at least two
K5b       does a peer follow those that went back?               all, and indirect peers    leading, for long
K2a       has the held-out loss jumped?                          peers that measured        most, at least two
K1d       may a checkpoint become known-good?                    peers that measured        not if most found a jump
O5a       is a commit applied at once?                           donors that report it, or  most
                                                                 prompt peers in it         nearly all
O5e       is a commit that names unknown peers not suspect?      its contributors           most, without its owner
E1d       is a head that was read from disk the newest?          donors                     most
M4d       does an owner wait no longer than the grace window?    prompt peers               nearly all
M4e       does a round open?                                     participants               most
M7e       has a group answered?                                  recent givers of it        nearly all
V1g       does a merge prove as much as any other?               usual contributors         nearly all
C6e       may an owner merge with ``needs_majority``?            participants, missing      most
========  =====================================================  =========================  ===========================
"""

from __future__ import annotations

from typing import NamedTuple


class Support(NamedTuple):
    """How many of the peers that are counted stand by something."""

    stand: int
    of: int
    """Number of peers that are counted."""
    against: int = 0
    """Number of peers that stand by whatever else most of them stand by."""

    @property
    def is_most(self) -> bool:
        """Whether more than half stand by it."""
        return 2 * self.stand > self.of

    @property
    def is_nearly_all(self) -> bool:
        """Whether three quarters stand by it, rounded."""
        return 4 * self.stand + 2 >= 3 * self.of

    @property
    def is_leading(self) -> bool:
        """Whether somebody stands by it, and no fewer than by anything else."""
        return self.stand >= max(1, self.against)
