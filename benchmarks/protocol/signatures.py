"""Size and CPU time of signatures, per contributor and commit, and of a whole lineage.

python -m benchmarks.protocol.signatures [--contributors 8] [--versions 32]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from random import Random

import msgspec

from p2pdiloco.peer.signatures import all_of, check_commit, check_contributor, drawn, signed
from p2pdiloco.peer.state_proof import check_lineage
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.counted_tokens import TokenCounts
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.messages import CommitHeader, Contributor, commit_id
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import SignedCommit, encode

RUN, SHARD = RunId(digest_of(b"run")), ShardId(0)
TRIES = 5


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--contributors", type=int, default=8, help="contributors per commit (default: 8)")
    parser.add_argument("--versions", type=int, default=32, help="versions of the lineage (default: 32)")
    arguments = parser.parse_args()
    peers = [Identity.ephemeral() for _ in range(arguments.contributors)]
    line = lineage(peers, arguments.versions)
    last = line[-1]
    given = last.header.contributors[0]
    bare = msgspec.structs.replace(given, payload=b"", signature=b"")
    print(f"bytes a contributor: {len(encode(given)) - len(encode(bare))} more, {len(encode(given))} in all")
    print(f"bytes a commit: {len(encode(last.header.record))} more for its record")
    each = best_s(lambda: check_contributor(RUN, SHARD, last.header.parent, given))
    print(f"microseconds to check a contributor: {1e6 * each:.0f}")
    made = best_s(lambda: signed(peers[0], RUN, SHARD, last.header.parent, bare, Digest("2" * 40)))
    print(f"microseconds to sign a contribution: {1e6 * made:.0f}")
    size = sum(len(encode(commit)) for commit in line)
    whole = best_s(lambda: check_commit(RUN, last.header, last.signature))
    print(f"microseconds to check a commit of {arguments.contributors}: {1e6 * whole:.0f}")
    drawn_s, all_s = (
        best_s(partial(check_lineage, RUN, last.header, line[:-1], selection=which))
        for which in (drawn(Random()), all_of)
    )
    print(f"a lineage of {arguments.versions} commits: {size:,} bytes, checked in {1e3 * drawn_s:.1f} ms")
    print(f"the same with all signatures: {1e3 * all_s:.1f} ms")


def lineage(peers: list[Identity], versions: int) -> list[SignedCommit]:
    """Commits that follow each other, of all peers' contributions."""
    found, parent, tokens, counts = list[SignedCommit](), digest_of(b"version 0"), 0, TokenCounts()
    for version in range(1, versions + 1):
        ranges = (Contributor(learner_id(p.peer_id, "a1b2c3d4"), 10**6, 10**6 + 8192, 100, 124) for p in peers)
        given = (signed(p, RUN, SHARD, parent, c, digest_of(b"payload")) for p, c in zip(peers, ranges, strict=True))
        contributors = tuple(sorted(given, key=lambda c: c.learner))
        added, counts = counts.count(version, {PeerId(p.peer_id): 8192 for p in peers}, first=1)
        tokens += added
        digest, owner = digest_of(b"any"), peers[version % len(peers)]
        header = CommitHeader(
            shard=SHARD,
            version=version,
            parent=parent,
            step=24 * version,
            owner=PeerId(owner.peer_id),
            contributors=contributors,
            tokens=tokens,
            payload=digest,
            result=digest,
            record=digest,
            counts=counts,
        )
        parent = commit_id(header)
        found.append(SignedCommit(header, owner.sign(messages.signed_commit_bytes(parent))))
    return found


def best_s(work: object) -> float:
    """The best of several tries, in seconds of this thread's processor time."""
    assert callable(work)
    took = []
    for _ in range(TRIES):
        began = time.thread_time()
        work()
        took.append(time.thread_time() - began)
    return min(took)


if __name__ == "__main__":
    main()
