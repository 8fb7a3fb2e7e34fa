"""What a run would ask of lines, memory and money; beside what was measured over throttled lines."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmarks.scale import plans
from p2pdiloco.cli.main import main
from p2pdiloco.cli.plan import describe, describe_loss
from p2pdiloco.planner import CODECS, PeerLines, Wanted, advise, commit_turns, exchange_s, make_plan
from p2pdiloco.protocol.commit_relay import children

SMALL = Wanted(
    fragments=((500_000, 500_000),) * 24,
    peers=4,
    step_s=1.0,
    steps=2400,
    sync_every=24,
    overlap=2,
    up_bytes=0.43,
    down_bytes=0.43,
)
FAST = PeerLines(up_bits_per_s=1e9, down_bits_per_s=1e9, round_trip_s=0.04)


@pytest.mark.parametrize("run", plans.RUNS, ids=lambda run: run.name)
def test_bytes_and_utilisation_are_near_those_measured_over_throttled_lines(run: plans.Measured) -> None:
    """docs/results.md, "Utilization": where all rounds were kept."""
    row = plans.compared(run)
    assert abs(row["bytes_error"]) <= plans.ALLOWED
    assert abs(row["utilisation_error"]) <= plans.ALLOWED
    assert row["rounds_kept"] == 1.0


def test_a_fast_line_keeps_all_rounds_on_time() -> None:
    plan = make_plan(SMALL, FAST)
    assert plan.is_on_time
    assert plan.rounds_kept == 1.0
    assert plan.rounds == 100
    assert plan.exchange_s > 0.06
    advice = advise(SMALL, FAST)
    assert advice is not None
    assert (advice.codec, advice.sync_every, advice.overlap) == ("int4", 24, 2)


def test_a_slow_line_costs_rounds_and_the_advice_gets_them_back() -> None:
    slow = PeerLines(up_bits_per_s=1e6, down_bits_per_s=1e7, round_trip_s=0.04)
    plan = make_plan(SMALL, slow)
    assert plan.rounds_kept < 1.0
    assert not plan.is_on_time
    advice = advise(SMALL, slow)
    assert advice is not None
    assert advice.sync_every > SMALL.sync_every
    size = dict(CODECS)[advice.codec]
    taken = msgspec.structs.replace(
        SMALL, sync_every=advice.sync_every, overlap=advice.overlap, up_bytes=size, down_bytes=size
    )
    better = make_plan(taken, slow)
    assert (better.rounds_kept, better.rounds) == (1.0, advice.rounds)
    assert advise(SMALL, PeerLines(up_bits_per_s=1e3, down_bits_per_s=1e3)) is None


def test_a_fragment_of_one_shard_is_sent_to_all_by_one_owner() -> None:
    alone = msgspec.structs.replace(SMALL, peers=64, fragments=((1_000_000,),) * 24)
    spread = msgspec.structs.replace(SMALL, peers=64, fragments=((15_625,) * 64,) * 24)
    near = msgspec.structs.replace(FAST, round_trip_s=0.0)
    assert exchange_s(alone, near) > 20 * exchange_s(spread, near)


@pytest.mark.parametrize(("members", "groups"), [(2, 1), (5, 1), (6, 1), (40, 1), (32, 2), (30, 8), (33, 32)])
def test_a_commit_takes_as_many_turns_as_in_the_trees_that_peers_compute(members: int, groups: int) -> None:
    lasts = []
    entered = {0: (0, 0)}
    for group in range(groups):
        entries = children((*range(groups),), group)
        here = {0: entered[group]}
        for place in range(members):
            turns, hops = here[place]
            sent = [*(() if place else (("group", one) for one in entries)), *children((*range(members),), place)]
            for turn, one in enumerate(sent, start=turns + 1):
                if isinstance(one, tuple):
                    entered[one[1]] = (turn, hops + 1)
                else:
                    here[one] = (turn, hops + 1)
        assert len(here) == members
        lasts.append(max(here.values()))
    assert len(entered) == groups
    assert commit_turns(members, groups) == max(lasts)


def test_a_large_run_is_planned_as_it_works() -> None:
    """In groups, whose merges and commits take little longer than those of one; and commits name all learners."""
    home = PeerLines(up_bits_per_s=50e6, down_bits_per_s=300e6, round_trip_s=0.1)
    found = {
        peers: make_plan(msgspec.structs.replace(SMALL, peers=peers, step_s=2.0), home) for peers in (5, 48, 64, 1024)
    }
    assert found[1024].exchange_s < 3 * found[64].exchange_s < 6 * found[48].exchange_s
    assert found[48].is_on_time
    names = 180 * (1024 - 64) * 48 / 24
    assert found[1024].bytes_a_step - found[64].bytes_a_step == pytest.approx(names, rel=0.2)
    together = msgspec.structs.replace(SMALL, peers=1024, step_s=2.0, together=4096)
    assert make_plan(together, home).exchange_s > found[1024].exchange_s


def test_what_a_large_run_spends_on_names_is_said_and_larger_shards_make_it_less() -> None:
    """Four commits become one: it names as many learners, for four times the values."""
    home = PeerLines(up_bits_per_s=50e6, down_bits_per_s=300e6, round_trip_s=0.1)
    many = msgspec.structs.replace(SMALL, peers=1024, step_s=10.0, fragments=((2_000_000,) * 4,) * 24)
    few = msgspec.structs.replace(many, fragments=((8_000_000,),) * 24)
    before, after = make_plan(many, home), make_plan(few, home)
    assert before.named_share == pytest.approx(4 * after.named_share, rel=0.2)
    assert before.checking_share == pytest.approx(4 * after.checking_share)
    assert before.checking_share == pytest.approx(96 * 1024 * 140e-6 / 240)
    told = "\n".join(describe(before, None, many))
    assert "each commit names 1,024 learners: 9" in told
    assert "a larger schedule.max_shard" in told
    assert "a larger schedule.max_shard" not in "\n".join(describe(after, None, few)), "fragments are whole already"
    small = msgspec.structs.replace(many, peers=16)
    assert "each commit names" not in "\n".join(describe(make_plan(small, home), None, small))


def test_the_command_says_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "stdlib-tiny", "--peers", "4", "--up", "1mbit", "--step-time", "1"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "rounds kept" in told
    assert "4 learners are worth 3" in told
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["parameters"] > 100_000
    assert found["advice"]["sync_every"] >= 6


def test_what_training_apart_costs_is_said_with_how_far_it_was_measured() -> None:
    """At the law's reference, by hand, and far beyond it."""
    at_reference = Wanted(**msgspec.structs.asdict(SMALL) | {"fragments": ((100_000,),), "peers": 8, "sync_every": 6})
    loss, measured = describe_loss(7.7, at_reference)
    assert "roughly 7.7 % above one machine with the same tokens, which needs 60 % of them" in loss
    assert loss.endswith("8 learners are worth 4.8 machines")
    assert "4,000 steps" in measured
    assert "else extrapolated" in measured
    (crowd, _) = describe_loss(60.0, msgspec.structs.replace(at_reference, peers=1024))
    assert crowd.endswith("1024 learners are worth 26 machines")


@pytest.mark.parametrize(
    ("words", "told"),
    [(["stdlib-tiny", "--up", "none"], "needs a rate"), (["lora", "--up", "1mbit"], "model.folder")],
)
def test_what_cannot_be_planned_is_said(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words, "--peers", "4", "--step-time", "1"]) == 2
    assert told in capsys.readouterr().err
