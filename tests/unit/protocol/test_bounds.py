"""Rule B of docs/protocol.md: everything that a peer keeps is bounded."""

from __future__ import annotations

import pytest
from stage import SHARD, A, B, C, Stage, commit_on, digest, head_of, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import CommitHeader, Head

LENGTH = 4


def test_logs_are_bounded_by_the_log_length() -> None:
    """B1a: what follows the last four commits' parent can be sent, and no more."""
    stage = Stage(B, log_length=LENGTH)
    headers: list[CommitHeader] = []
    for i in range(3 * LENGTH):
        headers.append(stage.commit(tokens(B, 10 * i, 10 * i + 10)))
        stage.take(headers[-1])
    answer = sent(stage.hear(B, msg.CommitsRequest(SHARD, headers[-LENGTH].parent)), msg.Commit)
    assert [commit.header for _, commit in answer] == headers[-LENGTH:]
    assert sent(stage.hear(B, msg.CommitsRequest(SHARD, headers[-LENGTH - 1].parent)), msg.FetchAdvised)
    assert len(stage.machine.payloads(SHARD)) == LENGTH


def test_ledgers_are_bounded_by_the_log_length() -> None:
    """B1a: of many contributions the payloads of the last four are kept."""
    stage = Stage(B, weight=0.0, log_length=LENGTH)
    given = []
    for _ in range(3 * LENGTH):
        [(_, contribution)] = sent(stage.give(), msg.Contribution)
        given.append(contribution.payload)
        stage.take(stage.commit(contribution.contributor))
    assert stage.machine.payloads(SHARD) & set(given) == set(given[-LENGTH:])


@pytest.mark.parametrize("has_state", [True, False])
def test_waiting_commits_are_bounded_by_the_log_length(has_state: bool) -> None:
    """B1c: of a long chain whose beginning is missing, a newcomer keeps the newest, and others what comes next."""
    stage = Stage(B, log_length=LENGTH, is_founder=has_state, has_learner=has_state)
    genesis = genesis_head(stage.config.run, SHARD, digest("state 0"))
    head = head_of(commit_on(genesis, tokens(B, 0, 10), result=digest("a result")))
    headers: list[CommitHeader] = []
    for i in range(1, 3 * LENGTH):
        headers.append(commit_on(head, tokens(B, 10 * i, 10 * i + 10)))
        head = head_of(headers[-1])
        stage.hear(B, msg.Commit(headers[-1]))
    kept = headers[: LENGTH - 1] if has_state else headers[-LENGTH:]  # from version 2 to the log's length
    assert stage.machine.payloads(SHARD) == {header.payload for header in kept}


def test_commits_of_far_parents_displace_none_that_come_next() -> None:
    """B1c: any member can sign such commits, with the largest of payloads."""
    stage = Stage(B, log_length=LENGTH)
    following = [commit_on(head_of(stage.commit(tokens(B, 0, stop))), tokens(B, stop, 90)) for stop in (10, 20)]
    for i in range(3 * LENGTH):
        parent = Head(SHARD, 2 + i % LENGTH, digest(f"made up {i}"), 1000 + i)
        stage.hear(B, msg.Commit(commit_on(parent, tokens(B, 100, 110))))
        stage.hear(B, msg.Commit(commit_on(Head(SHARD, 2**50, parent.id, 10**6), tokens(B, 100, 110))))
        if i == LENGTH:
            for header in following:
                stage.hear(B, msg.Commit(header))
    assert {header.payload for header in following} <= stage.machine.payloads(SHARD)
    assert len(stage.machine.payloads(SHARD)) <= LENGTH


def test_early_contributions_are_bounded_by_the_number_of_connected_peers() -> None:
    """M2b: one for each, the newest."""
    stage = Stage(B, C, has_learner=False)
    latest = {}
    for i in range(20):
        for peer in (B, C):
            ahead = Head(SHARD, 5 + i, digest(f"head {i}"), 1000 + i)
            latest[peer] = stage.contribution(peer, 0, 40 + 10 * i, base=ahead)
            stage.hear(peer, latest[peer])
    stage.hear(PeerId("unconnected"), stage.contribution(PeerId("unconnected"), base=Head(SHARD, 9, digest("x"), 9999)))
    assert stage.machine.payloads(SHARD) == {contribution.payload for contribution in latest.values()}
    stage.tell(ev.PeerDisconnected(C, "gone"))
    assert stage.machine.payloads(SHARD) == {latest[B].payload}


def test_of_a_logs_payloads_the_youngest_that_fit_are_kept() -> None:
    """B1f: ten bytes each; the head's in any case, and those of no known size weigh nothing."""
    stage = Stage(B, log_length=LENGTH)
    log = []
    for i in range(LENGTH):
        log.append(stage.commit(tokens(B, 10 * i, 10 * i + 10)))
        stage.take(log[-1])
    sizes = {header.payload: 10 for header in log}
    for most_bytes, kept in ((40, 4), (39, 3), (10, 1), (0, 1)):
        held = stage.machine.payloads(SHARD, lambda payload: sizes.get(payload, 0), most_bytes)
        assert held == {header.payload for header in log[-kept:]}, most_bytes
    assert stage.machine.payloads(SHARD, lambda _: 0, 0) == stage.machine.payloads(SHARD) == set(sizes)


def test_of_own_contributions_the_youngest_that_fit_are_kept() -> None:
    """B1f: ten bytes each; what is on offer in any case, those of no known size weigh nothing, and without a bound all
    are kept."""
    stage = Stage(B, weight=0.0, log_length=LENGTH)
    given = []
    for _ in range(LENGTH):
        [(_, contribution)] = sent(stage.give(), msg.Contribution)
        given.append(contribution.payload)
        if len(given) < LENGTH:
            stage.take(stage.commit(contribution.contributor))
    sizes = dict.fromkeys(given, 10)
    for own_bytes, kept in ((40.0, 4), (39.0, 3), (20.0, 2), (10.0, 1), (0.0, 1)):
        held = stage.machine.payloads(SHARD, lambda payload: sizes.get(payload, 0), 0, own_bytes)
        assert held & set(given) == set(given[-kept:]), own_bytes
    assert set(given) <= stage.machine.payloads(SHARD, lambda _: 0, 0, 0.0)
    assert set(given) <= stage.machine.payloads(SHARD, lambda _: 1 << 40, 0)


def test_the_driver_may_drop_every_payload_that_payloads_does_not_name() -> None:
    """B1f: whatever an effect needs was named when the event before it had been handled."""
    stage = Stage(B, C, owners="abc")
    handle = stage.machine.handle
    held: set[str] = set()

    def checked(event: ev.Event, now: float) -> list[ef.Effect]:
        held.update(brought_by(event))
        effects = handle(event, now)
        for effect in effects:
            assert needed_by(effect) <= held, effect
        held.intersection_update(stage.machine.payloads(SHARD))
        return effects

    stage.machine.handle = checked  # type: ignore[method-assign]
    for sync_round in range(6):
        stage.work(stage.train(4))
        at = 40 * sync_round
        for peer in (B, C):
            stage.work(stage.offer(peer, at, at + 40))
        stage.work(stage.wait(8.0))
        stage.hear(B, msg.CommitsRequest(SHARD, stage.machine.core.chains[SHARD].log[0].parent))
    assert stage.head().version >= 6
    assert len(held) <= 3 * stage.config.log_length


def brought_by(event: ev.Event) -> set[str]:
    """Payloads that the driver holds from now on."""
    match event:
        case ev.Encoded():
            return {event.contributor.payload.hex()}
        case ev.Merged():
            return {event.payload}
        case ev.Received(message=msg.Contribution(payload=payload)):
            return {payload}
        case ev.Received(message=msg.Commit(header=header)):
            return {header.payload}
        case _:
            return set()


def needed_by(effect: ef.Effect) -> set[str]:
    """Payloads that the driver must have now."""
    match effect:
        case ef.Merge():
            return {contribution.payload for contribution in effect.contributions}
        case ef.Apply():
            return {effect.header.payload, *effect.settled, *effect.restored}
        case ef.Install():
            return {*effect.settled, *effect.restored}
        case ef.Send(message=msg.Contribution(payload=payload)):
            return {payload} if payload else set()
        case ef.Send(message=msg.Commit(header=header)):
            return {header.payload}
        case _:
            return set()


def test_a_contribution_is_held_until_it_can_be_neither_merged_nor_undone() -> None:
    """B1f: its own learner's end frees it."""
    stage = Stage(B, owners="ba")
    assert not only(stage.give(), ef.Merge)
    assert len(stage.machine.payloads(SHARD)) == 1
    stage.tell(ev.LearnerStopped("killed"))
    assert stage.machine.payloads(SHARD) == set()
    assert A not in stage.machine.view.participants
