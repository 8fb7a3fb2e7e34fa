"""From a command to a running peer: identity, directory, manifest, node, signals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil

from p2pdiloco.access.invite_code import Invite
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.node.dashboard import serve_page
from p2pdiloco.node.metrics_export import MetricsExport
from p2pdiloco.node.node import Node
from p2pdiloco.node.notifier import Notifier
from p2pdiloco.node.results import finished_message
from p2pdiloco.node.run_creation import found, found_from_script, with_own_places
from p2pdiloco.node.run_folder import CHECKPOINT, RunStore, describe_state, has_finished, hold
from p2pdiloco.node.shutdown_signals import leave_when_asked
from p2pdiloco.observability.alerts import Alert
from p2pdiloco.observability.history import closing
from p2pdiloco.peer.checkpoint import CheckpointError
from p2pdiloco.peer.ending import Ending
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import few_turns
from p2pdiloco.swarm.credentials import Credentials
from p2pdiloco.swarm.duplicate_identity import refuse_to_be_one
from p2pdiloco.swarm.invitations import (
    as_granted,
    credentials_by,
    credentials_of,
    how_to_join,
    keep_addresses,
    keep_meeting_places,
    kept_credentials,
    refuse_a_stranger,
)
from p2pdiloco.swarm.run_index import ConfigError, folder_of, is_meant
from p2pdiloco.swarm.run_lookup import (
    FIND_S,
    AllRefuseError,
    DirectoryOptions,
    LookupFailedError,
    RunLookup,
    fetch_manifest,
    has_met,
    observer_transport,
    open_directory,
    pick_runs,
)
from p2pdiloco.training.data_sources import tell_sources
from p2pdiloco.training.learner_main import device_of
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.util.status_pipe import Say
from p2pdiloco.wire.directory_records import RunRecord

log = logs.get("session")

WAKE_S = 600.0
"""How long a peer that has a state of the run waits for any of the peers that it knows: after a power failure they come
back one by one."""
LOOK_S = 1.0
"""How long a founder looks for another run of that name."""
NODE_BYTES = 16
"""Memory of a node for each parameter: state and momentum, and what it shares with its learner."""


async def start(
    config: RunConfig,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    decide: Callable[[RunId, RunRecord], str],
    say: Say,
) -> Ending:
    """Continue the run of this configuration in the state folder, or found it. If another run of that name is live,
    ``decide`` returns the name to found this one under, or "" to join that one.

    Raises:
        ConfigError, DirectoryError, CheckpointError, FolderInUseError, LookupFailedError, NameTakenError, OSError,
            ValueError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    options = with_own_places(options, config)
    earlier = await asyncio.to_thread(RunStore(options.folder).founded_from, config)
    if earlier is not None:
        with hold(options.folder, earlier):
            patience_s = await asyncio.to_thread(_patience_s, earlier, options)
            async with open_directory(identity, directory_options, options.folder, patience_s) as directory:
                return await _continue_run(earlier, None, options, identity, directory, say)
    manifest, initial = await asyncio.to_thread(found, config, identity.peer_id, options)
    async with open_directory(identity, directory_options, options.folder) as directory:
        other = await RunLookup(directory).find_namesake(manifest, LOOK_S if directory_options.initial_peers else 0.0)
        name = config.name if other is None else decide(*other)
        if other is not None and not name:
            initial.take()
            return await _join_run(other[0], options, identity, directory, say)
        if name != config.name:
            renamed = msgspec.structs.replace(config, name=name)
            manifest, initial = await asyncio.to_thread(found, renamed, identity.peer_id, options)
        if warning := few_turns(manifest.config):
            say(f"warning: {warning}")
        with hold(options.folder, manifest):
            return await _continue_run(manifest, initial, options, identity, directory, say)


async def start_from_script(
    foundation: Path,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    say: Say,
) -> Ending:
    """Found the run of a training script, or continue it from this folder's checkpoint.

    Raises:
        ConfigError, DirectoryError, FolderInUseError, OSError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    manifest, new = await asyncio.to_thread(found_from_script, foundation, identity.peer_id)
    initial: InitialState | None = new
    with hold(options.folder, manifest):
        directory_options = await asyncio.to_thread(_without_needless_peers, directory_options, options, manifest)
        if manifest.run in await asyncio.to_thread(RunStore(options.folder).standings):
            new.take()  # a checkpoint is read next, and two models need twice the memory
            initial = None
        async with open_directory(identity, directory_options, options.folder) as directory:
            again = partial(found_from_script, foundation, identity.peer_id)
            return await _continue_run(manifest, initial, options, identity, directory, say, again=again)


async def join(
    wanted: str | None,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    choose: Callable[[dict[RunId, RunRecord]], RunId],
    say: Say,
) -> Ending:
    """Find a run, get its manifest from its peers, and take part.

    Raises:
        ConfigError, LookupFailedError, DirectoryError, FolderInUseError, OSError, ValueError: with a sentence for the
            user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    invite = directory_options.invite
    mine = (
        credentials_by(invite, identity, options.folder)
        if invite
        else kept_credentials(options.folder, wanted, identity)
    )
    kept = await asyncio.to_thread(_unfinished_run, options, wanted, mine, directory_options.initial_peers)
    patience_s = 0.0 if kept is None else WAKE_S
    async with open_directory(identity, directory_options, options.folder, patience_s) as directory:
        if mine is not None:
            run = mine.run
        else:
            runs = await RunLookup(directory).list_runs(patience_s=FIND_S if kept is None else 0.0)
            run = choose(pick_runs(runs, wanted)) if runs or kept is None else kept.run
        is_kept = kept is not None and kept.run == run
        return await _join_run(run, options, identity, directory, say, mine, wanted, kept if is_kept else None)


async def resume(
    folders: Sequence[Path],
    wanted: str | None,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    say: Say,
) -> Ending:
    """Continue a run from the heaviest of the checkpoints in ``folders`` and in this peer's own folder.

    Raises:
        ConfigError, CheckpointError, DirectoryError, FolderInUseError, OSError, ValueError: with a sentence for the
            user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    manifest = await asyncio.to_thread(RunStore(*folders).choose, wanted)
    refuse_a_stranger(manifest, identity, options.folder, directory_options.invite, folders)
    await asyncio.to_thread(_check_machine_and_data, manifest, options, say)
    with hold(options.folder, manifest):
        directory_options = await asyncio.to_thread(_without_needless_peers, directory_options, options, manifest)
        patience_s = await asyncio.to_thread(_patience_s, manifest, options, folders)
        async with open_directory(identity, directory_options, options.folder, patience_s) as directory:
            invite = directory_options.invite
            return await _continue_run(manifest, None, options, identity, directory, say, folders, invite)


async def _join_run(
    run: RunId,
    options: PeerOptions,
    identity: Identity,
    directory: Directory,
    say: Say,
    mine: Credentials | None = None,
    wanted: str | None = None,
    kept: Manifest | None = None,
) -> Ending:
    """Take part in a run that others train; ``mine`` are the credentials for a private one. ``kept`` is the run's
    manifest if this peer has a state of it: then it continues from there if no other peer is there yet."""
    async with observer_transport(Identity.ephemeral(), mine) as transport:
        try:
            peers = await RunLookup(directory).dial_any(transport, run, patience_s=FIND_S if kept is None else 0.0)
            manifest = await fetch_manifest(transport, peers, run)
        except AllRefuseError:
            raise
        except LookupFailedError as error:
            if kept is None:
                raise
            log.warning("no other peer of the run is there yet, going on from the state here", reason=str(error))
            manifest = kept
    if not is_meant(wanted, manifest.config.name, run):
        raise ConfigError(f"the invite is to run {manifest.config.name} ({run[:12]}), not to {wanted}")
    say(f"joining run {manifest.config.name} ({run[:12]}), {Layout.of(manifest).elements:,} parameters")
    await asyncio.to_thread(_check_machine_and_data, manifest, options, say)
    with hold(options.folder, manifest) as folder:
        settings = msgspec.structs.replace(options, folder=folder)
        try:
            own = await asyncio.to_thread(RunStore(options.folder).load_state, manifest)
        except CheckpointError as error:
            log.warning("checkpoint not used, the state comes from the swarm", reason=str(error))
            own = None
        return await take_part(manifest, settings, identity, directory, own, mine, say)


async def _continue_run(
    manifest: Manifest,
    initial: InitialState | None,
    options: PeerOptions,
    identity: Identity,
    directory: Directory,
    say: Say,
    folders: Sequence[Path] = (),
    invite: Invite | None = None,
    again: Callable[[], tuple[Manifest, InitialState]] | None = None,
) -> Ending:
    """Take part as a peer that others can join, from the heaviest state on this machine. Without one, it begins with
    ``initial``, and makes that ``again`` if the state cannot be read. The caller holds the run's folder."""
    try:
        own = await asyncio.to_thread(RunStore(options.folder, *folders).load_state, manifest)
    except CheckpointError as error:
        if not options.learner.script:
            raise
        log.warning("checkpoint not used, the run goes on from its beginning or its peers", reason=str(error))
        own = None
        if again is not None:
            _, initial = await asyncio.to_thread(again)
    folder = folder_of(options.folder, manifest.run)
    mine = credentials_of(manifest, identity, folder, invite)
    asking = None if manifest.config.access == "open" else mine
    if initial is not None and (own is not None or await RunLookup(directory).has_state(manifest.run, asking)):
        initial.take()  # nobody has a use for version 0: this very run has come farther, here or elsewhere
        initial = None
    is_over = own is not None and has_finished(manifest, own.shards)
    if own is not None:
        initial = own
        say(describe_state(manifest, own))
        if is_over and not options.learner.script and not await RunLookup(directory).is_live(manifest.run, asking):
            if not options.stay_s:
                return Ending(0, finished_message(manifest, folder))
            options = msgspec.structs.replace(options, is_follower=True)  # it only serves
    settings = msgspec.structs.replace(options, folder=folder)
    goes = is_over and bool(options.learner.script) and not options.stay_s  # before anybody has joined
    return await take_part(manifest, settings, identity, directory, initial, mine, say, shows_how_to_join=not goes)


def _unfinished_run(
    options: PeerOptions, wanted: str | None, mine: Credentials | None, peers: Sequence[str]
) -> Manifest | None:
    """The unfinished run that the user means and that has a state here. Without a word of the user's, it is the only
    one, if one of ``peers`` was met from here. None if there is none, or if this peer is not to wait for others."""
    if options.is_fetching or options.learner.script:
        return None
    if mine is None and wanted is None and not has_met(options.folder, peers):
        return None
    found = RunStore(options.folder).standings(wanted if mine is None else mine.run)
    here = [standing.manifest for standing in found.values() if not standing.is_finished]
    return here[0] if len(here) == 1 else None


def _patience_s(manifest: Manifest, options: PeerOptions, folders: Sequence[Path] = ()) -> float:
    """How long a peer with a state of the run waits for others. A training script does not wait: it continues alone,
    and the others find it."""
    standing = RunStore(options.folder, *folders).standings().get(manifest.run)
    return 0.0 if standing is None or standing.is_finished or options.learner.script else WAKE_S


def _without_needless_peers(
    directory_options: DirectoryOptions, options: PeerOptions, manifest: Manifest
) -> DirectoryOptions:
    """The options without initial peers where a script only wants the result of a run that is over."""
    if not options.learner.script or not RunStore(options.folder).is_finished(manifest.run):
        return directory_options
    return msgspec.structs.replace(directory_options, initial_peers=())


def _check_machine_and_data(manifest: Manifest, options: PeerOptions, say: Callable[[str], None]) -> None:
    """Check that this machine can hold the model, and tell the user which data its learner trains on.

    Raises:
        ConfigError: it cannot hold the model.
        ValueError: the data, the tokenizer or the adapters' model is not named, or not there.
    """
    needed = Layout.of(manifest).elements * NODE_BYTES
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    allowed = options.machine.most_memory_bytes
    if allowed is not None and 2 * needed > allowed:  # its learner has as much again, or more
        raise ConfigError(
            f"a peer of run {manifest.config.name} needs {2 * needed / 1e9:,.1f} GB of memory or more, --max-memory "
            f"allows {allowed / 1e9:,.1f} GB: allow more, or join from a larger machine"
        )
    if needed > memory:
        raise ConfigError(
            f"a node of run {manifest.config.name} needs {needed / 1e9:,.1f} GB of memory for the model, this machine "
            f"has {memory / 1e9:,.1f} GB: join from a larger one"
        )
    if not options.is_follower and not options.learner.script:
        own = options.learner
        for line in tell_sources(manifest.config, own.data, own.tokenizer, own.model):
            say(line)


def _require_script(manifest: Manifest, options: PeerOptions) -> None:
    """Refuse to train a run of training scripts without one, before its state is fetched for nothing.

    Raises:
        ConfigError: here is no script; the message says what to do with or without one.
    """
    config = manifest.config
    if config.model.kind == "external" and not options.is_follower and not options.learner.script:
        word = "ADDR" if config.access == "open" else "INVITE"
        has_state = any((options.folder / CHECKPOINT).glob("state-*.json"))
        where = f", state={str(options.folder.parent)!r}" if has_state else ""
        raise ConfigError(
            f"run {config.name} ({manifest.run[:12]}) is trained by training scripts, and here is none: take part in "
            f"it from yours, p2pdiloco.DiLoCo(model, optimizer, run={config.name!r}, initial_peers=[{word}]{where}). "
            f"To follow it without training: p2pdiloco join {word} --follow. To get its model: p2pdiloco fetch {word}"
        )


async def take_part(
    manifest: Manifest,
    options: PeerOptions,
    identity: Identity,
    directory: Directory,
    initial: InitialState | None,
    mine: Credentials | None,
    say: Say,
    *,
    shows_how_to_join: bool = False,
) -> Ending:
    """Run a node until it ends; SIGINT and SIGTERM make it leave in order.

    Raises:
        IdentityError: another process takes part with this identity.
        ConfigError: the run is one of training scripts, and here is none.
        CredentialsError: this peer is no member.
        OSError: a port is taken, a folder is not writable.
    """
    is_open = manifest.config.access == "open"
    mine = mine or Credentials(manifest.run, b"", identity)
    options = await asyncio.to_thread(as_granted, manifest, mine, options, say)
    _require_script(manifest, options)
    await refuse_to_be_one(directory, manifest.run, identity.peer_id, None if is_open else mine)
    await asyncio.to_thread(keep_addresses, options.folder, directory.meeting_places())
    if shows_how_to_join:
        for invited in await asyncio.to_thread(how_to_join, manifest, mine, options.folder, directory):
            say(invited)
    tell = say if shows_how_to_join else None
    async with Node(manifest, options, identity, directory, initial, mine) as node:
        keeping = partial(
            keep_meeting_places,
            manifest,
            mine,
            options.folder,
            directory,
            lambda: node.reachability.is_directory_dialable,
            tell,
        )
        node.host.keep(keeping, name="meeting places")
        with leave_when_asked(node, options.machine.spot):
            async with (
                serve_page(node.telemetry, options.folder, options.watch.page, say),
                Notifier(options.watch.notify, identity.peer_id) as notifier,
                MetricsExport(options.watch.log_to, node.telemetry.picture, troubles=node.host.troubles),
            ):
                node.telemetry.tell = notifier.tell
                return await node.run(say, partial(_announce_end, node, notifier, say))


def _announce_end(node: Node, notifier: Notifier, say: Callable[[str], None], ending: Ending) -> None:
    """Tell the user what this machine gave, and notify when the run is complete; before the model is served."""
    if given := closing(node.telemetry.picture().account):
        say(given)
    if node.has_finished:
        notifier.tell(Alert(kind="done", text=ending.reason))
