"""What the line of progress tells of a run's end."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.cli import status as status_command
from p2pdiloco.node.eta import EtaEstimator, presented
from p2pdiloco.observability.formatting import duration
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.wire.control_messages import PeerStatus
from p2pdiloco.wire.directory_records import RunRecord

STATUS = PeerStatus(
    run="a" * 40,
    name="story",
    peer="me",
    phase="training",
    step=0,
    total_steps=1000,
    known=1,
    live=1,
    participating=1,
    weight_averaged=1,
    version_min=0,
    version_max=0,
    heads_mark=1,
    tokens_trained=0,
    tokens_merged=0,
    tokens_per_second=0.0,
    train_loss=None,
    held_out_loss=None,
    held_out_step=0,
    bytes_up=0,
    bytes_down=0,
    blocked_s=0.0,
)


def at(step: int, trained: int = 0, merged: int = 0, of: int = 1000) -> PeerStatus:
    return msgspec.structs.replace(STATUS, step=step, tokens_trained=trained, tokens_merged=merged, total_steps=of)


def test_it_tells_percent_time_and_share() -> None:
    outlook = EtaEstimator()
    assert outlook.look(0.0, at(100, 5000, 9000)) == {"done": "10.0%"}, "a joiner's swarm is ahead of it"
    assert outlook.look(5.0, at(110, 5500, 10_000)) == {"done": "11.0%"}, "two looks are too few"
    assert outlook.look(10.0, at(120, 6000, 11_000)) == {"done": "12.0%", "left": "7 min 20 s", "my_share": "50%"}


def test_it_forgets_how_fast_the_run_was_a_while_ago() -> None:
    outlook = EtaEstimator()
    for look in range(40):
        told = outlook.look(5.0 * look, at(min(look, 20) * 10 + max(0, look - 20)))
    assert told["left"] == duration((1000 - 219) * 5.0)


def test_what_is_not_known_is_not_told() -> None:
    outlook = EtaEstimator()
    for look in range(3):
        told = outlook.look(5.0 * look, at(look, of=10**9))
    assert told == {}, "a script that has said nothing of its end"
    outlook = EtaEstimator()
    for look in range(3):
        told = outlook.look(5.0 * look, at(7))
    assert told == {"done": "0.7%"}, "it stands still"
    assert EtaEstimator().look(0.0, at(1010))["done"] == "100.0%"


def test_a_finished_run_has_no_more_steps_than_it_has_and_no_rate() -> None:
    over = msgspec.structs.replace(STATUS, step=1002, held_out_step=1001, tokens_per_second=4000.0)
    told = presented(over)
    assert (told.step, told.held_out_step, told.tokens_per_second) == (1000, 1000, 4000.0)
    for phase in ("finished", "leaving", "resting", "following"):
        assert presented(msgspec.structs.replace(over, phase=phase)).tokens_per_second == 0.0


def test_status_of_two_that_train_and_of_two_that_have_finished(capsys: pytest.CaptureFixture[str]) -> None:
    """At its end a peer takes leave of the others, and stays to serve: then none counts another one as live."""
    run, record = RunId("a" * 40), RunRecord("story", 1000)

    def told(**more: object) -> list[str]:
        both = [msgspec.structs.replace(STATUS, peer=peer, tokens_merged=1000, **more) for peer in ("ann", "bob")]
        both[0] = msgspec.structs.replace(both[0], tokens_trained=740, tokens_per_second=both[0].tokens_per_second / 2)
        both[1] = msgspec.structs.replace(both[1], tokens_trained=260)
        status_command._print_run(run, record, both)
        return capsys.readouterr().out.splitlines()

    training = told(tokens_per_second=4000.0, live=2)
    assert "2 live" in training[2]
    assert "6,000 tokens/s in all" in training[2]
    assert [line.split()[6] for line in training[4:]] == ["33.3%", "66.7%"]
    assert not any("beyond" in line for line in training)
    assert sum("500 connected peers, of at most 512" in line for line in told(connected=500)) == 1
    assert told(reward=0.25)[-2:] == ["  ann reward 0.250", "  bob reward 0.250"]
    over = told(phase="finished", live=1)
    assert "2 live" in over[2]
    assert "0 tokens/s in all" in over[2]
    assert [line.split()[6] for line in over[4:]] == ["74.0%", "26.0%"]
