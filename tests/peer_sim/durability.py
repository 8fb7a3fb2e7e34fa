"""What must hold of a peer's disk and memory beside its state: more of what must hold (``checkers``), judged from the
bytes on the simulated disk.

7. What is read back of a disk is what its heads stand for, with their owners' signatures and what led to them, whatever
   became of the disk. A whole checkpoint that nothing has harmed is never given up for less.
8. Where nothing harmed disk or memory, a version that a peer had ``LATE_S`` before it was killed is there in its next
   life, also where all that was harmed is its newest checkpoint, if there is an older one. Who ends in order leaves its
   last heads, if the disk takes them then.
9. Checkpoints come no more often than the user allows.
10. Nobody keeps what nobody needs: others' contributions that were merged, files of payloads that were dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.checkpoint import Checkpoint, CheckpointError
from p2pdiloco.peer.payload_store import Held, place_bytes
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.audits import AUDITED_VERSIONS
from p2pdiloco.protocol.barred_owners import audited_payloads
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, peer_of
from p2pdiloco.protocol.manifest import MANIFEST
from p2pdiloco.protocol.messages import CommitHeader, Head, WrongMerge, commit_id
from p2pdiloco.transport.identity import verify
from tests.peer_sim.disk import SimulatedDisk

if TYPE_CHECKING:
    from p2pdiloco.peer.peer import Peer
    from tests.peer_sim.host import SimulatedHost
    from tests.peer_sim.learner import SimulatedLearner
    from tests.peer_sim.world import World

LATE_S = 5.0
"""Until a version is on the disk: a look every half second, behind what else the disk has to do."""
LATELY = 4
"""Versions that come while a learner is told of one."""
MOST_LEFT_OVER = 12
"""Payloads, of a sector each, whose places wait for the next sweep."""
UNNEEDED_S = 10.0
"""Until what nobody needs is gone: a few laps through all shards."""


class _Seen(NamedTuple):
    """A version that a life has taken, as a step after the one before."""

    at: float
    version: int


class _Torn(NamedTuple):
    """A checkpoint."""

    path: str
    """Its file that was harmed."""
    floors: list[int]
    """The versions that the one before, and what was committed since, lead to."""
    at: float


class _Life:
    """What is remembered of one, until the next."""

    def __init__(self, host: SimulatedHost, shards: int) -> None:
        self.host = host
        self.began = host.now()
        self.steps: list[list[_Seen]] = [[] for _ in range(shards)]
        """By shard, since its state last came otherwise than step by step."""
        self.from_s = [0.0] * shards
        """When that was: the next whole checkpoint is the first that has it."""
        self.heads: list[Digest | None] = [None] * shards
        self.kept: WeakKeyDictionary[Held, float] = WeakKeyDictionary()
        """Payloads, and when they were seen first."""
        self.saved: list[float] = []
        """When whole checkpoints were there."""


class Durability:
    """Of one world."""

    def __init__(self, world: World, folder: Path, least_s: float) -> None:
        """``folder`` has the checkpoints, which come every ``least_s`` at most."""
        self._world = world
        self._folder = folder
        self._least_s = least_s
        self._lives: dict[PeerId, _Life] = {}
        self._floors: dict[PeerId, list[int]] = {}
        """Of peers that were killed: the versions that they must come back to."""
        self._torn: dict[PeerId, _Torn] = {}
        """Of peers that were killed when their newest checkpoint had been harmed."""
        self._merged: list[dict[Digest, tuple[set[PeerId], float]]] = [{} for _ in world.layout.shards]
        """By shard: whose payloads were merged, and when. Several may have given the same: nothing but zeros."""
        self.resumes: PeerId | None = None
        """Who begins with the best of what lies on all disks."""
        self._merged_by: defaultdict[tuple[PeerId, ShardId], dict[Digest, int]] = defaultdict(dict)
        """What each owner merged, which it shows to auditors for a while: the newest version, by payload."""
        self._bases: defaultdict[Digest, set[Digest]] = defaultdict(set)
        """The heads that each contribution's payload was given on."""
        self._commits: set[Digest] = set()
        """Payloads of commits. A learner's alone, merged without others', is its contribution's."""
        self._altered: set[tuple[ShardId, Digest, PeerId]] = set()
        """Heads that their owners' memory had altered, and nobody else had, and who merged on them (A6c)."""

    # -- 7: what is read back ------------------------------------------------------------------------------------------

    def read_back(self, host: SimulatedHost, found: Checkpoint | None, error: CheckpointError | None) -> None:
        """A life begins with what its disk has."""
        name, disk, checks = host.name, host.disk, self._world.checks
        intact = self._intact(disk)
        best = max((index.weight for _, index in intact), default=-1)
        weight = -1 if found is None else sum(saved.state.head.tokens for saved in found.shards)
        if error is not None and (name not in checks.damaged or intact):
            checks.violated(7, f"{name[-6:]} cannot read its checkpoints, though nothing harmed them: {error}")
        elif weight < best:
            checks.violated(7, f"{name[-6:]} comes back to {weight} tokens, of a whole checkpoint with {best}")
        if found is not None:
            self._is_sound(name, found)
        floors = [] if disk.is_unreliable or name in checks.damaged else self._floors.get(name, [])
        torn = self._torn.pop(name, None)
        if torn is not None and disk.altered & {*disk.files} == {torn.path} and not disk.is_unreliable:
            floors = torn.floors
        self._floors.pop(name, None)
        for shard, floor in enumerate(floors):
            version = -1 if found is None else found.shards[shard].state.head.version
            if version < floor:
                checks.violated(8, f"{name[-6:]} had version {floor} of shard {shard} and comes back to {version}")
                return
        self._lives[name] = _Life(host, len(self._world.layout.shards))

    def _intact(self, disk: SimulatedDisk) -> list[tuple[int, checkpoint.Index]]:
        if str(self._folder / MANIFEST) in disk.altered or str(self._folder / MANIFEST) not in disk.files:
            return []
        found = []
        for number, index in checkpoint.indices(self._folder, shown(disk)):
            paths = [str(self._folder / f"{checkpoint.stem(number)}{suffix}") for suffix in (".json", ".safetensors")]
            if all(path in disk.files and path not in disk.altered for path in paths):
                found.append((number, index))
        return found

    def newest(self, disk: SimulatedDisk) -> str:
        """How the paths of the newest checkpoint's files begin."""
        return str(self._folder / checkpoint.stem(self._newest(disk)))

    def _newest(self, disk: SimulatedDisk) -> int:
        return max((number for number, _ in checkpoint.indices(self._folder, shown(disk))), default=0)

    def _is_sound(self, name: PeerId, found: Checkpoint) -> None:
        checks = self._world.checks
        for piece, saved in zip(self._world.layout.shards, found.shards, strict=True):
            head, header = saved.state.head, saved.header
            where = f"{name[-6:]} reads back {head.id[:8]} of shard {piece.shard}"
            known = checks.values.get((piece.shard, head.id))
            if known is not None and known.owner not in checks.spoilt:
                span = slice(piece.start, piece.stop)
                theta, momentum = found.theta[span].numpy(), found.momentum[span].float().numpy()
                if not (np.array_equal(theta, known.theta) and np.array_equal(momentum, known.momentum)):
                    checks.violated(7, f"{where} with other parameters or momentum than it stands for")
            if head.version == 0:
                continue
            if header is None or commit_id(header) != head.id:
                checks.violated(7, f"{where} without its commit")
            elif not verify(header.owner, messages.signed_commit_bytes(head.id), saved.signature):
                checks.violated(7, f"{where} without its owner's signature")
            elif name in checks.damaged:
                continue  # what led to it bears signatures of its own, and is left out where it is altered
            elif head.version > 1 and [commit_id(c.header) for c in saved.lineage[-1:]] != [header.parent]:
                checks.violated(7, f"{where} without what led to it")

    def resumed(self, name: PeerId, found: Sequence[Checkpoint], best: Checkpoint) -> None:
        """A life begins with the best of these."""
        self._is_sound(name, best)
        for shard, saved in enumerate(best.shards):
            heaviest = max(one.shards[shard].state.head.tokens for one in found)
            if saved.state.head.tokens < heaviest:
                self._world.checks.violated(
                    7, f"{name[-6:]} resumes with {saved.state.head.tokens} tokens of shard {shard}, not {heaviest}"
                )

    def has_whole(self, name: PeerId) -> bool:
        """Whether this life has written a whole checkpoint."""
        return bool((life := self._lives.get(name)) and life.saved)

    def began(self, peer: Peer) -> None:
        """A peer has taken what it came with."""
        life = self._lives[peer.config.peer]
        for shard, chain in enumerate(peer.machine.core.chains):
            if chain.head is None:
                continue
            life.heads[shard], life.from_s[shard] = chain.head.id, float("-inf")
            if chain.head.version:
                self._world.checks.is_proved(peer, ShardId(shard), chain.head.id)

    # -- 8: what must be there -----------------------------------------------------------------------------------------

    def applied(self, peer: Peer, shard: ShardId, head: Head, parent: Digest | None) -> None:
        """A peer has a version; ``parent`` is the one before, if it is known."""
        life = self._lives.get(peer.config.peer)
        if life is None or life.heads[shard] == head.id:
            return
        for held in peer.driver.payload_cache.shards[shard].payloads.values():
            life.kept.setdefault(held, self._world.now)
        before, life.heads[shard] = life.heads[shard], head.id
        if before is None or before != parent:
            life.steps[shard], life.from_s[shard] = [], self._world.now + LATE_S  # none is being copied any more
        life.steps[shard].append(_Seen(self._world.now, head.version))

    def told(self, name: PeerId, event: dict[str, Any]) -> None:
        """What a peer writes down of itself."""
        life = self._lives.get(name)
        if event["event"] == "checkpoint" and life is not None:
            life.saved.append(self._world.now)
        is_odd = event["event"] == "checkpoint-failed" and "digest" in event["reason"]
        if is_odd and name not in self._world.checks.spoilt:
            self._world.checks.violated(7, f"{name[-6:]} copies another state than it has: {event['reason']}")

    def died(self, host: SimulatedHost) -> None:
        """A life was ended."""
        life = self._lives.pop(host.name, None)
        if (torn := self._torn.get(host.name)) is not None and torn.at < self._world.now:
            del self._torn[host.name]  # it has gone on
        if life is None or life.host is not host:
            return
        self._is_seldom(host, life)
        if self._is_reliable(host) and life.saved:
            self._floors[host.name] = self._led_on(life, life.saved[-1])

    def _led_on(self, life: _Life, saved_at: float) -> list[int]:
        """Versions, by shard, to which a checkpoint of then and what was committed since lead."""
        late = self._world.now - LATE_S
        return [
            max((seen.version for seen in steps if seen.at <= late and from_s < saved_at), default=0)
            for steps, from_s in zip(life.steps, life.from_s, strict=True)
        ]

    def flipped(self, name: PeerId, path: str) -> None:
        """A bit of a file is another one; nobody was told of it yet."""
        life = self._lives.get(name)
        if life is None or len(life.saved) < 2 or not self._is_reliable(life.host):
            return
        if path.startswith(self.newest(life.host.disk)) and self._intact(life.host.disk):
            self._torn[name] = _Torn(path, self._led_on(life, life.saved[-2]), self._world.now)

    def _is_reliable(self, host: SimulatedHost) -> bool:
        return self._is_well(host) and not host.disk.is_unreliable

    def _is_well(self, host: SimulatedHost) -> bool:
        """Now, and for a while; whatever became of the disk before."""
        checks, now = self._world.checks, self._world.now
        is_held_up = host.is_paused or now - max(host.workers.held_up_at, host.disk.healed_at) < LATE_S
        is_odd = host.name in checks.damaged | checks.forgetful | checks.spoilt
        return not is_held_up and not is_odd and not self._world.computers[host.name].is_full

    def _is_seldom(self, host: SimulatedHost, life: _Life) -> None:
        """Rule 9. The first and the last, and the one of who has joined, come at any time."""
        count = len(life.saved)
        most = 3 + (host.now() - life.began) / max(self._least_s, 0.2)
        if count > most and not host.disk.is_unreliable and host.name not in self._world.checks.damaged:
            self._world.checks.violated(9, f"{host.name[-6:]} has written {count} checkpoints, {most:.0f} are allowed")

    # -- 10: what is left ----------------------------------------------------------------------------------------------

    def merged(self, peer: Peer, shard: ShardId, base: Digest) -> None:
        """Somebody has made what follows ``base``, and signs it."""
        log, name = peer.machine.core.chains[shard].log, peer.config.peer
        cut = self._world.network.blocked.keys()
        is_sole = peer.state.integrity.is_unsigned(shard) and not any(
            other.peer.state.heads[shard] == base and not other.is_paused and not {(name, there), (there, name)} & cut
            for there, other in self._world.hosts.items()
            if there != name
        )
        if is_sole or (log and self.is_altered([log[-1]])):
            self._altered.add((shard, base, name))

    def is_altered(self, log: Iterable[CommitHeader]) -> bool:
        """Whether one of its last commits stands on what the commit's owner's memory had altered."""
        return any((header.shard, header.parent, header.owner) in self._altered for header in [*log][-LATELY:])

    def given(self, payload: Digest, base: Digest) -> None:
        """A learner contributes this."""
        self._bases[payload].add(base)

    def committed(self, header: CommitHeader) -> None:
        """Somebody has made a commit."""
        self._commits.add(header.payload)
        makers = (header.owner, *(part.collector for part in header.parts))
        for part, maker in enumerate(makers, start=-1):
            needed = audited_payloads(header, part)
            self._merged_by[maker, header.shard].update(dict.fromkeys(needed, header.version))
        for contributor in header.contributors:
            giver = peer_of(contributor.learner)
            payload, merged = Digest(contributor.payload.hex()), self._merged[header.shard]
            merged[payload] = {giver, *merged.get(payload, ({giver}, 0.0))[0]}, self._world.now

    def ended(self, peer: Peer, host: SimulatedHost) -> None:
        """A peer has ended in order, and saved."""
        life, checks, name = self._lives.pop(host.name, None), self._world.checks, host.name
        if life is None:
            return
        self._is_seldom(host, life)
        heads = tuple(None if chain.head is None else chain.head.id for chain in peer.machine.core.chains)
        if self._is_well(host) and None not in heads and peer.machine.core.is_current:
            found = checkpoint.load(self._folder, shown(host.disk))
            left = heads if found is None else tuple(saved.state.head.id for saved in found.shards)
            is_fresh = any(steps and steps[-1].at > self._world.now - LATE_S for steps in life.steps)
            if found is None or (left != heads and not is_fresh):  # what came while it saved others have
                checks.violated(8, f"{name[-6:]} ended in order and left another state than its last")
        long_ago = self._world.now - UNNEEDED_S
        if name in checks.spoilt:
            return  # it may be on a fork of its own, where what comes waits for a head that it never reaches (M2b)
        chains, proofs = peer.machine.core.chains, peer.machine.barred_owners.proofs.values()
        wrong = [audited_payloads(proof.header, proof.part) for proof in proofs if isinstance(proof, WrongMerge)]
        for merged, shelf, chain in zip(self._merged, peer.driver.payload_cache.shards, chains, strict=True):
            least = (0 if chain.head is None else chain.head.version) - 2 * AUDITED_VERSIONS
            own = {payload for payload, version in self._merged_by[name, chain.shard].items() if version > least}
            shown_to_auditors = own.union(*wrong)
            for digest in sorted(shelf.payloads.keys() - self._commits - shown_to_auditors):
                givers, at = merged.get(digest, ({name}, 0.0))
                here_since = life.kept.get(shelf.payloads[digest], self._world.now)  # the very same may come again
                is_apart = self._bases[digest].isdisjoint((*chain.log_ids, *chain.ancestry))
                if name in givers or is_apart:  # it may wait for a head that this peer never reaches (M2b)
                    continue
                if max(at, here_since, host.workers.held_up_at) < long_ago:
                    checks.violated(10, f"{name[-6:]} keeps what {min(givers)[-6:]} gave, merged at {at:.1f} s")
                    return
        held = [
            held
            for shelf in peer.driver.payload_cache.shards
            for held in shelf.payloads.values()
            if held.path is not None
        ]
        left_over = peer.driver.store.places.allocated_bytes() - sum(place_bytes(one.size) for one in held)
        if left_over > MOST_LEFT_OVER * place_bytes(1) and self._is_reliable(host):
            checks.violated(10, f"{name[-6:]} keeps {left_over} bytes on its disk for payloads that it has dropped")

    def late(self, name: PeerId, learner: SimulatedLearner) -> set[int]:
        """Shards of which this peer's learner may not have taken the last version yet, when its peer ends."""
        life, long_ago = self._lives.get(name), self._world.now - UNNEEDED_S
        shards = range(len(self._world.layout.shards))
        if life is None or max(learner.hears_since, life.host.workers.held_up_at) > long_ago:
            return {*shards}
        return {shard for shard in shards if not life.steps[shard] or life.steps[shard][-1].at > long_ago}


def shown(disk: SimulatedDisk) -> SimulatedDisk:
    """The same files, and no faults: looking is no operation of the peer."""
    shown = SimulatedDisk(Random(0))
    shown.files = disk.files
    return shown
