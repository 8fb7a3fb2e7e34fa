"""Which payloads of the logs are kept when they are too many."""

from p2pdiloco.peer.retention import newest
from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.identifiers import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader

NONE = Digest("")


def chain_of(shard: int, versions: int) -> Chain:
    chain = Chain(ShardId(shard), 32)
    for version in range(1, versions + 1):
        payload = Digest(f"{shard}/{version}")
        chain.log.append(
            CommitHeader(
                ShardId(shard), version, Digest(""), 0, PeerId("owner"), (), 0, payload, Digest(""), Digest("")
            )
        )
    return chain


def test_the_youngest_versions_of_all_shards_are_kept() -> None:
    chains = [chain_of(0, 5), chain_of(1, 5), chain_of(2, 1), chain_of(3, 0)]
    sizes = {header.payload: 10 for chain in chains for header in chain.log}
    assert newest(chains, sizes, 1000) == set(sizes)
    assert newest(chains, sizes, 50) == {"0/5", "1/5", "2/1", "0/4", "1/4"}
    assert newest(chains, sizes, 49) == newest(chains, sizes, 0) == {"0/5", "1/5", "2/1"}
    assert newest([], {}, 10) == set()
