"""Audits in a simulated world: what a driver draws, fetches and compares, and owners whose merges are wrong.

Rules of this file:
1. A lying owner puts one further component into what it merges. It is no learner's, so that all tokens are still
   accounted for, and within every bound, so that nobody refuses the commit for its values.
2. Whoever compares has the payloads from whoever shows them; nobody is told by the world what is wrong.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.barred_owners import audited_payloads
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId
from p2pdiloco.protocol.messages import CommitHeader, WrongMerge
from tests.machine_sim.integer_shards import Payload, merged

if TYPE_CHECKING:
    from tests.machine_sim.network import Link
    from tests.machine_sim.process import Process
    from tests.machine_sim.world import World

INSERTED = LearnerId("?")
"""Whose component is what a lying owner inserts."""
MOST_UNCAUGHT = 250
"""Wrong commits after which their owner must have been found: nine in ten of them are not audited, each time."""


class Auditing:
    """All audits of one world."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = Random(f"audits {seed}")
        self._seen: set[Digest] = set()
        self.false: set[Digest] = set()
        """Payloads into which their makers have put something."""
        self.wrong: Counter[PeerId] = Counter()
        """Wrong commits of each owner that others have applied."""
        self.caught: dict[PeerId, int] = {}
        """How many these were when the owner was found."""
        self.counted: Counter[str] = Counter()
        """Audits, and those for which the owner did not deliver; accusations that could not be checked."""

    def inserts(self, name: PeerId) -> bool:
        """Whether this peer puts something into the merge that it makes now."""
        share = self._world.settings[name].dishonesty
        return bool(share) and self._random.random() < share

    def applied(self, process: Process, header: CommitHeader, commit: Digest, payload: Payload) -> None:
        """A peer has applied a commit."""
        if process.name != header.owner and commit not in self._seen and any(who == INSERTED for who, _ in payload):
            self._seen.add(commit)
            merges = [(header.owner, header.payload)]
            merges += [(part.collector, Digest(part.payload.hex())) for part in header.parts]
            self.wrong.update(owner for owner, payload in merges if payload in self.false)

    def consider(self, process: Process, effect: ef.Audit) -> None:
        """A machine wants this commit audited, now and then."""
        known = self._world.checks.commits[effect.shard, effect.commit]
        if self._random.random() >= effect.chance or known.header is None:
            return
        merge = WrongMerge(known.header, b"", effect.part)
        link = process.links.get(merge.owner)
        if link is None or not link.connection.is_open:
            self._missed(process, merge)
            return
        size = len(audited_payloads(merge.header, merge.part)) * process.setting.payload_bytes
        self._world.network.carry(link, size, 1.0, self._arrived, (process, merge, link))

    def _arrived(self, argument: tuple[Process, WrongMerge, Link]) -> None:
        process, merge, link = argument
        is_near = link.connection.is_open and not link.target.is_dead and not link.target.is_paused()
        found = shown(link.target, merge) if is_near else None
        self.counted["audits"] += 1
        if found is None:
            self._missed(process, merge)
        elif not is_wrong(merge, found):
            process.tell(ev.Audited(merge.shard, merge.version, merge.owner, True, merge.version))
        else:
            self._proved(merge.owner)
            process.store.update(found)
            process.tell(ev.Contradicted(merge))

    def _missed(self, process: Process, merge: WrongMerge) -> None:
        self.counted["missed"] += 1
        process.tell(ev.Audited(merge.shard, merge.version, merge.owner, False, merge.version))

    def _proved(self, owner: PeerId) -> None:
        self.caught.setdefault(owner, self.wrong[owner])
        setting = self._world.settings[owner]
        if not (setting.dishonesty or setting.lies or setting.wildness):
            self._world.checks.violated(1, f"{owner}, which is honest, is proved to have merged something else")

    def holds(self, process: Process, accuser: Process, accusation: WrongMerge) -> bool:
        """Whether a peer finds what it is told, with payloads of its own or of who told it."""
        found = shown(process, accusation) or shown(accuser, accusation)
        if found is None:
            self.counted["unchecked"] += 1
            return False
        if is_wrong(accusation, found):
            process.store.update(found)
            return True
        return False

    def check_end(self) -> None:
        """Who has lied often was found, and all that are here know of it."""
        for owner, count in self.wrong.items():
            if owner not in self.caught and count > MOST_UNCAUGHT:
                self._world.checks.violated(1, f"{owner} made {count} wrong commits, and nobody has found out")
        for process in self._world.living():
            unknown = self.caught.keys() - process.machine.core.membership.owners.barred - {process.name}
            if unknown and process.machine.core.is_current:
                self._world.checks.violated(1, f"{process.name} does not know that {min(unknown)} merges wrongly")


def shown(process: Process, merge: WrongMerge) -> dict[Digest, Payload] | None:
    """What this peer shows of a commit, or of one of its groups, to merge it again; None if it lacks some of it."""
    needed = audited_payloads(merge.header, merge.part)
    found = {digest: process.store[digest] for digest in needed if digest in process.store}
    return found if len(found) == len(needed) else None


def is_wrong(merge: WrongMerge, payloads: dict[Digest, Payload]) -> bool:
    """Whether a merge has other values than its contributions give."""
    header, own, given = merge.header, merge.header.payload, merge.header.merged
    if merge.part >= 0:
        group = header.groups()[merge.part]
        own, given = Digest(group.payload.hex()), group.contributors
    return payloads[own] != merged([payloads[Digest(c.payload.hex())] for c in given])


def with_inserted(payload: Payload) -> Payload:
    """What a lying owner commits instead."""
    return tuple(sorted((*payload, (INSERTED, 1))))
