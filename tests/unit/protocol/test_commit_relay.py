"""How commits reach all peers (M6) of docs/protocol.md: over a tree, with news across it."""

from __future__ import annotations

import pytest
from stage import SHARD, A, B, C, Stage, commit_on, digest, genesis, head_of, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.commit_relay import ANNOUNCEMENTS, FAN_OUT, announcement_ring, children, tree_order
from p2pdiloco.protocol.ids import PeerId, ShardId

MANY = tuple(PeerId(f"p{i:02}") for i in range(40))


def weighted(peers: tuple[PeerId, ...], weight: float = 1.0) -> tuple[tuple[PeerId, float], ...]:
    """The peers with equal weights."""
    return tuple((peer, weight) for peer in sorted(peers))


@pytest.mark.parametrize("count", [1, 2, 5, 6, 21, 22, 40])
def test_everybody_gets_a_commit_once(count: int) -> None:
    """M6b."""
    order = tree_order(digest("commit"), MANY[0], weighted(MANY[:count]))
    got = [peer for place in range(count) for peer in children(order, place)]
    assert order[0] == MANY[0]
    assert sorted(got) == sorted(MANY[1:count])
    assert all(len(children(order, place)) <= FAN_OUT for place in range(count))


def is_under(order: tuple[PeerId, ...], place: int, top: int) -> bool:
    """Whether the way of a commit from its owner to ``place`` leads over ``top``."""
    while place > top:
        place = (place - 1) // FAN_OUT
    return place == top


@pytest.mark.parametrize(("count", "sizes"), [(6, {5}), (8, {7}), (21, {20}), (22, {4, 17}), (40, {4, 35})])
def test_peers_are_told_by_others_of_their_level(count: int, sizes: set[int]) -> None:
    """M6b: those should have the commit by then; and few of them are behind the same peer that keeps it to itself."""
    order = tree_order(digest("commit"), MANY[0], weighted(MANY[:count]))
    rings = {announcement_ring(digest("commit"), order, place) for place in range(1, count)}
    assert {len(ring) for ring in rings} == sizes
    assert sorted(peer for ring in rings for peer in ring) == sorted(order[1:])
    assert all(list(ring) != [peer for peer in order if peer in ring] for ring in rings)
    cut = {order[place] for place in range(1, count) if is_under(order, place, 1)}
    unaware = [
        peer
        for ring in rings
        for at, peer in enumerate(ring)
        if peer in cut and cut.issuperset((ring[-ANNOUNCEMENTS:] + ring)[at : at + ANNOUNCEMENTS])
    ]
    assert len(unaware) <= len(cut) / 2


def test_two_commits_have_two_trees_and_strong_peers_come_first() -> None:
    """M6b: nobody passes on all commits, and one with a slow line passes on few."""
    peers = tuple((peer, 1.0 + (i % 2)) for i, peer in enumerate(MANY))
    one, other = (tree_order(digest(name), MANY[0], peers) for name in ("one", "other"))
    assert one != other
    strong = {peer for peer, weight in peers if weight > 1.0}
    assert set(one[1:21]) == set(other[1:21]) == strong


def test_slow_lines_come_last_even_where_most_are_slow() -> None:
    """M6b: a quarter of the peers is enough to pass commits on."""
    peers = tuple((peer, 1.0 if i % 4 == 0 else 0.5) for i, peer in enumerate(MANY))
    order = tree_order(digest("one"), MANY[1], peers)
    assert {weight for peer, weight in peers if peer in order[1:11]} == {1.0}


def test_a_peer_asks_for_weight_by_its_line() -> None:
    """O1c: so it owns half or twice as often, and passes on few commits or more."""
    stage = Stage(B, C, has_learner=False)
    weights = []
    for speed in ("usual", "slow", "fast"):
        stage.tell(ev.LineChanged(speed))
        (beat, *_) = sent(stage.wait(1.1), msg.Heartbeat)
        weights.append((beat[1].weight, dict(stage.machine.core.participation.candidates())[A]))
    assert weights == [(1.0, 1.0), (0.5, 0.5), (2.0, 2.0)]


def in_tree(*, place: int) -> tuple[Stage, msg.CommitHeader, tuple[PeerId, ...]]:
    """This peer among 42, a commit of b's in whose tree it has this place, and the tree."""
    stage = Stage(B, *MANY, has_learner=False)
    stage.wait(1.0)  # the last one is live, too
    for trial in range(1000):
        header = stage.commit(tokens(B, 0, 40), payload=digest(f"payload {trial}"))
        order = tree_order(head_of(header).id, B, weighted((A, B, *MANY)))
        if order.index(A) == place:
            return stage, header, order
    raise AssertionError("no such commit")


@pytest.mark.parametrize("place", [1, 9, 10, 30])
def test_who_has_applied_a_commit_passes_it_on(place: int) -> None:
    """M6b: to at most four, and its head to two others."""
    stage, header, order = in_tree(place=place)
    effects = stage.take(header)
    below = order[4 * place + 1 : 4 * place + 5]
    inner = [peer for peer in below if order.index(peer) <= 10]
    leaves = sorted(set(below) - set(inner))
    assert [to for to, _ in sent(effects, msg.Commit)] == inner + leaves
    told = [(to, heads.heads) for to, heads in sent(effects, msg.Heads)]
    ring = announcement_ring(head_of(header).id, order, place)
    at = ring.index(A) + 1
    assert {to for to, _ in told} == {*(ring + ring)[at : at + ANNOUNCEMENTS]} - set(children(order, place))
    assert all(heads == (head_of(header),) for _, heads in told)


def test_who_reports_a_commit_does_not_get_it_again() -> None:
    """M6b."""
    stage, header, order = in_tree(place=2)
    for peer in order[9:12]:
        stage.hear(peer, msg.Heads((head_of(header),), 0))
    assert [to for to, _ in sent(stage.take(header), msg.Commit)] == [order[12]]


def test_what_was_missed_is_not_passed_on_but_for_the_last() -> None:
    """M6b: others have had it for long."""
    stage, first, order = in_tree(place=3)
    stage.hear(B, msg.Commit(commit_on(head_of(first), tokens(B, 40, 80))))
    assert sent(stage.take(first), msg.Commit) == []
    stage, first, order = in_tree(place=3)
    assert len(sent(stage.take(first), msg.Commit)) == len(children(order, 3)) == FAN_OUT


def test_five_peers_hear_nothing_but_the_commit() -> None:
    """M6b."""
    stage = Stage(B, *MANY[:3], has_learner=False)
    effects = stage.take(stage.commit(tokens(B, 0, 40)))
    assert not sent(effects, msg.Commit)
    assert not sent(effects, msg.Heads)


def test_a_newcomer_has_no_place() -> None:
    """M6b: it could not apply the commit."""
    stage = Stage(B, has_learner=False)
    for peer in MANY[:8]:
        stage.meet(peer, phase="joining", is_participating=False)
    assert not sent(stage.take(stage.commit(tokens(B, 0, 40))), msg.Commit)


def test_who_lacks_a_state_passes_nothing_on() -> None:
    """M6b: it has no place in the others' trees, so its commits would come twice."""
    shards = ((SHARD,), (ShardId(1),))
    stage = Stage(B, *MANY, is_founder=False, has_learner=False, fragments=shards)
    [state, _] = genesis(stage.config)
    for peer in (B, *MANY):
        stage.hear(peer, msg.Heads((state.head,), 0))
    stage.work(stage.tell(ev.Fetched(B, state, ())), ef.Install)
    effects = stage.take(commit_on(stage.head(), tokens(B, 0, 40)))
    assert stage.head().version == 1
    assert not stage.machine.core.is_current
    assert not sent(effects, msg.Commit)
