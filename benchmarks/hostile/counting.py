"""Tokens of honest members that a token budget still holds beside a cabal of owners that declare too many: the real
``Chain``, without processes or models, in a second.

    python -m benchmarks.hostile.counting

A cabal's owner merges the contributions of the cabal and one honest one, and drops the rest, whose tokens come with
their learners' next contributions. Each liar declares as many tokens as a peer accepts. Honest owners merge all. What
most contributions of a merge disagree with has the least factor: liars agree with each other only. The budget is a
round of each member for each of the versions. A run would end once it is counted; the chain goes on here.
"""

from __future__ import annotations

import random
import statistics
from typing import Any, Final, NamedTuple

from benchmarks import bench
from p2pdiloco.protocol.chain import NO_MARK, Chain
from p2pdiloco.protocol.config import BATCH_ROOM, LEAST_FACTOR, RANGE_ROUNDS, Limits
from p2pdiloco.protocol.ids import PeerId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head

STEP_TOKENS, ROUND_STEPS = 512, 6
LIMITS: Final = Limits(
    step_tokens=BATCH_ROOM * STEP_TOKENS, round_steps=ROUND_STEPS, range_steps=RANGE_ROUNDS * ROUND_STEPS
)
NOTHING = digest_of(b"nothing")


class Case(NamedTuple):
    """A swarm."""

    members: int
    liars: int
    weight: float = 1.0
    """Weight of each liar as an owner, in weights of an honest peer."""
    is_cabal: bool = True
    """Whether liars drop contributions when they own."""
    declares_most: bool = True
    """Whether liars declare as many tokens as they can."""


CASES: Final = {
    "2 of 5": Case(5, 2),
    "2 of 5, double weight": Case(5, 2, 2.0),
    "2 of 8": Case(8, 2),
    "2 of 5, merging all": Case(5, 2, is_cabal=False),
    "2 of 5, true tokens": Case(5, 2, declares_most=False),
    "5 honest": Case(5, 0),
}


class Counted(NamedTuple):
    """The end of a run."""

    honest_counted: float
    """Honest tokens that were merged in all versions, per token that counted for the budget."""
    honest_share: float
    """Honest tokens that were merged when the budget was counted, as a multiple of the honest members' part of it."""
    versions: int
    """Versions in which the budget was counted."""


def run(case: Case, versions: int = 200, seed: int = 1) -> Counted:
    """Merge so many ``versions``."""
    draw, chain = random.Random(seed), Chain(ShardId(0), 64, limits=LIMITS)
    chain.head = Head(ShardId(0), 0, NOTHING, 0)
    peers = [PeerId(f"peer-{index}") for index in range(case.members)]
    honest = case.members - case.liars
    round_tokens = ROUND_STEPS * STEP_TOKENS
    budget, untold, merged, at_end = versions * round_tokens, [0] * case.members, 0, (0, 0)
    weights = [1.0] * honest + [case.weight] * case.liars
    while chain.head.version < versions:
        untold = [rounds + 1 for rounds in untold]
        (owner,) = draw.choices(range(case.members), weights)
        givers = set(range(case.members))
        if case.is_cabal and owner >= honest:
            givers.difference_update(draw.sample(range(honest), honest - 1))
        given = []
        for index in sorted(givers):
            is_most = index >= honest and case.declares_most
            steps = ROUND_STEPS * (RANGE_ROUNDS if is_most else min(untold[index], RANGE_ROUNDS))
            tokens = steps * STEP_TOKENS * (BATCH_ROOM if is_most else 1)
            given.append(_contributor(chain, peers[index], steps, tokens))
            merged += tokens if index < honest else 0
            untold[index] = 0
        groups = [index >= honest for index in sorted(givers)]
        most = 2 * sum(groups) > len(groups)
        factors = tuple(100 if is_liar == most else LEAST_FACTOR for is_liar in groups) if any(groups) else ()
        is_open = chain.head.tokens < case.members * budget
        _advance(chain, peers[owner], tuple(given), factors)
        if is_open:
            at_end = merged, chain.head.version
    return Counted(merged / chain.head.tokens, at_end[0] / (honest * budget), at_end[1])


def _contributor(chain: Chain, peer: PeerId, steps: int, tokens: int) -> Contributor:
    learner = learner_id(peer, "1")
    mark = chain.marks.get(learner, NO_MARK)
    return Contributor(learner, mark.tokens, mark.tokens + tokens, mark.steps, mark.steps + steps)


def _advance(chain: Chain, owner: PeerId, contributors: tuple[Contributor, ...], factors: tuple[int, ...]) -> None:
    """Make the next version."""
    assert chain.head is not None
    head, length = chain.head, min(1.0, chain.longest(contributors))
    tokens, counts = chain.count(contributors, factors)
    header = CommitHeader(
        shard=chain.shard,
        version=head.version + 1,
        parent=head.id,
        step=chain.step + ROUND_STEPS,
        owner=owner,
        contributors=contributors,
        tokens=head.tokens + tokens,
        payload=NOTHING,
        result=NOTHING,
        record=chain.record_after(head.version + 1, contributors, length),
        length=length,
        counts=counts,
        factors=factors,
        longest=chain.stated_longest(contributors),
    )
    assert chain.problem(header) is None, chain.problem(header)
    chain.advance(header, digest_of(str(header.version).encode()))


COLUMNS: tuple[bench.Column, ...] = (
    ("honest per counted token", "honest_counted", ".3f"),
    ("share of the honest budget", "honest_share", ".1%"),
    ("versions", "versions", ".0f"),
)


def main() -> None:
    """The command line."""
    parser = bench.parser(__doc__, rows="case", has_plot=False)
    parser.add_argument("--versions", type=int, default=200, help="that the token budget is for")
    parser.add_argument("--seeds", type=int, default=10, help="draws of the owners; figures are their means")
    options = parser.parse_args()
    rows = dict[str, dict[str, Any]]()
    for name, case in CASES.items():
        found = [run(case, options.versions, seed)._asdict() for seed in range(options.seeds)]
        rows[name] = {key: statistics.fmean(one[key] for one in found) for key in found[0]}
        bench.write(options, "hostile/counting", {"case": name}, rows[name])
    print(bench.table("case", COLUMNS, rows))


if __name__ == "__main__":
    main()
