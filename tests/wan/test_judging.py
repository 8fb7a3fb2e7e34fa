"""What is measured is judged: pure parts of verification, queues and kernel."""

from __future__ import annotations

import random

import pytest

from benchmarks.netbed.kernel_features import Kernel, choose_engine
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.qdisc import burst_bytes, queue_bytes
from benchmarks.netbed.report import matrix
from benchmarks.netbed.topology import parse_topology
from benchmarks.netbed.verification import down_flows, loss_check, path_checks, rate_check, up_flows

THREE = parse_topology(
    'name = "x"\n[defaults]\nup = "50mbit"\ndown = "200mbit"\n[[site]]\nname = "a"\n[[site]]\nname = "b"\n'
    '[[site]]\nname = "c"\n[[link]]\nbetween = ["a", "c"]\nloss = 0.1\n'
)


def test_a_line_is_filled_by_all_others_and_no_others_line_limits_it():
    flows, expected = up_flows(THREE, 1)
    assert expected == 50e6
    assert sum(flow.bps for flow in flows) > 1.1 * expected
    flows, expected = down_flows(THREE, 1)
    assert expected == 100e6  # all others' ways out
    assert {flow.target for flow in flows} == {1}
    check = rate_check(THREE, 1, "down", expected, 99e6)
    assert check.is_right
    assert "200 Mbit/s" in check.note


def test_what_is_lost_on_the_way_is_not_expected_to_arrive():
    assert up_flows(THREE, 0)[1] == pytest.approx(50e6 * 0.95)
    assert down_flows(THREE, 2)[1] == pytest.approx(50e6 + 45e6)


@pytest.mark.parametrize(
    ("mbit", "is_right"), [(50, True), (52.4, True), (47.6, True), (47.4, False), (52.6, False), (0, False)]
)
def test_a_rate_may_be_off_by_5_percent(mbit, is_right):
    assert rate_check(THREE, 1, "up", 50e6, mbit * 1e6).is_right == is_right


def test_a_path_without_jitter():
    def right(found: list[float], sent: int = 20) -> bool:
        return all(check.is_right for check in path_checks("a-b", 0.1, 0.0, 0.0, found, sent))

    assert right([0.104] * 20)
    assert not right([0.106] * 20)
    assert not right([0.1] * 19)
    assert not right([])
    assert right([0.1] * 19 + [0.9])  # one that came late on a busy machine


@pytest.mark.parametrize(("real", "is_right"), [(0.005, True), (0.012, False), (0.001, False)])
def test_jitter_is_judged_by_its_spread(real, is_right):
    rng = random.Random(3)
    found = [0.1 + rng.uniform(-real, real) + rng.uniform(-real, real) for _ in range(120)]
    checks = {check.kind: check for check in path_checks("a-b", 0.1, 0.005, 0.01, found, 120)}
    assert checks["jitter"].is_right == is_right
    assert checks["jitter"].measured == pytest.approx(real, rel=0.3)


def test_losses_are_judged_by_what_chance_explains():
    assert loss_check("a to b", 0.02, 10_000, 9_800).is_right
    assert loss_check("a to b", 0.02, 10_000, 9_840).is_right
    assert not loss_check("a to b", 0.02, 10_000, 9_900).is_right
    assert not loss_check("a to b", 0.02, 10_000, 10_000).is_right
    assert not loss_check("a to b", 0.02, 10_000, 0).is_right


def test_buckets_are_deep_where_fast_and_shallow_where_slow():
    assert burst_bytes(5_000_000_000) == 312_500
    assert burst_bytes(1_000_000_000) == 256 << 10
    assert burst_bytes(10_000_000) == 12_500
    assert burst_bytes(100_000) == 2 * 1514
    assert queue_bytes(1_000_000_000, 0.05) == 6_250_000
    assert queue_bytes(1_000_000_000, 0.0) == 2 << 16
    assert queue_bytes(100_000, 0.0) == 4 * 1514


def kernel(**found: bool) -> Kernel:
    base = {"tbf": True, "netem": False, "ifb": True, "tun": True, "uml": False}
    return Kernel(release="6.1", congestion_controls=("cubic",), **(base | found))


def test_netem_where_there_is_one_else_the_router():
    assert choose_engine(kernel(netem=True)) == "netem"
    assert choose_engine(kernel()) == "router"
    assert choose_engine(kernel(netem=True), "router") == "router"
    for lacking, wanted, says in (
        (kernel(tbf=False), None, "sch_tbf"),
        (kernel(), "netem", "modprobe sch_netem"),
        (kernel(tun=False), None, "/dev/net/tun"),
    ):
        with pytest.raises(TestbedError, match=says):
            choose_engine(lacking, wanted)


def test_the_matrix_marks_what_is_off():
    checks = []
    for i, site in enumerate(THREE.sites):
        checks.append(rate_check(THREE, i, "up", 50e6, 40e6 if site.name == "c" else 50e6))
        checks.append(rate_check(THREE, i, "down", 100e6, 100e6))
    for pair in ("a-b", "a-c", "b-c"):
        checks += path_checks(pair, 0.02, 0.0, 0.0, [0.0202] * 20, 20)
    lines = matrix(THREE, checks).splitlines()
    assert "40 Mbit/s (-20.0%) !" in lines[3]
    assert "!" not in lines[1]
    assert "20.2" in lines[1]
