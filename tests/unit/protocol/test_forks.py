"""Why forks are safe (F) in docs/protocol.md."""

from __future__ import annotations

from itertools import permutations, product

from stage import SHARD, A, B, Stage, bare, commit_on, digest, head_of, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import Chain, is_heavier
from p2pdiloco.protocol.messages import Head
from tests.machine_sim.network import LinkQuality
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import P0, P1, P2, base_config, make_world


def test_a_chain_is_a_value_that_its_head_determines() -> None:
    """F1a: who took every commit and who downloaded the last state know the same of it, and go on alike."""
    stage = Stage(B)
    for i in range(5):
        stage.take(stage.commit(tokens(B, 10 * i, 10 * i + 10)))
    walked = stage.machine.core.chains[SHARD]
    loaded = Chain(SHARD, stage.config.log_length)
    loaded.replace(walked.state())
    assert loaded.state() == walked.state()
    for header in (commit_on(stage.head(), tokens(B, 50, 60)), commit_on(stage.head(), tokens(B, 40, 60))):
        assert loaded.problem(header) == walked.problem(header)


def test_peers_compare_heads_and_never_histories() -> None:
    """F1a: a commit's name covers its parent and all else that it says, so that equal heads are equal chains."""
    start = Head(SHARD, 3, digest("start"), 100)
    header = commit_on(start, tokens(B, 0, 40))
    others = [
        commit_on(Head(SHARD, 3, digest("another start"), 100), tokens(B, 0, 40)),
        commit_on(start, tokens(B, 0, 40), result=digest("another result")),
        commit_on(start, tokens(A, 0, 40)),
        commit_on(start, tokens(B, 0, 40), owner=A),
    ]
    assert len({msg.commit_id(h) for h in (header, *others)}) == 5


def test_the_fork_rule_is_a_total_order_over_heads() -> None:
    """F1a: of any two exactly one wins, and it does not matter in which order heads are heard of."""
    heads = [Head(SHARD, 1, digest(str(i)), 10 * (i % 3)) for i in range(6)]
    for a, b in product(heads, heads):
        assert is_heavier(a, b) + is_heavier(b, a) == (a != b)
    ends = set()
    for order in permutations(heads):
        best = order[0]
        for head in order[1:]:
            best = head if is_heavier(head, best) else best
        ends.add(best)
    assert len(ends) == 1


def test_any_set_of_connected_peers_ends_with_the_maximum() -> None:
    """F1a: two sides go on by themselves; when the cut is over everybody has the heavier chain."""
    world = make_world(base_config(), {name: PeerSetting() for name in (P0, P1, P2)}, None)
    world.run_until(3.0)
    directions = [(P0, P1), (P1, P0), (P0, P2), (P2, P0)]
    world.network.cut(directions)
    world.run_until(8.0)
    world.conditions.is_frozen = True
    world.run_until(12.0)
    heads = {p.name: p.machine.core.head(SHARD) for p in world.living()}
    assert heads[P1] == heads[P2] != heads[P0]
    heaviest = heads[P1] if is_heavier(heads[P1], heads[P0]) else heads[P0]
    world.network.mend(directions)
    world.run_until(17.0)
    ends = {p.machine.core.head(SHARD) for p in world.living()}
    assert len(ends) == 1
    end = ends.pop()
    assert end == heaviest or is_heavier(end, heaviest)


def forked() -> tuple[Stage, Head, msg.Contribution]:
    """Our learner's contribution was merged by a chain that a heavier one, without it, has just replaced."""
    stage = Stage(B, weight=0.0)
    start = stage.head()
    [(_, given)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(given.contributor))
    winner = head_of(commit_on(start, tokens(B, 0, 400)))
    stage.work(stage.bring(ev.ShardState(winner, 4, ()), B))
    assert stage.head() == winner
    return stage, winner, given


def test_what_a_losing_chain_had_merged_is_contributed_again() -> None:
    """F3a: the next contribution begins where the winning chain has merged to, which is 0."""
    stage, winner, given = forked()
    assert stage.machine.view.unmerged_tokens() == 40
    [(_, again)] = sent(stage.give(), msg.Contribution)
    assert (again.base, bare(again.contributor)) == (winner, tokens(A, 0, 80))
    [apply] = only(stage.hear(B, msg.Commit(stage.commit(again.contributor))), ef.Apply)
    assert apply.settled == (again.payload,), "and not the old one besides"
    assert given.payload != again.payload


def test_marks_make_sure_that_no_range_is_merged_twice_on_the_winning_chain() -> None:
    """F3a: neither by a contribution nor by a commit."""
    stage, winner, _ = forked()
    [(_, again)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(again.contributor))
    for contributor in (again.contributor, tokens(A, 0, 40), tokens(A, 40, 80), tokens(A, 79, 120)):
        assert not only(stage.hear(B, msg.Commit(stage.commit(contributor))), ef.Apply)
    assert stage.head().tokens == winner.tokens + 80


def test_a_takeover_deadline_that_is_too_short_makes_a_fork_and_loses_or_repeats_no_token() -> None:
    """F3a: a takeover after a hundredth of a second, on links of a tenth."""
    config = base_config(takeover_floor_s=0.01, takeover_ceiling_s=0.01, grace_share=0.0)
    world = make_world(config, {name: PeerSetting(step_s=0.1) for name in (P0, P1, P2)}, None)
    for pair in permutations((P0, P1, P2), 2):
        world.network.slow_down(pair, LinkQuality(delay_s=0.1))
    world.run_until(20.0)
    world.conditions.is_frozen = True
    world.run_until(30.0)
    assert world.checks.forks > 3
    assert not world.checks.violations
    for process in world.living():
        assert process.learner is not None
        assert process.learner.tokens_lost == 0
        world.checks.conserved(process.learner, [value for value in process.states.values if value is not None])
    assert not world.checks.violations
