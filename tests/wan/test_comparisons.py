"""The comparisons' pure parts: formula, ratio of the links, figures, pace; and that nothing is left of a killed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench
from benchmarks.netbed.namespaces import TestbedError, listed, need_root, processes_in
from benchmarks.wan import figures, formula, ratio, sites, task, utilisation
from benchmarks.wan.pace import COMPUTE_SHARE, Pace, backward_end, forward_end

ROOT = Path(__file__).parents[2]


def test_the_formula_gives_the_published_simulators_rates() -> None:
    """decoupled-diloco's family: 5B parameters, a step of 1 s, 8 learners, 95 %: 196 Gbit/s for bf16 data parallel."""
    run = formula.Run(5e9, 8, 1.0, bytes_per_parameter=2.0)
    rate = formula.least_rate(run, 0.95, system="ddp") * formula.PAYLOAD_SHARE
    assert rate == pytest.approx(196e9, rel=0.02)


def test_fragments_need_a_two_hundredth_of_data_parallels_rate() -> None:
    """int4 of half a byte, H = P = 24, tau = 2, one way: 0.83 Gbit/s and less."""
    run = formula.Run(5e9, 8, 1.0, 24, 24, 2, bytes_per_parameter=0.5)
    ours = formula.least_rate(run, 0.95, system="p2pdiloco")
    theirs = formula.least_rate(run._replace(bytes_per_parameter=2.0), 0.95, system="ddp")
    assert theirs / ours > 100
    assert formula.sustained_share(run, formula.Link(ours)) >= 0.95


def test_a_slower_line_carries_fewer_turns_and_a_longer_path_makes_them_late() -> None:
    run = formula.Run(3.3e6, 4, 0.5, 24, 24, 2, bytes_per_parameter=0.43)
    shares = [formula.sustained_share(run, formula.Link(rate)) for rate in (2e5, 5e5, 1e6, 1e7)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1.0
    assert formula.is_on_time(run, formula.Link(1e7, 0.06))
    assert not formula.is_on_time(run, formula.Link(1e7, 0.7))


def test_our_links_are_as_badly_off_as_the_papers() -> None:
    least, most = ratio.ratios(ratio.regions())
    assert least == pytest.approx(24)
    assert most == pytest.approx(60)
    step_s = 0.4
    slowest = min(site.up_bps for site in ratio.regions().sites) * ratio.scale(task.PARAMETERS, step_s)
    seconds = ratio.wanted_bps(task.PARAMETERS, 4, step_s) / slowest
    assert seconds == pytest.approx(most)


def test_the_model_has_as_many_parameters_as_the_ratio_says() -> None:
    model = task.build_model(task.MODEL, seed=0)
    assert sum(p.numel() for p in model.parameters()) == task.PARAMETERS


def test_time_to_a_loss_is_between_two_snapshots() -> None:
    curve = [(10.0, 4.0), (20.0, 3.0), (30.0, 2.0)]
    assert figures.time_to(2.5, curve) == pytest.approx(25.0)
    assert figures.time_to(4.5, curve) == 10.0
    assert figures.time_to(1.0, curve) is None


def test_a_table_has_dashes_for_what_was_not_measured() -> None:
    table = bench.table("a", (("b", "x", ".1f"), ("c", "y", "s")), {"row": {"x": 1.25, "y": None}})
    assert table.splitlines()[-1] == "| row | 1.2 | - |"


def test_a_paced_step_takes_its_time_layer_by_layer() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model = nn.Sequential(*layers)
    pace, step_s = Pace(layers, 0.3), 0.3
    seen: list[float] = []
    last = layers[0].weight
    last.register_post_accumulate_grad_hook(lambda _: seen.append(time.monotonic()))
    began = pace.begin()
    value = model(torch.ones(1, 4)).sum()
    assert time.monotonic() - began >= COMPUTE_SHARE / 3 * step_s
    value.backward()
    assert pace.end() - began >= step_s
    assert seen[0] - began >= COMPUTE_SHARE * step_s - 0.01
    assert [forward_end(i, 3) for i in range(3)] == sorted(forward_end(i, 3) for i in range(3))
    assert backward_end(2, 3) < backward_end(0, 3) == pytest.approx(COMPUTE_SHARE)
    assert pace.steps == 1


def test_every_measured_cell_has_a_prediction() -> None:
    for cell in utilisation.MEASURED:
        told = utilisation.predicted(cell, 0.5)
        assert 0.0 < told["predicted_rounds"] <= 1.0


def _can_make_namespaces() -> bool:
    try:
        need_root()
    except TestbedError:
        return False
    return Path("/dev/net/tun").exists()


@pytest.mark.skipif(not _can_make_namespaces(), reason="needs root, pyroute2 and /dev/net/tun")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_killed_comparison(number: signal.Signals) -> None:
    """By itself after SIGTERM; after SIGKILL the workers die at once, and ``down`` (as ``clean`` and the next start do)
    removes the rest. ``clean`` itself would take the testbeds of others along."""
    name = f"wan-kill-{number:d}"
    script = (
        "import time\nfrom benchmarks.wan import sites\nsites.on_sigterm()\n"
        f"toml = sites.topology_toml({name!r}, [('10mbit', '10mbit')] * 2, {{(0, 1): 10}})\n"
        "with sites.network(toml, is_verified=False) as made:\n"
        "    from pathlib import Path\n    made.set_verified(True)\n"
        "    config = dict(system='ddp', step_s=0.1, snapshot_every=0, bucket_mb=4, gradients='float32')\n"
        "    with sites.Series(made, [config] * 2, Path('/tmp') / made.topology.name) as series:\n"
        "        series.go(10**6, 1e6)\n        print('up', flush=True)\n        time.sleep(100)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        prefix = f"p2pbed-{name}--"
        names = listed(prefix)
        assert names
        assert processes_in(names)
        os.kill(program.pid, number)
        program.wait(60)
        if number == signal.SIGKILL:
            sites.testbed.down(name)
        assert not listed(prefix)
        assert not processes_in(names)
    finally:
        program.kill()
        program.communicate()
        sites.testbed.down(name)
