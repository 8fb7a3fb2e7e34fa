"""Starts a peer from a command: opens the directory, finds or makes the manifest, and runs the node until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec
import psutil

from p2pdiloco.access.invite_code import Invite
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.node.dashboard import serve_page
from p2pdiloco.node.node import Node
from p2pdiloco.node.notifier import Notifier
from p2pdiloco.node.publication import hold as hold_publications
from p2pdiloco.node.results import finished_message
from p2pdiloco.node.run_creation import found, found_from_script, with_own_places
from p2pdiloco.node.run_folder import CHECKPOINT, RunStore, describe_state, has_finished, hold
from p2pdiloco.node.shutdown_signals import leave_when_asked
from p2pdiloco.observability.alerts import Alert
from p2pdiloco.observability.history import closing
from p2pdiloco.peer.checkpoint import CheckpointError, places
from p2pdiloco.peer.ending import Ending
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.config import describe_end
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import describe_rounds, end_of, few_rounds
from p2pdiloco.swarm.credentials import Credentials, MemberFiles
from p2pdiloco.swarm.duplicate_identity import refuse_duplicate_identity
from p2pdiloco.swarm.invitations import (
    apply_grant,
    credentials_for_joining,
    credentials_of,
    find_credentials,
    how_to_join,
    keep_addresses,
    keep_invite_addresses,
    require_membership,
)
from p2pdiloco.swarm.run_index import ConfigError, folder_of, is_meant
from p2pdiloco.swarm.run_lookup import (
    FIND_S,
    AllRefuseError,
    DirectoryOptions,
    LookupFailedError,
    RunLookup,
    fetch_manifest,
    fetch_prolongings,
    has_met,
    observer_transport,
    open_directory,
    pick_runs,
)
from p2pdiloco.training.data_sources import tell_sources
from p2pdiloco.training.export import check_adapters, check_export, default_format
from p2pdiloco.training.generation import check_generation
from p2pdiloco.training.learner_options import device_of
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.util.status_pipe import Say
from p2pdiloco.wire.directory_records import RunRecord

log = logs.get("session")

# Time for which a peer with a state of the run waits for a peer that it knows: after a power failure they return one by
# one.
WAKE_S = 600.0
# Time for which a founder looks for another run of the same name.
LOOK_S = 1.0
# Memory of a node per parameter: state, momentum, and the memory that it shares with its learner.
NODE_BYTES = 16


async def start(
    config: RunConfig,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    decide: Callable[[RunId, RunRecord], str],
    say: Say,
) -> Ending:
    """Continue the run of this configuration in the state folder, or found it.

    decide: called if another run of that name is live; returns the name under which to found this run, or "" to join
        the other one.
    say: shows a message to the user.

    Raises:
        ConfigError, DirectoryError, CheckpointError, FolderInUseError, LookupFailedError, NameTakenError, OSError,
            ValueError: with a message for the user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    options = with_own_places(options, config)
    _check_uses(config, options)
    earlier = await asyncio.to_thread(RunStore(options.folder).founded_from, config)
    if earlier is not None:
        with hold(options.folder, earlier):
            patience_s = await asyncio.to_thread(_patience_s, earlier, options)
            async with open_directory(
                identity, directory_options, options.folder, patience_s, earlier.run
            ) as directory:
                return await _continue_run(earlier, None, options, identity, directory, say)
    begin = partial(found, founder=identity.peer_id, options=options)
    manifest, initial = await asyncio.to_thread(begin, config)
    async with open_directory(identity, directory_options, options.folder, run=manifest.run) as directory:
        other = await RunLookup(directory).find_namesake(manifest, LOOK_S if directory_options.initial_peers else 0.0)
        name = config.name if other is None else decide(*other)
        if other is not None and not name:
            initial.take()
            return await _join_run(other[0], options, identity, directory, say)
        if name != config.name:
            renamed = msgspec.structs.replace(config, name=name)
            manifest, initial = await asyncio.to_thread(begin, renamed)
        say(describe_rounds(manifest.config, sum(tensor.elements for tensor in manifest.tensors)))
        if warning := few_rounds(manifest.config):
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

    foundation: file that the script wrote (``training/founding_file.py``).

    Raises:
        ConfigError, DirectoryError, FolderInUseError, OSError: with a message for the user.
    """
    logs.speak_as(identity.peer_id)
    manifest, new = await asyncio.to_thread(found_from_script, foundation, identity.peer_id)
    initial: InitialState | None = new
    with hold(options.folder, manifest):
        directory_options = await asyncio.to_thread(_without_needless_peers, directory_options, options, manifest)
        if manifest.run in await asyncio.to_thread(RunStore(options.folder).saved_runs):
            new.take()  # free version 0 before a checkpoint is read, since two models need twice the memory
            initial = None
        async with open_directory(identity, directory_options, options.folder, run=manifest.run) as directory:
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
    """Find a run, fetch its manifest from its peers, and take part.

    wanted: name of the run, or the beginning of its id; None: any.
    choose: picks one of the open runs that match.

    Raises:
        ConfigError, LookupFailedError, DirectoryError, FolderInUseError, OSError, ValueError: with a message for the
            user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    invite = directory_options.invite
    mine = (
        credentials_for_joining(invite, identity, options.folder)
        if invite
        else find_credentials(options.folder, wanted, identity)
    )
    kept = await asyncio.to_thread(_unfinished_run, options, wanted, mine, directory_options.initial_peers)
    patience_s = 0.0 if kept is None else WAKE_S
    known = mine.run if mine is not None else None if kept is None else kept.run
    async with open_directory(identity, directory_options, options.folder, patience_s, known) as directory:
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
        ConfigError, CheckpointError, DirectoryError, FolderInUseError, OSError, ValueError: with a message for the
            user.
    """
    logs.speak_as(identity.peer_id)
    device_of(options.learner.device)
    manifest = await asyncio.to_thread(RunStore(*folders).choose, wanted)
    require_membership(manifest, identity, options.folder, directory_options.invite, folders)
    await asyncio.to_thread(_check_machine_and_data, manifest, options, say)
    with hold(options.folder, manifest):
        directory_options = await asyncio.to_thread(_without_needless_peers, directory_options, options, manifest)
        patience_s = await asyncio.to_thread(_patience_s, manifest, options, folders)
        async with open_directory(identity, directory_options, options.folder, patience_s, manifest.run) as directory:
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
    """Take part in a run that others train.

    mine: credentials for a private run.
    kept: the run's manifest if this peer has a state of it. Then it continues from that state if no other peer answers.
    """
    async with observer_transport(Identity.ephemeral(), mine) as transport:
        try:
            peers = await RunLookup(directory).dial_any(transport, run, patience_s=FIND_S if kept is None else 0.0)
            manifest = await fetch_manifest(transport, peers, run)
        except AllRefuseError:
            raise
        except LookupFailedError as error:
            if kept is None:
                raise
            peers = []
            log.warning("no other peer of the run answers yet; continuing from the local state", reason=str(error))
            manifest = kept
        if peers:
            await fetch_prolongings(transport, peers, folder_of(options.folder, run), manifest)
    if not is_meant(wanted, manifest.config.name, run):
        raise ConfigError(f"the invite is to run {manifest.config.name} ({run[:12]}), not to {wanted}")
    say(f"joining run {manifest.config.name} ({run[:12]}), {Layout.of(manifest).elements:,} parameters")
    await asyncio.to_thread(_check_machine_and_data, manifest, options, say)
    with hold(options.folder, manifest) as folder:
        settings = msgspec.structs.replace(options, folder=folder)
        try:
            own = await asyncio.to_thread(RunStore(options.folder).load_state, manifest)
        except CheckpointError as error:
            log.warning("the checkpoint cannot be used; fetching the state from other peers", reason=str(error))
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
    """Take part as a peer that others can join, from the heaviest state on this machine.

    The caller holds the run's folder.

    initial: state to begin with if there is none on this machine.
    again: makes ``initial`` once more, for a training script whose state on this machine cannot be read.
    """
    try:
        own = await asyncio.to_thread(RunStore(options.folder, *folders).load_state, manifest)
    except CheckpointError as error:
        if not options.learner.script:
            raise
        log.warning("the checkpoint cannot be used; starting from version 0 or from other peers", reason=str(error))
        own = None
        if again is not None:
            _, initial = await asyncio.to_thread(again)
    folder = folder_of(options.folder, manifest.run)
    others = [place.parent for place in places(folders)]
    await asyncio.to_thread(MemberFiles(folder).take_over_end, manifest, others)
    mine = credentials_of(manifest, identity, folder, invite)
    asking = None if manifest.config.access == "open" else mine
    if initial is not None and (own is not None or await RunLookup(directory).has_state(manifest.run, asking)):
        initial.take()  # version 0 is not needed: this run has a newer state, here or at another peer
        initial = None
    is_over, is_serving = own is not None and has_finished(manifest, own.shards, folder), False
    if own is not None:
        initial = own
        say(describe_state(manifest, own))
        if is_over and not options.learner.script:
            if await RunLookup(directory).hears_of_end(manifest, folder, asking):
                is_over = has_finished(manifest, own.shards, folder)
            elif not options.stay_s:
                return Ending(0, finished_message(manifest, folder))
            else:
                is_serving = True  # the run is over: only serve its model
    settings = msgspec.structs.replace(options, folder=folder)
    goes = is_over and bool(options.learner.script) and not options.stay_s  # it ends before anybody could join
    return await take_part(
        manifest, settings, identity, directory, initial, mine, say, shows_how_to_join=not goes, only_serves=is_serving
    )


def _unfinished_run(
    options: PeerOptions, wanted: str | None, mine: Credentials | None, peers: Sequence[str]
) -> Manifest | None:
    """Return the manifest of the unfinished run that the user means, if it has a state here, else None.

    Without a name, it is the only unfinished run, provided that this folder has met one of ``peers`` before. Also None
    if this peer must not wait for others (it only fetches, or belongs to a training script)."""
    if options.is_fetching or options.learner.script:
        return None
    if mine is None and wanted is None and not has_met(options.folder, peers):
        return None
    found = RunStore(options.folder).saved_runs(wanted if mine is None else mine.run)
    here = [saved.manifest for saved in found.values() if not saved.is_finished]
    return here[0] if len(here) == 1 else None


def _patience_s(manifest: Manifest, options: PeerOptions, folders: Sequence[Path] = ()) -> float:
    """Return how many seconds a peer with a state of the run waits for other peers.

    A training script does not wait: it continues alone, and the others find it."""
    saved = RunStore(options.folder, *folders).saved_runs().get(manifest.run)
    return 0.0 if saved is None or saved.is_finished or options.learner.script else WAKE_S


def _without_needless_peers(
    directory_options: DirectoryOptions, options: PeerOptions, manifest: Manifest
) -> DirectoryOptions:
    """Return the options without initial peers if a script only needs the result of a finished run."""
    if not options.learner.script or not RunStore(options.folder).is_finished(manifest.run):
        return directory_options
    return msgspec.structs.replace(directory_options, initial_peers=())


def _check_machine_and_data(manifest: Manifest, options: PeerOptions, say: Callable[[str], None]) -> None:
    """Check that this machine can hold the model and publish it, and tell the user on which data its learner trains."""
    _check_uses(manifest.config, options)
    if (wanted := options.publish) is not None and wanted.format is not None:
        check_adapters(manifest, wanted.format, wanted.like)
    needed = Layout.of(manifest).elements * NODE_BYTES
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    allowed = options.machine.most_memory_bytes
    if allowed is not None and 2 * needed > allowed:  # the learner needs at least as much again
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


def _check_uses(config: RunConfig, options: PeerOptions) -> None:
    """Check that the run's model can be published and used as the user wants it.

    Raises:
        ExportError: it cannot.
    """
    wanted, own = options.publish, options.learner
    if options.watch.has_chat:
        check_generation(config, own.tokenizer or own.data)
    if wanted is not None:
        check_export(config, wanted.format or default_format(config.model), own.model, own.tokenizer, wanted.like)


def _require_script(manifest: Manifest, options: PeerOptions) -> None:
    """Check that a run of training scripts is joined from a script, before its state is fetched in vain."""
    config = manifest.config
    if config.model.kind == "external" and not options.is_follower and not options.learner.script:
        word = "ADDR" if config.access == "open" else "INVITE"
        has_state = any((options.folder / CHECKPOINT).glob("state-*.json"))
        where = f", state={str(options.folder.parent)!r}" if has_state else ""
        raise ConfigError(
            f"run {config.name} ({manifest.run[:12]}) is trained by training scripts; this is not one. Join it from "
            f"your script, p2pdiloco.DiLoCo(model, optimizer, run={config.name!r}, initial_peers=[{word}]{where}). "
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
    only_serves: bool = False,
) -> Ending:
    """Run a node until it ends, and again if the run is prolonged while it serves the model. SIGINT and SIGTERM shut it
    down gracefully.

    only_serves: the peer does not train until the run is prolonged.

    Raises:
        IdentityError: another process takes part with this identity.
        ConfigError: the run is trained by training scripts, and this is not one.
        CredentialsError: this peer is not a member.
        OSError: a port is taken, or a folder is not writable.
    """
    is_open = manifest.config.access == "open"
    mine = mine or Credentials(manifest.run, b"", identity)
    options = await asyncio.to_thread(apply_grant, manifest, mine, options, say)
    first = msgspec.structs.replace(options, is_follower=True) if only_serves else options
    _require_script(manifest, first)
    await refuse_duplicate_identity(directory, manifest.run, identity.peer_id, None if is_open else mine)
    if shows_how_to_join:
        await directory.points()  # names the bootstrap's addresses of both families, for invites
    places = (*directory.invite_addresses(), *directory.further_invite_addresses())
    await asyncio.to_thread(keep_addresses, options.folder, places)
    if shows_how_to_join:
        for invited in await asyncio.to_thread(how_to_join, manifest, mine, options.folder, directory):
            say(invited)
    tell = say if shows_how_to_join else None
    ran = partial(_run_node, manifest, identity=identity, directory=directory, mine=mine, say=say, tell=tell)
    if manifest.config.model.kind == "external" and not options.learner.script:
        options = first  # only a script can train on
    publish = options.publish
    with hold_publications(publish.folder, manifest.run) if publish else nullcontext():
        ending, goes_on = await ran(first, initial)
        while goes_on:
            end = end_of(manifest.config, await asyncio.to_thread(MemberFiles(options.folder).prolonged_to, manifest))
            say(f"run {manifest.config.name} is prolonged to {describe_end(end)}: going on")
            initial = await asyncio.to_thread(RunStore(options.folder.parent).load_state, manifest)
            ending, goes_on = await ran(options, initial)
    return ending


async def _run_node(
    manifest: Manifest,
    options: PeerOptions,
    initial: InitialState | None,
    *,
    identity: Identity,
    directory: Directory,
    mine: Credentials,
    say: Say,
    tell: Say | None,
) -> tuple[Ending, bool]:
    """Run a node until it ends; return its ending, and whether it should take part again, as the run is prolonged."""
    async with Node.open(manifest, options, identity, directory, initial, mine) as node:
        keeping = partial(
            keep_invite_addresses,
            manifest,
            mine,
            options.folder,
            directory,
            lambda: node.reachability.is_directory_dialable,
            tell,
        )
        node.host.keep(keeping, name="invite addresses")
        chat = None if node.chat is None else node.chat.answer
        with leave_when_asked(node, options.machine.spot):
            async with (
                serve_page(node.telemetry, options.folder, options.watch.page, say, chat),
                Notifier(options.watch.notify, identity.peer_id) as notifier,
            ):
                node.events.subscribe(Alert, notifier.tell)
                ending = await node.run(say, partial(_announce_end, node, notifier, say))
    return ending, node.goes_on


def _announce_end(node: Node, notifier: Notifier, say: Callable[[str], None], ending: Ending) -> None:
    """Show what this machine contributed, and notify if the run is complete, before the model is served."""
    if given := closing(node.telemetry.picture().account):
        say(given)
    if node.has_finished:
        notifier.tell(Alert(kind="done", text=ending.reason))
