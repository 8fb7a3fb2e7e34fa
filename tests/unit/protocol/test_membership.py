"""Rules L of docs/protocol.md: who is live, and who participates."""

from __future__ import annotations

from typing import get_args

import msgspec
from stage import BEAT, A, B, C, Stage, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import P0, P1, P2, base_config, make_world


def test_a_peer_is_live_only_while_it_is_connected() -> None:
    """L1a."""
    stage = Stage()
    stage.hear(B, BEAT)
    stage.wait(0.2)
    assert stage.machine.view.live == (), "who is not connected is not listened to"
    stage.meet(B)
    assert stage.machine.view.live == (B,)
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert stage.machine.view.live == ()


def test_a_peer_is_live_only_while_it_is_heard_in_time() -> None:
    """L1a: three heartbeats of 0.5 s on a link without delay; a connection alone is not enough."""
    stage = Stage(C)
    stage.tell(ev.PeerConnected(B))
    stage.wait(0.2)
    assert stage.machine.view.live == (C,)
    stage.meet(B)
    silent_since = stage.now
    beat = stage.beats.pop(B)
    while stage.machine.view.live == (B, C):
        stage.wait(0.05)
    assert 1.4 < stage.now - silent_since < 2.1
    stage.beats[B] = beat
    stage.wait(0.2)
    assert stage.machine.view.live == (B, C)


def test_a_peer_is_live_only_while_it_echoes_what_we_sent() -> None:
    """L1a: it beats on and on, and its echo stands still."""
    stage = Stage(C)
    stage.meet(B)
    deaf = stage.beats.pop(B)
    heard_until = stage.now
    for i in range(60):
        stage.wait(0.1)
        held_s = stage.now - heard_until + deaf.echo_held_s
        stage.hear(B, msgspec.structs.replace(deaf, sequence=deaf.sequence + i + 1, echo_held_s=held_s))
    assert stage.machine.view.live == (C,)


def test_a_one_way_cut_is_a_cut_for_both() -> None:
    """L1a: only what p0 says to p1 is lost, and both lose the other; p2 keeps both."""
    peers = {name: PeerSetting() for name in (P0, P1, P2)}
    world = make_world(base_config(), peers, None)
    world.network.setting = msgspec.structs.replace(world.network.setting, patience_s=1e9)
    world.run_until(3.0)
    live = {p.name: p.machine.view.live for p in world.living()}
    assert live == {P0: (P1, P2), P1: (P0, P2), P2: (P0, P1)}
    world.network.cut([(P0, P1)])
    world.run_until(7.0)
    live = {p.name: p.machine.view.live for p in world.living()}
    assert live == {P0: (P2,), P1: (P2,), P2: (P0, P1)}


def says_after(stage: Stage, beat: msg.Heartbeat, heard_at: float, wait_s: float) -> list[ef.Effect]:
    """B beats again after a while, and has not heard us since ``heard_at``."""
    effects = stage.wait(wait_s)
    sequence = stage.machine.core.membership.peers[B].sequence + 1
    again = msgspec.structs.replace(beat, sequence=sequence, echo_held_s=stage.now - heard_at)
    return effects + stage.hear(B, again)


def test_who_is_heard_and_does_not_hear_is_hung_up_on() -> None:
    """L4a: when its heartbeats have said so for two intervals."""
    stage = Stage(C)
    stage.meet(B)
    beat, heard_at, hung_up = stage.beats.pop(B), stage.now, []
    for _ in range(12):
        effects = says_after(stage, beat, heard_at, 0.5)
        hung_up += [(stage.now - heard_at, effect.peer) for effect in only(effects, ef.HangUp)]
    assert [peer for _, peer in hung_up] == [B] * len(hung_up)
    assert 3.0 <= hung_up[0][0] <= 4.0
    assert len(hung_up) <= 3, "while it is not ended, no more often than every two intervals"
    stage.tell(ev.PeerDisconnected(B, "hung up"))
    stage.meet(B)
    assert not only(stage.wait(6.0), ef.HangUp), "the new connection carries both ways"


def test_who_is_silent_or_goes_on_after_a_stop_is_not_hung_up_on() -> None:
    """L4a: its first heartbeats may be older than what it has read since."""
    stage = Stage(C)
    stage.meet(B)
    beat, heard_at = stage.beats.pop(B), stage.now
    assert not only(stage.wait(20.0), ef.HangUp), "it says nothing"
    effects = [effect for _ in range(20) for effect in says_after(stage, beat, heard_at, 0.01)]
    stage.beats[B] = msgspec.structs.replace(beat, sequence=stage.machine.core.membership.peers[B].sequence)
    effects += stage.wait(0.2)
    del stage.beats[B]
    effects += says_after(stage, beat, stage.now, 0.3)
    assert not only(effects, ef.HangUp)
    assert stage.machine.view.live == (B, C)


def test_the_directory_never_makes_a_peer_live_and_never_dead() -> None:
    """L1a: nothing that the machine is told, and nothing that it remembers, is from the directory."""
    events = {kind.__name__ for kind in get_args(ev.Event)}
    about_peers = {kind for kind in events if "Peer" in kind or "Directory" in kind or "Known" in kind}
    assert about_peers == {"PeerConnected", "PeerDisconnected"}


def test_live_is_not_participating() -> None:
    """L3a: a peer participates while its learner trains."""
    stage = Stage(B, C)
    stage.says(C, phase="following", is_participating=False)
    view = stage.machine.view
    assert (view.live, view.participants) == ((B, C), (A, B))
    stage.tell(ev.LearnerStopped("killed"))
    assert stage.machine.view.participants == (B,)


def test_a_peer_participates_while_its_learner_holds_unmerged_tokens() -> None:
    """L3a: a paused learner does until the last of them is merged, and says so."""
    stage = Stage(B, weight=0.0)
    stage.train(2)
    effects = stage.tell(ev.LearnerPaused(stage.steps, stage.tokens))
    beats = sent(effects, msg.Heartbeat)
    assert [(beat.phase, beat.is_participating) for _, beat in beats] == [("finished", True)]
    assert A in stage.machine.view.participants
    stage.work(effects + stage.wait(0.1), ef.Snapshot, ef.Encode)
    effects = stage.take(stage.commit(tokens(A, 0, 20))) + stage.wait(0.6)
    assert A not in stage.machine.view.participants
    assert not sent(effects, msg.Heartbeat)[-1][1].is_participating
    assert not only(effects, ef.Merge)
