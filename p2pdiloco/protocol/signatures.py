"""What peers sign, as bytes. Who holds the keys signs and verifies (``peer/signatures.py``); in the machine's simulator
a signature is a value that only its peer can make.

Rules of this file:
1. A statement begins with what kind it is and names the run: none can be taken for another's, or for another run's.
2. Head ids are digests of all that led to them, so naming a head names its shard's whole chain.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol.identifiers import Digest, RunId, ShardId
from p2pdiloco.protocol.messages import Contributor

_CONTRIBUTION = "p2pdiloco contribution"
_COMMIT = b"p2pdiloco commit\0"
_encoder = msgspec.msgpack.Encoder()


def contribution(run: RunId, shard: ShardId, base: Digest, c: Contributor) -> bytes:
    """What a learner's peer signs: this range of tokens, steps and blocks, with this payload, on this head."""
    given = (c.learner, c.tokens_from, c.tokens_to, c.steps_from, c.steps_to, c.blocks, c.payload)
    return _encoder.encode((_CONTRIBUTION, run, shard, base, given))


def commit(commit_id: Digest) -> bytes:
    """What an owner signs: its header's digest, which leads to the run by the parents."""
    return _COMMIT + commit_id.encode()
