"""Options that each peer chooses for itself; they need not agree with those of other peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.config import BATCH_ROOM, STEP_TOKENS, Sizes
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import budget, logged
from p2pdiloco.protocol.state import ProtocolConfig


class MachineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the machine sets to a peer that is a guest on it (``node/resource_guard.py``)."""

    spot: str | None = None
    """Cloud whose notices are heeded (``node/shutdown_signals.py``)."""
    most_memory_bytes: float | None = None
    """Of node and learner together; a peer that has more leaves."""
    only_when_idle: bool = False
    """Rest while others use the processors."""
    is_battery_used: bool = False
    """Train also on battery."""
    tensor_threads: Annotated[int, Meta(ge=0)] = 0
    """Of the node, which work on shards side by side; 0: by the machine's cores (``node/local_host.py``)."""


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and bandwidth of a peer."""

    listen: str | tuple[str, ...] = "/ip4/0.0.0.0/tcp/0"
    """Where other peers reach the node (data port): a multiaddr, or several."""
    announce: tuple[str, ...] = ()
    """Addresses to publish instead of the machine's own (port forwarding)."""
    maps_port: bool = True
    """Ask the router for a port that leads to the data port."""
    weight: Annotated[float, Meta(ge=0.0, le=1e12)] = 1.0
    """Share of ownership, in any unit that the peers of a run agree on (upload budget); 0: it never owns a shard."""
    relay_bytes_per_s: Annotated[float, Meta(ge=0.0)] | Literal["auto"] | None = 0.0
    """Most bytes per second that this peer, if it can be dialled, relays for pairs that cannot connect. It relays less
    if its line leaves less. 0: none; None: no limit; "auto": 50 Mbit/s, or a quarter of the line if that is more."""
    up_bytes_per_s: Annotated[float, Meta(gt=0.0)] | Literal["auto"] | None = "auto"
    """What this peer may send at most, over all connections; None for no limit. Control traffic goes first. "auto":
    90 % of what the link is seen to carry (nothing is learned from connections on the same machine)."""
    down_bytes_per_s: Annotated[float, Meta(gt=0.0)] | None = None
    """What others may send to this peer."""


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Device, data and model of a peer's learner."""

    device: str = "cpu"
    data: str | None = None
    """Folder (or a file of documents) that this peer trains on. None: what ships with the program."""
    tokenizer: str | None = None
    """Folder with tokenizer.json, if it does not lie among the data."""
    model: str | None = None
    """Folder with the weights that the run's adapters are for (``model.lora``)."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """torch threads of the learner; 0: as many as make the fastest steps, measured again when the load changes."""
    script: str = ""
    """Name under which a training script waits for its node; empty: the built-in learner is started."""
    reattach_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 60.0
    """How long a learner whose node died goes on training and waits for the node's next life; 0: it ends with it."""


class WatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Places to which a peer reports."""

    page: str = "off"
    """Where this peer serves its page: ``off``, ``auto`` (a free port of loopback), a port there, or HOST:PORT."""
    has_chat: bool = False
    """Whether the page continues texts with the model (``node/chat.py``)."""
    notify: str = ""
    """Command or address that is told of alerts (``node/notifier.py``)."""


class PublishOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Publications of the model while the run trains (``node/publisher.py``). Base weights and tokenizer are those of
    ``LearnerOptions``."""

    folder: Path
    every_s: Annotated[float, Meta(ge=1.0)] = 60.0
    """At least between two."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Publications that stay, the newest included."""
    format: Literal["hf", "safetensors", "peft", "gguf"] | None = None
    """As of ``p2pdiloco export``; None: its default for the run."""
    like: str | None = None
    """For a run of training scripts, folder with the configuration of its model or adapters."""
    command: str = ""
    """Run after each publication; empty: none."""


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's own settings. Times in seconds."""

    folder: Path
    """Everything this peer writes for this run: checkpoint, metrics, report, logs of the learner."""
    link: LinkOptions = LinkOptions()
    learner: LearnerOptions = LearnerOptions()
    is_follower: bool = False
    """Track the global model without training."""
    checkpoint_s: Annotated[float, Meta(ge=1.0)] = 60.0
    """At most between two, unless ``write_bytes_per_day`` asks for longer."""
    are_checkpoints_timed: bool = False
    """``checkpoint_s`` holds whatever they write, and the budget is for commits and payloads."""
    write_bytes_per_day: Annotated[float, Meta(gt=0.0)] | None = None
    """What commits, payloads that memory has no room for, checkpoints and the learner's own state may write.
    Checkpoints are at most an hour apart even so; payloads that may not be written stay in memory."""
    payload_memory_bytes: Annotated[int, Meta(ge=0)] = 4 << 20
    """Of payloads that are kept so many bytes are in memory, or half a byte a parameter if that is more; the others lie
    in files."""
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 2
    """Checkpoints that stay; of a torn one the next is used."""
    leave_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 20.0
    stay_s: Annotated[float, Meta(ge=0.0)] | None = None
    """How long a peer of a run that is complete stays, for those who come later. None: ten minutes after the end
    (``node/node.py``), a script's node not at all."""
    is_fetching: bool = False
    """It goes as soon as it holds what its peers hold."""
    machine: MachineOptions = MachineOptions()
    watch: WatchOptions = WatchOptions()
    publish: PublishOptions | None = None


# -- Configuration of the state machine --------------------------------------------------------------------------------
# What the machine must know of a run and of this peer, from the manifest and the command line.


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
        takes_mean=(config.outer.merge, config.outer.learning_rate, config.outer.momentum) == ("direct", 1.0, 0.0),
        is_overwrite=config.outer.adopt == "overwrite",
        evaluation_every=config.evaluation.every,
        log_length=logged(config.schedule),
        together=config.schedule.together,
        needs_majority=config.schedule.needs_majority is True,
        heartbeat_s=config.schedule.heartbeat_s,
        weight=options.link.weight,
        leave_s=options.leave_s,
    )


def most_step_tokens(config: RunConfig) -> int:
    """Return the maximum tokens of an inner step: the run's own batch, with room for larger ones."""
    if config.model.kind == "external":
        return STEP_TOKENS
    return max(1, BATCH_ROOM * config.inner.batch * config.model.context)
