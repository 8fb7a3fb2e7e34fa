"""Ending: the reason why a peer ends, and the exit status of its process.

A peer ends because the run is complete, because it was asked to leave, because its learner cannot go on, or because of
a defect in this program.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol.view import MachineView

# Exit status of a peer that has found nobody who has the model.
NOBODY = 3
# Exit status of a peer that may have a model of its own, because the swarm was split.
APART = 4


class Ending(msgspec.Struct, frozen=True):
    """Exit status and reason. Status 0: ended in order; 1: something failed; 2: the user must repair something; 3: no
    peer has the model; 4: at least as many peers as stayed were lost at once and did not come back, or the line was too
    thin, so others may have another model."""

    status: int
    reason: str


def ordinary_ending(
    reason: str,
    view: MachineView,
    *,
    needs_majority: bool,
    trouble: str,
    learners: str,
    absence: str = "",
    line: str = "",
) -> Ending:
    """Return the ending of a peer that ended without a failure.

    ``trouble``: problems that a person should look at; ``learners``: the learner's problem; ``absence``: why there is
    no learner; ``line``: what is wrong with the line. All are empty if there is nothing to report.
    """
    unmerged = view.unmerged_tokens()
    if unmerged:
        is_alone = needs_majority and view.missing
        alone = "too many peers are missing, and the run merges only with a majority" if is_alone else ""
        why = trouble or alone or "a larger --leave-s waits longer"
        return Ending(1, f"{reason}; {unmerged:,} tokens were not merged in time and are lost ({why})")
    if absence:
        return Ending(1, f"{reason}; this peer had no learner at the end: {absence}")
    if learners:
        return Ending(1, f"{reason}; {learners}")
    if view.missing and view.has_finished:  # a peer that was asked to leave can resume, and continues then
        return Ending(
            APART,
            f"{reason}, but {view.missing} peers were lost at once and have not come back. They may have trained on "
            "and have a second model. To combine both, let a peer of each side serve its model (p2pdiloco resume "
            "FOLDER --stay-s 3600): when they connect, the model with more tokens wins",
        )
    if line and not view.is_shared:  # all is merged, but perhaps by this peer alone
        return Ending(APART, f"{reason}, but other peers may not have this peer's progress: {line}")
    return Ending(0, reason)
