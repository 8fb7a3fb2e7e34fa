"""CPU time of an exchange's arithmetic alone, on one thread, beside the time that its bytes take.

    python -m benchmarks.wire.arithmetic [--peers 2] [--parameters 100e6] [--codec int4] [--rounds 5] [--json FILE]

The tensors of ``--peers`` peers exchange in one process, without loops, network, signatures or disks: each encodes its
contribution, merges the shards that it owns, and applies every version. A figure is the CPU time of one peer, the
median of the rounds after one warm-up. What the merge takes to compare contributions (``codec.agreement``) is told
apart. Encryption and kernel copies are added by the bytes (``--tls`` CPU s/GB at both ends together, from
``benchmarks.wire.transport``). With one core per peer no exchange of this design can be faster than this sum; what
``benchmarks.wire.exchange`` takes beyond it is loops, signatures, disks and waiting.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch

from benchmarks import bench
from p2pdiloco.codec.agreement import AgreementHistory
from p2pdiloco.peer.learner_updates import Moves, Payload
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecChoice, CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements

FRAGMENT = FragmentId(0)
MAX_SHARD = 2 << 20
COLUMNS = (("CPU s", "seconds", ".3f"), ("ns a parameter", "ns", ".2f"), ("of all", "share", ".0%"))


class Shares(NamedTuple):
    """Of one peer: processor seconds, and bytes."""

    encode: float
    merge: float
    take: float
    judging: float
    """The part of ``merge`` that compares contributions."""
    sent_bytes: int
    received_bytes: int


class Merged(NamedTuple):
    """A new version, as it travels."""

    header: CommitHeader
    payload: Payload
    listed: bytes


class Tensors:
    """One peer's. ``is_coded``: with Huffman codes, as on a line that is slower than they are."""

    def __init__(self, number: int, peers: int, parameters: int, codec: CodecChoice, *, is_coded: bool) -> None:
        self.learner, self.number, self.is_coded = LearnerId(f"peer{number}/1"), number, is_coded
        specs = (TensorSpec(name="all", shape=(parameters,), merge="rda", fragment=FRAGMENT),)
        layout = make_layout(specs, 1, MAX_SHARD, "rda")
        self.shards = [piece.shard for piece in layout.shards]
        self.own = {shard for shard in self.shards if shard % peers == number}
        self.vectors = SharedVectors.create(parameters, ring_elements(layout))
        self.state = ModelState(layout, OuterConfig(), CodecConfig(up=codec, down=codec), self.vectors, round_steps=24)
        drawn = torch.Generator().manual_seed(0)  # all begin with the same
        for piece in layout.shards:
            momentum = torch.zeros(piece.elements, dtype=self.state.form.momentum)
            theta = torch.randn(piece.elements, generator=drawn)
            self.state.put(piece.shard, digest_of(b"version 0"), theta, momentum)
        self.state.shifts.load(self.learner)
        while not self.state.shifts.is_empty:
            self.state.shifts.acknowledge(self.shards)
        drawn.manual_seed(1 + number)
        self._moved = 1e-3 * torch.randn(parameters, generator=drawn)

    def snapshot(self) -> None:
        """What the learner does."""
        self.state.shifts.begin_snapshot(FRAGMENT)
        for piece in self.state.layout.shards:
            here = slice(piece.start, piece.stop)
            torch.add(self.state.theta[here], self._moved[here], out=self.state.shifts.part("snapshot", piece.shard))
        self.state.shifts.complete_snapshot(FRAGMENT)

    def given(self) -> dict[ShardId, Payload]:
        """What this peer gives; to itself without codes."""
        found = {}
        for shard in self.shards:
            is_coded = self.is_coded and shard not in self.own
            found[shard], _ = self.state.encode(shard, self._head(shard), is_coded=is_coded)
        return found

    def merged(self, version: int, given: Sequence[tuple[Contributor, dict[ShardId, Payload]]]) -> list[Merged]:
        """The next version of each shard that it owns."""
        found = []
        for shard in sorted(self.own):
            here = [(contributor, payloads[shard]) for contributor, payloads in given]
            base = self._head(shard)
            merged = self.state.merge(shard, base, version, here, is_coded=self.is_coded)
            result = digest_of(merged.digests)
            header = CommitHeader(
                shard, version, base, 0, PeerId("owner"), (), 0, merged.payload_digest, result, result, merged.length
            )
            found.append(Merged(header, merged.payload, merged.digests))
        return found

    def take(self, versions: Sequence[Merged], mine: dict[ShardId, Payload]) -> None:
        """All of them; those of others are checked."""
        for header, payload, listed in versions:
            if header.shard not in self.own and digest_of(payload) != header.payload:
                raise ValueError(f"the payload of shard {header.shard} came altered")
            moves = Moves(self.learner, [mine[header.shard]], [], False)
            head = digest_of(f"{header.shard} {header.version}".encode())
            self.state.apply(header, head, payload, listed, moves)

    def shifted(self) -> None:
        """The learner has the new parameters."""
        self.state.shifts.acknowledge(self.shards)

    def _head(self, shard: ShardId) -> Digest:
        head = self.state.heads[shard]
        assert head is not None
        return head


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


@contextlib.contextmanager
def _judging_timed() -> Iterator[list[float]]:
    """Within it, the time of each comparison of contributions is added to the list that is yielded."""
    spent: list[float] = []
    sound = AgreementHistory.judge

    def judge(*arguments: Any) -> Any:
        found: list[Any] = []
        spent.append(_timed(lambda: found.append(sound(*arguments))))
        return found[0]

    with mock.patch.object(AgreementHistory, "judge", judge):
        yield spent


def exchange(peers: Sequence[Tensors], version: int) -> Shares:
    """All of them, one after the other; of the first."""
    first = peers[0]
    for peer in peers:
        peer.snapshot()
    contributors = [Contributor(peer.learner, 0, 1000, 0, 10) for peer in peers]
    payloads: list[dict[ShardId, Payload]] = []
    encode = _timed(lambda: payloads.append(first.given()))
    payloads += [peer.given() for peer in peers[1:]]
    received = [payloads[number][shard] for number in range(1, len(peers)) for shard in first.own]
    merge = _timed(lambda: [digest_of(payload) for payload in received])  # as who receives it does
    given = list(zip(contributors, payloads, strict=True))
    versions: list[Merged] = []
    with _judging_timed() as judging:
        merge += _timed(lambda: versions.extend(first.merged(version, given)))
    for peer in peers[1:]:
        versions += peer.merged(version, given)
    take = _timed(lambda: first.take(versions, payloads[0]))
    for peer, mine in zip(peers[1:], payloads[1:], strict=True):
        peer.take(versions, mine)
    for peer in peers:
        peer.shifted()
        if not torch.equal(peer.state.theta, first.state.theta):
            raise ValueError("the peers' models differ")
    sent = sum(len(payload) for shard, payload in payloads[0].items() if shard not in first.own)
    sent += sum(len(m.payload) for m in versions if m.header.shard in first.own) * (len(peers) - 1)
    came = sum(map(len, received)) + sum(len(m.payload) for m in versions if m.header.shard not in first.own)
    return Shares(encode, merge, take, sum(judging), sent, came)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--peers", type=int, default=2, help="number of peers")
    parser.add_argument("--parameters", type=float, default=100e6, help="parameters of the model")
    parser.add_argument("--codec", choices=get_args(CodecChoice)[1:], default="int4", help="codec, both ways")
    parser.add_argument("--uncoded", action="store_true", help="without Huffman codes, as on a fast line (int4, int8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one warm-up")
    parser.add_argument("--tls", type=float, default=1.4, help="CPU s/GB, both ends together")
    parser.add_argument("--gbit", type=float, default=1.0, help="line rate that the sum is compared with")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    parameters = int(options.parameters)
    peers = [
        Tensors(number, options.peers, parameters, options.codec, is_coded=not options.uncoded)
        for number in range(options.peers)
    ]
    rounds = [exchange(peers, version) for version in range(1, options.rounds + 2)][1:]
    shares = Shares(*map(statistics.median, zip(*rounds, strict=True)))
    tls = options.tls / 2 * (shares.sent_bytes + shares.received_bytes) / 1e9
    parts = {"encode": shares.encode, "merge": shares.merge, "take": shares.take, "TLS and sockets": tls}
    total = sum(parts.values())
    shown = {
        name: {"seconds": seconds, "ns": 1e9 * seconds / parameters, "share": seconds / total}
        for name, seconds in (*parts.items(), ("sum", total))
    }
    print(bench.table(f"one of {options.peers} peers, {parameters:.3g} parameters, {options.codec}", COLUMNS, shown))
    print(f"comparing contributions: {shares.judging:.3f} s of the merge, {shares.judging / total:.1%} of the sum")
    line = max(shares.sent_bytes, shares.received_bytes) * 8 / (options.gbit * 1e9)
    print(
        f"{shares.sent_bytes / 1e6:.1f} MB sent: {line:.3f} s at {options.gbit:g} Gbit/s, {total / line:.2f} times that"
    )
    found = {
        **{f"{name.replace(' ', '_')}_s": s for name, s in parts.items()},
        "judging_s": shares.judging,
        "sum_s": total,
        "line_s": line,
    }
    bench.write(options, "wire/arithmetic", {}, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
