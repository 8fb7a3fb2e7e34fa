"""Which payloads a node keeps: those that its machine may need, and of the logs of commits as many as memory allows.

Rules of this file:
1. What is being merged, applied or fetched is kept whatever it weighs, and so are own contributions: their
   rule is exactness.
2. Payloads of commits in the logs serve peers that lag. Those furthest behind their shard's head go first; who asks for
   one that is gone is advised to fetch the state, as if the log had been shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.identifiers import Digest
from p2pdiloco.protocol.machine import Machine

LOG_BYTES = 256 << 20
LOG_BYTES_PER_PARAMETER = 2
"""The larger of the two: all 32 versions of a small run, the last four or five of a large one in int4. A state has 8
bytes a parameter, so fetching it is not dear compared with many commits."""


def needed(machine: Machine, sizes: Mapping[Digest, int], parameters: int) -> set[Digest]:
    """Payloads to keep; ``sizes`` of those that are here."""
    limit = max(LOG_BYTES, LOG_BYTES_PER_PARAMETER * parameters)
    kept = machine.merging.payloads() | machine.adopting.payloads()
    for ledger in machine.contributing.ledgers:
        kept.update(edge.payload for edge in ledger.edges)
    return kept | newest(machine.core.chains, sizes, limit)


def newest(chains: Sequence[Chain], sizes: Mapping[Digest, int], limit: int) -> set[Digest]:
    """Payloads of the logs, youngest first over all shards, as long as they have at most ``limit`` bytes together; each
    shard's head in any case."""
    found: set[Digest] = set()
    total = 0
    for age in range(max((len(chain.log) for chain in chains), default=0)):
        payloads = [chain.log[-1 - age].payload for chain in chains if age < len(chain.log)]
        total += sum(sizes.get(payload, 0) for payload in payloads)
        if age and total > limit:
            break
        found.update(payloads)
    return found
