"""Why a peer ends, and with which status its process does.

A peer ends for one of four reasons: the run is complete, it was asked to leave, its learner cannot go on, or a defect
of ours. Each has an exit status and a sentence.
"""

from __future__ import annotations

import asyncio

import msgspec

from p2pdiloco.protocol.view import MachineView

APART = 4
"""The exit status of a peer that may have a model of its own."""


class Ending(msgspec.Struct, frozen=True):
    """Why the node stopped. Status 0: in order; 1: something failed; 2: the user must repair something; 4: it was apart
    from as many as were with it, and did not meet them again."""

    status: int
    reason: str


class End:
    """Of one peer: whether it is reached, and by what."""

    def __init__(self) -> None:
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause: Ending | None = None
        """What makes it end otherwise than the machine would."""

    @property
    def is_reached(self) -> bool:
        """It is ending."""
        return self._reason.done()

    def reach(self, reason: str) -> None:
        """There is nothing left to do."""
        if not self._reason.done():
            self._reason.set_result(reason)

    async def reason(self) -> str:
        """Why, when it is reached."""
        return await self._reason


def ordinary_ending(
    reason: str, view: MachineView, *, needs_majority: bool, trouble: str, learners: str, absence: str = ""
) -> Ending:
    """How a peer ends that nothing else has ended. ``trouble``: what a person should look at; ``learners``: as far as
    it is the learner's; ``absence``: why there is no learner."""
    unmerged = view.unmerged_tokens()
    if unmerged:
        is_alone = needs_majority and view.missing
        alone = "the run merges nothing without a majority, and too many peers are missing" if is_alone else ""
        why = trouble or alone or "--leave-s allows longer"
        return Ending(1, f"{reason}; {unmerged:,} tokens were not merged in time and are lost ({why})")
    if absence:
        return Ending(1, f"{reason}; at the end this peer had no learner: {absence}")
    if learners:
        return Ending(1, f"{reason}; {learners}; `p2pdiloco resume --known-good` goes back")
    if view.missing and view.has_finished:  # who is sent away may come back, and goes on then
        return Ending(
            APART,
            f"{reason}, but {view.missing} of the peers that were here were lost at once and have not come back: they "
            "may have gone on, and have a second model. To make one of both, let a peer of each side serve its own "
            "(p2pdiloco resume FOLDER --stay-s 3600): where they meet, the model with more tokens wins",
        )
    return Ending(0, reason)
