"""Loss of honest peers beside members that lie about their training: real peers, some with changed code.

    python -m benchmarks.hostile.members                                  # one of four, every attack: ten minutes
    python -m benchmarks.hostile.members --peers 8 --liars 2 --attacks tokens+flip

A row is an attack: the held-out loss that the honest founder measures, the loss of the run without liars at the same
number of merged honest tokens, the honest tokens that were merged before the run's token budget was spent, and how many
liars the logs of honest peers name. The lies are those of ``tests.chaos.byzantine``; an attack that no liar has sent is
an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import bench
from p2pdiloco.demo.local_swarm import Member, Swarm
from tests.chaos.changed_peers import SENT_LIES, launch

ATTACKS = ("tokens+flip", "tokens+noise", "flip", "noise", "tokens", "merges")
NAMED_FOR = ("point away", "has put other values")
"""What a log says of a liar's contributions, and of its merges."""
STEP_TOKENS = 8 * 64
"""Tokens of a learner's step: samples times context."""
CONFIG = """
name = "members"
seed = 1
model = {{ width = 64, depth = 2, heads = 2, context = 64 }}
data = {{ kind = "stdlib" }}
inner = {{ tokens = {tokens}, steps = {steps}, batch = 8, warmup = 20 }}
schedule = {{ max_shard = 16384 }}
outer = {{ {outer} }}
evaluation = {{ every = 2, samples = 64 }}
"""
COLUMNS: tuple[bench.Column, ...] = (
    ("liars", "liars", "d"),
    ("peers", "peers", "d"),
    ("held-out loss", "held_out", ".3f"),
    ("without the liars", "held_out_honest", ".3f"),
    ("ratio", "ratio", ".3f"),
    ("worst ratio", "worst_ratio", ".3f"),
    ("honest tokens at the end", "honest_share", ".0%"),
    ("liars named", "named", "d"),
)


class Look(NamedTuple):
    """One measurement of the held-out loss."""

    tokens: int
    """Tokens of honest peers that were merged until then."""
    loss: float


class Outcome(NamedTuple):
    """The result of one run."""

    looks: list[Look]
    """In the order of their versions."""
    honest_tokens: int
    """Tokens of honest peers that were merged until the end."""
    named: int
    """Liars that an honest peer's log names: most others disagree with what they contribute, or their merges are
    wrong."""

    def loss_at(self, tokens: int) -> float:
        """The held-out loss when so many honest tokens were merged, between two looks by a straight line."""
        at = bisect_right([look.tokens for look in self.looks], tokens)
        if at in (0, len(self.looks)):
            return self.looks[min(at, len(self.looks) - 1)].loss
        before, after = self.looks[at - 1], self.looks[at]
        return before.loss + (after.loss - before.loss) * (tokens - before.tokens) / (after.tokens - before.tokens)


def run(out: Path, options: argparse.Namespace, honest: int, lies: Sequence[str]) -> Outcome:
    """``honest`` peers beside one liar for each of ``lies``.

    Raises:
        RuntimeError: a peer failed, a lie was never sent, or the run did not end in time.
    """
    budget = options.steps * options.peers * STEP_TOKENS
    if not lies:
        budget = options.steps * honest * STEP_TOKENS
    config = out / "run.toml"
    out.mkdir(parents=True)
    text = CONFIG.format(
        tokens=budget, steps=20 * options.steps, outer=f'merge = "{options.merge}"' if options.merge else ""
    )
    config.write_text(text)
    swarm = Swarm(out)
    try:
        address = swarm.start_bootstrap()
        founder = swarm.start_founder("A", config, address)
        members = [founder, *(swarm.join(chr(ord("B") + i), address) for i in range(honest - 1))]
        liars = [launch(swarm, f"liar-{i}", ["join", address], lies=names) for i, names in enumerate(lies)]
        deadline = time.monotonic() + options.timeout_s
        while founder.is_running:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run was not over after {options.timeout_s:g} s, see {out}")
            time.sleep(0.5)
            for member in members:
                member.refresh()
        founder.refresh()
        for member in members:
            member.process.wait(60.0)
            member.refresh()
            if member.status:
                raise RuntimeError(f"{member.name} ended with status {member.status}, see {member.log_path}")
        for liar, names in zip(liars, lies, strict=True):
            sent = (liar.folder / SENT_LIES).read_text().split() if (liar.folder / SENT_LIES).exists() else []
            if missing := set(names.split("+")).difference(sent):
                raise RuntimeError(f"{liar.name} never sent {', '.join(sorted(missing))}, see {liar.log_path}")
    finally:
        swarm.stop()
        swarm.kill_leftovers()
    for liar in liars:
        liar.refresh()
    told = [text for member in members for text in member.view.warnings if any(why in text for why in NAMED_FOR)]
    named = sum(any(liar.view.peer in text for text in told) for liar in liars)
    return outcome(founder, {member.view.peer for member in members}, named)


def outcome(founder: Member, honest: set[str], named: int) -> Outcome:
    """Read a run's outcome from the founder's event log."""
    merged, by_version = 0, {0: 0}
    for commit in sorted(founder.view.commits, key=lambda line: line["version"]):
        merged += sum(n for learner, n in commit["contributors"].items() if learner.rpartition("/")[0] in honest)
        by_version[commit["version"]] = merged
    measured = {version: loss for _, loss, version in founder.view.held_out}
    looks = [Look(by_version[version], loss) for version, loss in sorted(measured.items()) if version in by_version]
    return Outcome(looks, merged, named)


def main() -> None:
    """The command line."""
    parser = bench.parser(__doc__, rows="attack", has_plot=False, has_keep=True)
    parser.add_argument("--peers", type=int, default=4, help="number of peers, liars included")
    parser.add_argument("--liars", type=int, default=1, help="number of liars")
    parser.add_argument("--steps", type=int, default=300, help="inner steps per learner that the token budget allows")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), help="attacks; join several lies by +")
    parser.add_argument("--merge", choices=["rda", "direct"], help="merge rule (default: that of a run of this size)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="time limit of one run")
    options = parser.parse_args()
    honest = options.peers - options.liars
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        alone = run(folder / "honest", options, honest, ())
        rows = {}
        for attack in options.attacks:
            found = run(folder / attack, options, honest, [attack] * options.liars)
            last = found.looks[-1]
            reached = [look for look in found.looks if look.tokens <= alone.looks[-1].tokens]
            same = alone.loss_at(last.tokens)
            rows[attack] = {
                "liars": options.liars,
                "peers": options.peers,
                "held_out": last.loss,
                "held_out_honest": same,
                "ratio": last.loss / same,
                "worst_ratio": max(look.loss / alone.loss_at(look.tokens) for look in reached),
                "named": found.named,
                "honest_share": found.honest_tokens / (options.steps * honest * STEP_TOKENS),
            }
            bench.write(options, "hostile/members", {"attack": attack}, rows[attack])
            print(json.dumps({"attack": attack, **rows[attack]}), flush=True)
    print(bench.table("attack", COLUMNS, rows))


if __name__ == "__main__":
    main()
