"""From a command to a running peer: identity, directory, manifest, node, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from p2pdiloco.node.founding import ConfigError, found, found_from_script, is_founded_from, with_own_places
from p2pdiloco.node.lookup import (
    RUN_RECORD_LIFE_S,
    LookupFailedError,
    RunRecord,
    dial_any,
    fetch_manifest,
    list_runs,
    observer_transport,
)
from p2pdiloco.node.node import Node
from p2pdiloco.peer import incoming
from p2pdiloco.peer.checkpoint import CheckpointError, best_of, load, load_all
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import Ending, InitialState
from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.runtime import addresses, logs
from p2pdiloco.runtime.directory import Directory, DirectoryError
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.training.sources import tell_sources

log = logs.get("session")

ANNOUNCE_RUN_S = 20.0
NODE_BYTES = 20
"""A parameter's, in a node: state and momentum, and what it shares with its learner."""


class DirectoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How this peer takes part in the directory."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def open_directory(
    identity: Identity, options: DirectoryOptions, folder: Path | None
) -> AsyncIterator[Directory]:
    """The directory, with a cache of its peers' addresses in ``folder`` (None: no cache).

    Raises:
        DirectoryError: none of the initial (and remembered) peers answers.
        ValueError: an address is malformed, or names no peer.
        OSError: a port is taken.
    """
    for text in options.initial_peers:
        if addresses.parse(text).peer is None:
            raise ValueError(f"{text} lacks the peer id at its end (/p2p/12D3KooW...): copy the whole address")
    directory = Directory(
        identity,
        listen=list(options.listen),
        announce=list(options.announce),
        initial_peers=list(options.initial_peers),
        cache_path=None if folder is None else folder / "directory.json",
    )
    async with directory:
        yield directory


async def start(
    config: RunConfig,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    say: Callable[[str], None],
) -> Ending:
    """Found a run and train it; go on from this folder's checkpoint if it holds one of the same configuration.

    Raises:
        ConfigError, DirectoryError, CheckpointError, OSError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    options = with_own_places(options, config)
    manifest, initial = await asyncio.to_thread(_founded, config, options, identity, say)
    return await _lead(manifest, options, directory_options, identity, initial, options.folder, say)


async def start_from_script(
    foundation: Path,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    say: Callable[[str], None],
) -> Ending:
    """Found the run of a training script, or go on with it from this folder's checkpoint.

    Raises:
        ConfigError, DirectoryError, OSError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    manifest, initial = await asyncio.to_thread(_founded_by_script, foundation, options, identity, say)
    mine = msgspec.structs.replace(options, folder=options.folder / manifest.run[:12])
    return await _lead(manifest, mine, directory_options, identity, initial, options.folder, say)


async def join(
    wanted: str | None,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    choose: Callable[[dict[RunId, RunRecord]], RunId],
    say: Callable[[str], None],
) -> Ending:
    """Find a run, get its manifest from its peers, and take part.

    Raises:
        ConfigError, LookupFailedError, DirectoryError, OSError, ValueError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    async with open_directory(identity, directory_options, options.folder) as directory:
        run = choose(pick_runs(await list_runs(directory), wanted))
        async with observer_transport(Identity.ephemeral()) as transport:
            peers = await dial_any(directory, transport, run)
            manifest = await fetch_manifest(transport, peers, run)
        say(f"joining run {manifest.config.name} ({run[:12]}), {Layout.of(manifest).elements:,} parameters")
        await asyncio.to_thread(_has_what_it_takes, manifest, options, say)
        mine = msgspec.structs.replace(options, folder=options.folder / run[:12])
        return await take_part(manifest, mine, identity, directory, await _own_state(mine.folder, manifest))


async def resume(
    folders: Sequence[Path],
    wanted: str | None,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    say: Callable[[str], None],
) -> Ending:
    """Go on with a run from the best of the checkpoints under ``folders``.

    Raises:
        ConfigError, CheckpointError, DirectoryError, OSError, ValueError: with a sentence for the user.
    """
    logs.speak_as(identity.peer_id)
    manifest, initial = await asyncio.to_thread(_resumed, folders, wanted, say)
    await asyncio.to_thread(_has_what_it_takes, manifest, options, say)
    mine = msgspec.structs.replace(options, folder=options.folder / manifest.run[:12])
    return await _lead(manifest, mine, directory_options, identity, initial, options.folder, say)


async def _lead(
    manifest: Manifest,
    options: PeerOptions,
    directory_options: DirectoryOptions,
    identity: Identity,
    initial: InitialState,
    cache: Path,
    say: Callable[[str], None],
) -> Ending:
    """Take part as one whom others join: tell how."""
    async with open_directory(identity, directory_options, cache) as directory:
        for address in directory.visible_addresses():
            say(f"to join from another machine:  p2pdiloco join {address} --run {manifest.config.name}")
        return await take_part(manifest, options, identity, directory, initial)


# What is read or made here is as large as the model, some of it several times: it lives in functions that return.


def _founded(
    config: RunConfig, options: PeerOptions, identity: Identity, say: Callable[[str], None]
) -> tuple[Manifest, InitialState]:
    """The run of the folder's checkpoint, or a new one."""
    earlier = load(options.folder / "checkpoint")
    if earlier is None:
        return found(config, identity.peer_id, options)
    if not is_founded_from(earlier.manifest.config, config):
        raise CheckpointError(
            f"{options.folder} holds a checkpoint of another configuration: give --state another folder, or use join"
        )
    say(f"going on with run {earlier.manifest.run[:12]} from the checkpoint in {options.folder}")
    return earlier.manifest, InitialState(earlier.shards, earlier.theta, earlier.momentum)


def _founded_by_script(
    foundation: Path, options: PeerOptions, identity: Identity, say: Callable[[str], None]
) -> tuple[Manifest, InitialState]:
    """The script's run from this peer's checkpoint of it, or from its beginning."""
    manifest, initial = found_from_script(foundation, identity.peer_id)
    folder = options.folder / manifest.run[:12]
    try:
        earlier = load(folder / "checkpoint")
    except CheckpointError as error:
        log.warning("checkpoint not used, the run goes on from its beginning or its peers", reason=str(error))
        earlier = None
    if earlier is None or earlier.manifest.run != manifest.run:
        return manifest, initial
    say(f"going on with run {manifest.run[:12]} from the checkpoint in {folder}")
    return manifest, InitialState(earlier.shards, earlier.theta, earlier.momentum)


def _resumed(folders: Sequence[Path], wanted: str | None, say: Callable[[str], None]) -> tuple[Manifest, InitialState]:
    """The best of the checkpoints of the run that is wanted."""
    every = load_all(folders)
    chosen = [c for c in every if wanted in (None, c.manifest.config.name) or c.manifest.run.startswith(wanted or "")]
    if not chosen:
        raise CheckpointError(f"no checkpoint is of a run {wanted!r}")
    best = best_of(chosen)
    manifest, heads = best.manifest, [proof.state.head for proof in best.shards]
    versions = f"{min(h.version for h in heads)} to {max(h.version for h in heads)}"
    say(f"going on with run {manifest.config.name} ({manifest.run[:12]}) from {len(chosen)} checkpoints:")
    say(f"versions {versions} of its shards, {max(h.tokens for h in heads):,} tokens")
    return manifest, InitialState(best.shards, best.theta, best.momentum)


async def _own_state(folder: Path, manifest: Manifest) -> InitialState | None:
    """What this peer had of the run when it last took part, or had downloaded when its join was cut off; the swarm has
    the rest."""
    try:
        earlier = await asyncio.to_thread(load, folder / "checkpoint")
    except CheckpointError as error:
        log.warning("checkpoint not used, the state comes from the swarm", reason=str(error))
        earlier = None
    if earlier is not None and earlier.manifest.run == manifest.run:
        return InitialState(earlier.shards, earlier.theta, earlier.momentum)
    kept = await asyncio.to_thread(incoming.load, folder / incoming.INCOMING, manifest)
    return None if kept is None else InitialState(kept.shards, kept.theta, kept.momentum)


def _has_what_it_takes(manifest: Manifest, options: PeerOptions, say: Callable[[str], None]) -> None:
    """Whether this machine can hold the model and has what its learner trains on, which is told.

    Raises:
        ConfigError: it cannot hold the model.
        ValueError: the data, the tokenizer or the adapters' model is not named, or not there.
    """
    needed = Layout.of(manifest).elements * NODE_BYTES
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if needed > memory:
        raise ConfigError(
            f"a node of run {manifest.config.name} needs {needed / 1e9:,.1f} GB of memory for the model, this machine "
            f"has {memory / 1e9:,.1f} GB: join from a larger one"
        )
    if not options.is_follower and not options.learner:
        for line in tell_sources(manifest.config, options.data, options.tokenizer, options.model):
            say(line)


def pick_runs(runs: dict[RunId, RunRecord], wanted: str | None) -> dict[RunId, RunRecord]:
    """Those called ``wanted`` (a name, or the beginning of an id), or all.

    Raises:
        LookupFailedError: there is none.
    """
    if not runs:
        raise LookupFailedError("the directory knows no run: has anybody started one with this bootstrap address?")
    if wanted is None:
        return runs
    found = {run: record for run, record in runs.items() if record.name == wanted or run.startswith(wanted)}
    if not found:
        names = ", ".join(sorted(f"{record.name} ({run[:12]})" for run, record in runs.items()))
        raise LookupFailedError(f"no run is called {wanted!r}; the directory knows: {names}")
    return found


async def take_part(
    manifest: Manifest, options: PeerOptions, identity: Identity, directory: Directory, initial: InitialState | None
) -> Ending:
    """Run a node until it ends, with the run announced and signals heeded."""
    async with Node(manifest, options, identity, directory, initial) as node:
        announcing = asyncio.create_task(_announce(manifest, directory), name="announce run")
        try:
            with leave_on_signals(node):
                return await node.run()
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)


@contextlib.contextmanager
def leave_on_signals(node: Node) -> Iterator[None]:
    """SIGINT and SIGTERM leave in order; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    heard = 0

    def on_signal(name: str) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            log.info("leaving in order; once more to leave at once", signal=name)
            node.peer.request_leave(name)
        else:
            node.peer.abandon(name)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _announce(manifest: Manifest, directory: Directory) -> None:
    """Keep the run's record alive in the directory."""
    record = msgspec.msgpack.encode(RunRecord(manifest.config.name, Layout.of(manifest).elements))
    while True:
        try:
            await directory.publish_run(manifest.run, record, RUN_RECORD_LIFE_S)
        except DirectoryError as error:
            log.debug("run not announced", reason=str(error))
        await asyncio.sleep(ANNOUNCE_RUN_S)
