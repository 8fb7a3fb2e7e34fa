"""What proves that a shard's state is the run's: the commit that its owner signed, or the manifest at version 0."""

from __future__ import annotations

from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.identifiers import Digest
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.protocol.messages import commit_id
from p2pdiloco.runtime.identity import verify
from p2pdiloco.wire.bodies import COMMIT_CONTEXT, StateProof


def proven_digest(manifest: Manifest, proof: StateProof) -> Digest:
    """The digest that the shard's state must have: the commit's that its owner signed (the manifest's, at version 0).

    Raises:
        ValueError: the proof does not prove its head.
    """
    head, header = proof.state.head, proof.header
    if head.version == 0:
        genesis = manifest.genesis[head.shard]
        if head != genesis_head(manifest.run, head.shard, genesis):
            raise ValueError(f"version 0 of shard {head.shard} is not this run's")
        return genesis
    if header is None or commit_id(header) != head.id or header.shard != head.shard or header.tokens != head.tokens:
        raise ValueError(f"the head of shard {head.shard} is not the commit that came with it")
    if header.step != proof.state.step:
        raise ValueError(f"the state of shard {head.shard} is of another step than its commit")
    if header.version != head.version:
        raise ValueError(f"the head of shard {head.shard} has another version than its commit")
    if not verify(header.owner, COMMIT_CONTEXT + head.id.encode(), proof.signature):
        raise ValueError(f"the commit of shard {head.shard} does not bear its owner's signature")
    return header.result
