"""What the machine must know of a run and of this peer, from the manifest and the command line."""

from __future__ import annotations

from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.protocol.config import BATCH_ROOM, STEP_TOKENS, Sizes
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import budget, heartbeat_s, logged
from p2pdiloco.protocol.state import ProtocolConfig

EARLY_BYTES = 256 << 20
EARLY_BYTES_PER_PARAMETER = 2
"""The larger of the two may wait for heads that are not reached yet: four or five of each shard in int4."""


def protocol_config(manifest: Manifest, options: PeerOptions, peer: PeerId) -> ProtocolConfig:
    """The machine's configuration for this peer of this run."""
    config, layout = manifest.config, Layout.of(manifest)
    return ProtocolConfig(
        run=manifest.run,
        peer=peer,
        founder=manifest.founder,
        fragments=layout.fragments,
        sync_every=config.schedule.sync_every,
        overlap=config.schedule.overlap,
        min_quorum=config.schedule.min_quorum,
        grace_share=config.schedule.grace_share,
        total_steps=config.inner.steps,
        expects_learner=not options.is_follower,
        blocks=manifest.blocks.number,
        sizes=Sizes(
            step_tokens=most_step_tokens(config),
            block_tokens=max(1, manifest.blocks.samples * config.model.context),
            elements=tuple(shard.elements for shard in layout.shards),
            budget=budget(config.inner),
        ),
        early_bytes=max(EARLY_BYTES, EARLY_BYTES_PER_PARAMETER * layout.elements),
        is_overwrite=config.outer.adopt == "overwrite",
        evaluation_every=config.evaluation.every,
        log_length=logged(config.schedule),
        needs_majority=config.schedule.needs_majority is True,
        heartbeat_s=heartbeat_s(config.schedule),
        weight=options.link.weight,
        leave_s=options.leave_s,
    )


def most_step_tokens(config: RunConfig) -> int:
    """Of an inner step: the run's own batch with room for larger ones; what a script counts is its own affair."""
    if config.model.kind == "external":
        return STEP_TOKENS
    return max(1, BATCH_ROOM * config.inner.batch * config.model.context)
