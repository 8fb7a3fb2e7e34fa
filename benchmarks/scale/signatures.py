"""CPU that a peer needs to check a commit's signatures, by number of contributors, on one core.

    python -m benchmarks.scale.signatures [--contributors 32 256 1024] [--json FILE]

Each commit carries a signed contribution of every peer, and each peer checks all of them once for every version of
every shard. A share of a core is that of 48 shards with a version each in 48 s (benchmarks/scale/README.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks import bench
from p2pdiloco.peer.signatures import check_commit, signed
from p2pdiloco.protocol.counted_tokens import TokenCounts, usual_prints
from p2pdiloco.protocol.ids import Digest, RunId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.messages import CommitHeader, Contributor, commit_id, signed_commit_bytes
from p2pdiloco.transport.identity import Identity

COLUMNS: tuple[bench.Column, ...] = (
    ("header, kB", "header_kb", ".1f"),
    ("all signatures, ms", "check_ms", ".1f"),
    ("share of a core, %", "core_percent", ".1f"),
    ("64 signatures, ms", "sample_ms", ".1f"),
    ("commit id, ms", "id_ms", ".3f"),
)
RUN, SHARD, PARENT = RunId("run"), ShardId(0), Digest(digest_of(b"parent"))
SAMPLE = 64
REPEATS = 5


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the shortest of some CPU times."""
    found = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        found.append(time.process_time() - began_s)
    return 1e3 * min(found)


def some(header: CommitHeader) -> Sequence[Contributor]:
    """Select as many contributions as a sample would have."""
    return header.contributors[:SAMPLE]


def measure(contributors: int) -> dict[str, float]:
    """Return the figures of one commit."""
    peers = [Identity.ephemeral() for _ in range(contributors)]
    given = [
        signed(peer, RUN, SHARD, PARENT, Contributor(learner_id(peer.peer_id, "12345678"), 0, 10**6, 0, 24), PARENT)
        for peer in peers
    ]
    header = CommitHeader(
        shard=SHARD,
        version=1,
        parent=PARENT,
        step=24,
        owner=peers[0].peer_id,
        contributors=tuple(sorted(given, key=lambda one: one.learner)),
        tokens=contributors * 10**6,
        payload=PARENT,
        result=PARENT,
        record=PARENT,
        factors=(100,) * contributors,
        counts=TokenCounts(usual=tuple((one, 1) for one in sorted(usual_prints(one.peer_id for one in peers)))),
    )
    signature = peers[0].sign(signed_commit_bytes(commit_id(header)))
    check_ms = cpu_ms(lambda: check_commit(RUN, header, signature))
    return {
        "header_kb": len(msgspec.msgpack.encode(header)) / 1e3,
        "check_ms": check_ms,
        "core_percent": 100.0 * check_ms / 1e3,
        "sample_ms": cpu_ms(
            lambda: check_commit(RUN, header, signature, selection=lambda it: it.contributors[:SAMPLE])
        ),
        "id_ms": cpu_ms(lambda: commit_id(header)),
    }


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench.parser(__doc__, rows="number of contributors", has_plot=False)
    parser.add_argument("--contributors", type=int, nargs="+", default=[32, 256, 1024], help="of the commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each size."""
    given, rows = options(argv), dict[str, dict[str, float]]()
    for contributors in given.contributors:
        rows[str(contributors)] = measure(contributors)
        bench.write(given, "scale/signatures", {"contributors": contributors}, rows[str(contributors)])
    print(bench.table("contributors", COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
