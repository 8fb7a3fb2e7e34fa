"""``p2pdiloco plan``: Estimate the bandwidth and memory that a run needs of each peer, and which H, tau and
codec fit the link. Nothing is created.
"""

from __future__ import annotations

import argparse

import msgspec

from p2pdiloco.cli.errors import REPAIR, CommandError
from p2pdiloco.codec.bitrate_ladder import LADDER
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.node.run_creation import find_run, read_config
from p2pdiloco.planner import Advice, Forecast, PeerLines, Wanted, advise, make_plan
from p2pdiloco.protocol.manifest import RunConfig, make_layout
from p2pdiloco.protocol.manifest_defaults import LARGEST_MEASURED, expected_gap
from p2pdiloco.training.models import outline
from p2pdiloco.training.parameters import embedding_names, trainable

OTHERS = {"e3m0": 0.44}
"""Bytes a parameter of codecs that are on no ladder (docs/results.md)."""
NAMED_SHARE = 0.02
"""Share of a peer's bytes from which on people are told what commits spend on learners' names."""


async def run(arguments: argparse.Namespace) -> int:
    """Print what is to be expected."""
    config = read_config(find_run(arguments.config))
    wanted = wanted_of(config, arguments.peers, arguments.step_time)
    if arguments.up is None:
        raise CommandError("--up none: a plan needs a rate, such as 20mbit", REPAIR)
    down = arguments.up if arguments.down is None else arguments.down
    lines = PeerLines(up_bits_per_s=8 * arguments.up, down_bits_per_s=8 * down, round_trip_s=arguments.rtt / 1000)
    plan = make_plan(wanted, lines)
    advice = advise(wanted, lines)
    if arguments.json:
        print(msgspec.json.encode({"plan": plan, "advice": advice}).decode())
    else:
        gap = expected_gap(config, plan.parameters, arguments.peers)
        print("\n".join([*describe(plan, advice, wanted), *([] if gap is None else describe_loss(gap, wanted))]))
    return 0


def wanted_of(config: RunConfig, peers: int, step_s: float) -> Wanted:
    """The run of a configuration, with the model's own fragments.

    Raises:
        CommandError: its model's sizes are not in the configuration.
    """
    if config.model.folder:
        raise CommandError("model.folder: this model's sizes are in a folder; plan needs model.config instead", REPAIR)
    model = outline(config.model)
    embeddings, schedule = embedding_names(model), config.schedule
    named = [(name, p.shape, name in embeddings) for name, p in trainable(model)]
    tensors = tensor_specs(named, schedule.fragments)
    layout = make_layout(tensors, schedule.fragments, schedule.max_shard, config.outer.merge)
    return Wanted(
        fragments=tuple(tuple(layout.shards[s].elements for s in shards) for shards in layout.fragments),
        peers=peers,
        step_s=step_s,
        steps=config.inner.steps,
        sync_every=schedule.sync_every,
        overlap=schedule.overlap,
        up_bytes=_bytes(config.codec.up, config.codec.up_step),
        down_bytes=_bytes(config.codec.down, config.codec.down_step),
        heartbeat_s=schedule.heartbeat_s,
        together=schedule.together,
    )


def _bytes(codec: str, step: float | None) -> float:
    """A parameter; "auto" is planned as int4, with which it begins on a line that nobody knows."""
    name = "int4" if codec == "auto" else codec
    if name == "int4" and step is not None and step >= 1.0:
        name = "int4-coarse"
    sizes: dict[str, float] = {**OTHERS, **{rung.name: rung.bytes_per_parameter for rung in LADDER}}
    return sizes[name]


def describe_loss(gap: float, wanted: Wanted) -> list[str]:
    """Return what training apart costs, as lines for people, by ``gap`` in per cent (``expected_gap``) and the law of
    token efficiency that ``python -m benchmarks.quality.crowds`` fits."""
    excess = 0.67 * ((wanted.peers - 1) / 7) ** 0.81 * ((wanted.sync_every + 2) / 8) ** 0.56
    share = 1 / (1 + excess * (min(wanted.parameters, LARGEST_MEASURED) / 1e5) ** -0.23)
    return [
        f"loss              roughly {gap:.2g} % above one machine with the same tokens, which needs "
        f"{100 * share:.0f} % of them for it: {wanted.peers} learners are worth {wanted.peers * share:.2g} machines",
        "                  (measured: 16 learners, 64 of a small model, 4,000 steps, 2.8M parameters; "
        "else extrapolated)",
    ]


def describe(plan: Forecast, advice: Advice | None, wanted: Wanted) -> list[str]:
    """Return the plan as lines for people."""
    others = [f"{name} {100 * share:.3g} %" for name, share in plan.utilisation.items() if name != "p2pdiloco"]
    late = "on time" if plan.is_on_time else f"late: tau is {wanted.overlap}"
    found = [
        f"parameters        {plan.parameters:,} in {len(wanted.fragments)} fragments, {wanted.peers} peers",
        f"a peer's line     {plan.bytes_a_step / 1e3:,.0f} kB a step each way, {plan.mean_bits_per_s / 1e6:,.3g} "
        f"Mbit/s, {plan.bytes_a_day / 1e9:,.3g} GB a day",
        f"an exchange       {plan.exchange_s:.3g} s, {plan.staleness_steps:.2g} steps ({late})",
        f"rounds kept        {100 * plan.rounds_kept:.0f} %; learners never wait for the line",
        f"others here       {'; '.join(others)} of the time computed",
        f"rounds in the run  {plan.rounds} of each fragment",
        f"memory            {plan.node_bytes / 1e9:.3g} GB node, {plan.learner_bytes / 1e9:.3g} GB learner and "
        "activations",
        f"to join           {plan.join_s:,.0f} s on a quiet swarm",
    ]
    if plan.named_share >= NAMED_SHARE:
        found.append(
            f"names             each commit names {wanted.peers:,} learners: {100 * plan.named_share:.2g} % of the "
            f"bytes, and {100 * plan.checking_share:.2g} % of a core for their signatures"
        )
        if any(len(shards) > 1 for shards in wanted.fragments):
            found.append("                  (a larger schedule.max_shard makes fewer commits, and an exchange longer)")
    if advice is None:
        return [*found, "advice            nothing fits this line: a faster one, longer steps, or fewer peers"]
    return [
        *found,
        f"advice            codec {advice.codec}, H = {advice.sync_every}, tau = {advice.overlap}: "
        f"every round is kept, on time; {advice.rounds} rounds of each fragment",
    ]
