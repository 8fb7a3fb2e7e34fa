"""Rules R of docs/protocol.md: who reaches whom, and who owns then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from stage import A, B, C, D, Stage, sent, tokens, with_payload

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.connectivity import LATELY, SETTLING_BEATS, TOLERANCE, Connectivity, listed
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.protocol.ownership import ranked_owners

E, F = PeerId("e"), PeerId("f")
SETTLED_S = 5.0
"""More than eight heartbeats."""


def hearing(*peers: PeerId) -> bytes:
    """A list."""
    return listed(map(fingerprint, peers))


def owners(stage: Stage) -> tuple[PeerId, ...]:
    """In the order in which they may merge the next version."""
    head = stage.head()
    return ranked_owners(stage.config.run, 0, head.version + 1, stage.machine.core.membership.owners.candidates)


def fit(stage: Stage) -> set[PeerId]:
    """Who may own, and does not come after others."""
    candidates = stage.machine.core.membership.owners.candidates
    return {peer for peer, weight in candidates if weight > 1e-6}


def met(lists: dict[PeerId, tuple[PeerId, ...]], **changes: Any) -> Stage:
    """A stage long after all have said whom they hear."""
    stage = Stage(*lists, **changes)
    for peer, heard in lists.items():
        stage.says(peer, hears=hearing(*heard))
    stage.wait(SETTLED_S)
    return stage


STAR = {B: (A,), C: (A,), D: (A,)}
"""a is public, the others are behind routers."""
LEAF = {B: (A, C, D, E)}
"""b is, and a behind a router."""


# -- lists -------------------------------------------------------------------------------------------------------------


def test_heartbeats_tell_whom_their_sender_hears_until_that_is_seen() -> None:
    """R1a: and again when it has changed."""
    stage = Stage(B, has_learner=False)

    def told(effects: list[ef.Effect]) -> list[bytes | None]:
        return [beat.hears for to, beat in sent(effects, msg.Heartbeat) if to == B]

    stage.wait(1.0)
    assert told(stage.meet(C) + stage.wait(0.6)) == [hearing(B, C)]
    assert told(stage.wait(2.1)) == [None] * 4
    assert told(stage.tell(ev.PeerDisconnected(C, "gone")) + stage.wait(0.6)) == [hearing(B)]
    del stage.beats[B]
    assert told(stage.meet(D) + stage.wait(1.1))[-2:] == [hearing(B, D)] * 2, "until b echoes it"


def test_who_tells_nothing_is_taken_to_hear_everybody() -> None:
    """R1a."""
    stage = met({B: (A, C), C: (A, B)})
    stage.meet(D)
    stage.says(B, hears=hearing(A, C, D))
    stage.says(C, hears=hearing(A, B, D))
    stage.wait(SETTLED_S)
    assert fit(stage) == {A, B, C, D}


def test_a_broken_list_names_nobody_more() -> None:
    """R1a."""
    stage = Stage(B)
    stage.says(B, hears=hearing(A)[:3])
    stage.says(B, hears=hearing(A, C) + b"\x01")
    assert stage.machine.core.membership.connectivity.lists[B] == {fingerprint(A), fingerprint(C)}


# -- who owns ----------------------------------------------------------------------------------------------------------


def test_who_reaches_all_owns_before_those_who_do_not() -> None:
    """R3a: the public peer of a star, seen from there and from behind a router."""
    assert fit(met(STAR)) == {A}
    leaf = met(LEAF)
    assert fit(leaf) == {B}
    assert owners(leaf) == (B, A), "who does not reach all comes later, and not never"


def test_where_all_reach_all_all_own() -> None:
    """R3a."""
    assert fit(met({B: (A, C, D), C: (A, B, D), D: (A, B, C)})) == {A, B, C, D}


def test_nobodys_word_for_itself_counts() -> None:
    """R2a: b says that it hears all; c and d, whom this peer hears, say that it does not."""
    stage = met({B: (A, C, D), C: (A, D), D: (A, C)})
    assert fit(stage) == {A}
    assert stage.machine.core.membership.connectivity.best == {fingerprint(A)}


def test_a_minority_cannot_make_each_peer_the_only_owner_in_its_own_eyes() -> None:
    """R2a: d and e tell each peer that they hear it alone. All would else merge by themselves, and none with others."""
    honest = (A, B, C)
    for me in honest:
        rest = {peer: tuple(one for one in (*honest, D, E) if one != peer) for peer in honest if peer != me}
        stage = met({**rest, D: (me,), E: (me,)}, peer=me, has_learner=False)
        assert stage.machine.core.membership.connectivity.best == {fingerprint(peer) for peer in honest}


def test_who_is_live_hears_this_peer() -> None:
    """R2a: its list may be of before."""
    stage = met({B: (A,)})
    stage.says(B, hears=b"")
    stage.wait(SETTLED_S)
    assert fit(stage) == {A, B}


def with_versions(stage: Stage, count: int, *givers: PeerId) -> None:
    """So many versions, to each of which these give ten tokens."""
    for version in range(count):
        given = [with_payload(tokens(p, 10 * version, 10 * version + 10), f"{p} {version}") for p in sorted(givers)]
        stage.take(stage.commit(*given))


def test_who_is_heard_by_others_only_counts_if_it_gave_of_late() -> None:
    """R2b: b names two whom nobody knows. In a young run it is believed, later only for those whose tokens came."""
    liar = {B: (A, C, E, F), C: (A, B)}
    stage = met(liar, has_learner=False)
    assert fit(stage) == {B}
    with_versions(stage, LATELY, B, C)
    stage.wait(SETTLED_S)
    assert fit(stage) == {A, B, C}
    last = 10 * LATELY
    given = [with_payload(tokens(p, last, last + 10), f"{p} last") for p in (B, C)]
    stage.take(stage.commit(*given, with_payload(tokens(E, 0, 10), "e gave")))
    stage.wait(SETTLED_S)
    assert fit(stage) == {B}
    with_versions_after(stage, LATELY)
    assert fit(stage) == {A, B, C}, "what it gave is long ago"


def test_a_name_that_has_no_place_here_makes_nobody_better_connected() -> None:
    """R2b: whoever holds an invite can certify any number of keys, and they have nothing to do but to be named."""
    stage = met({B: (A, C, E, F), C: (A, B)}, has_learner=False)
    stage.tell(ev.Admitted(frozenset(map(fingerprint, (A, B, C)))))
    stage.wait(SETTLED_S)
    assert fit(stage) == {A, B, C}
    stage.tell(ev.Admitted(frozenset(map(fingerprint, (A, B, C, E)))))
    stage.wait(SETTLED_S)
    assert fit(stage) == {B}


def with_versions_after(stage: Stage, count: int) -> None:
    """More versions, of b's and c's."""
    for version in range(LATELY + 1, LATELY + 1 + count):
        given = [with_payload(tokens(p, 10 * version, 10 * version + 10), f"{p} {version}") for p in (B, C)]
        stage.take(stage.commit(*given))
    stage.wait(SETTLED_S)


def test_the_best_connected_hear_each_other() -> None:
    """R3a: b and c each reach as many as the other, and not each other: one of them owns, with whoever hears it."""
    stage = met({B: (A, D, E, F), C: (A, D, E, F), F: (A, B, C)}, has_learner=False)
    assert stage.machine.core.membership.connectivity.best == {min(fingerprint(B), fingerprint(C))}


def test_in_a_large_swarm_a_sixteenth_fewer_are_as_good() -> None:
    """R3a: one member that only a few hear does not make these the only owners."""
    names = [PeerId(f"p{i:02}") for i in range(2 * TOLERANCE)]
    me, others, shy = names[0], names[1:-1], names[-1]
    connectedness = Connectivity(me)
    for peer in others:
        friends = [shy] if peer == others[0] else []
        connectedness.update_list(peer, hearing(*(p for p in names[:-1] if p != peer), *friends))
    connectedness.update_own_list(others, 0)
    connectedness.judge(0.0, tuple(others), tuple((peer, 1.0) for peer in (me, *others)), 1.0)
    assert fingerprint(shy) in connectedness.indirect
    assert not connectedness.tiers
    few = Connectivity(me)
    for peer in others[:3]:
        friends = [shy] if peer == others[0] else []
        few.update_list(peer, hearing(*(p for p in (me, *others[:3]) if p != peer), *friends))
    few.update_own_list(others[:3], 0)
    few.judge(0.0, tuple(others[:3]), tuple((peer, 1.0) for peer in (me, *others[:3])), 1.0)
    assert set(few.tiers) == {me, *others[1:3]}, "in a small one they are"


def test_who_was_among_the_best_stays_it_for_a_while() -> None:
    """R3b: a peer that some have lost and others not makes no difference at once."""
    stage = met({B: (A, C), C: (A, B)})
    assert fit(stage) == {A, B, C}
    stage.says(B, hears=hearing(A, C, D))
    settling_s = SETTLING_BEATS * stage.config.heartbeat_s
    stage.wait(settling_s - 1.0)
    assert fit(stage) == {A, B, C}
    stage.wait(2.0)
    assert fit(stage) == {B}
    stage.says(B, hears=hearing(A, C))
    assert fit(stage) == {A, B, C}, "who is again, is at once"


def test_after_the_best_come_those_who_hear_one_of_them() -> None:
    """R3a: the best are indirect, so what this peer has goes to b or d, who hear two of them each; c and this peer
    itself come last."""
    indirect = tuple(map(PeerId, "wxyz"))
    stage = met({B: (A, *indirect[:2]), C: (A,), D: (A, *indirect[2:])}, has_learner=False)
    connectedness = stage.machine.core.membership.connectivity
    assert connectedness.best == set(map(fingerprint, indirect))
    assert connectedness.tiers == {A: 2, B: 1, C: 2, D: 1}


def best_of(me: PeerId, live: list[PeerId], lists: dict[PeerId, frozenset[PeerId]]) -> frozenset[PeerId]:
    """R2a and R3a as their sentences say them, pair by pair, for peers without indirect ones."""
    everybody = sorted([me, *live], key=fingerprint)

    def hears(x: PeerId, y: PeerId) -> bool:
        return x not in lists or y in lists[x] or (y == me and x != me)

    def is_doubted(x: PeerId) -> bool:
        told = [lists[z] for z in everybody if z in lists and z != x]
        return x not in lists or 2 * sum(x not in prints for prints in told) >= len(told) + 1

    def reaches(x: PeerId, y: PeerId) -> bool:
        return hears(x, y) and (hears(y, x) or not is_doubted(x))

    apart = {x: {y for y in everybody if y != x and not reaches(x, y)} for x in everybody}
    fewest = min(map(len, apart.values()))
    most = fewest + (len(live) - fewest) // TOLERANCE
    best: list[PeerId] = []
    for x in sorted(everybody, key=lambda x: len(apart[x])):
        if len(apart[x]) <= most and apart[x].isdisjoint(best):
            best.append(x)
    return frozenset(best)


@pytest.mark.parametrize("seed", range(40))
def test_counts_say_what_all_pairs_say(seed: int) -> None:
    """R2a, R3a: while peers come, go, say goodbye, lose each other, and send no list, or one that lacks this peer."""
    drawn, names = random.Random(seed), [PeerId(f"p{i}") for i in range(2 + seed)]
    me, *others = names
    judged, lists, live = Connectivity(me), dict[PeerId, frozenset[PeerId]](), list[PeerId]()
    judged.admitted = frozenset()
    for step in range(30):
        for peer in drawn.sample(others, min(3, len(others))):
            match drawn.randrange(7):
                case 0 if peer in live:
                    live.remove(peer)
                case 2 if peer in live:
                    live.remove(peer)
                    heard = lists.pop(peer, frozenset())
                    assert judged.on_goodbye(peer) == set(map(fingerprint, {peer, *heard}))
                    judged.forget(peer)
                    lists = {other: prints - {peer} for other, prints in lists.items()}
                case 1 if peer not in live:
                    judged.forget(peer)
                    lists.pop(peer, None)
                case _:
                    live += [] if peer in live else [peer]
                    lacking = drawn.sample(names, min(len(names), drawn.choice([0, 0, 0, 1, 2])))
                    lists[peer] = frozenset(names) - {peer, *lacking}
                    judged.update_list(peer, hearing(*lists[peer]))
        lists[me] = frozenset(live)
        judged.update_own_list(live, step)
        judged.judge(float(step), tuple(live), tuple((peer, 1.0) for peer in sorted([me, *live])), 0.0)
        assert judged.best == frozenset(map(fingerprint, best_of(me, live, lists))), step
