"""What a training script's node begins with: a checkpoint if there is one, else version 0, and never both in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from p2pdiloco.node import launcher
from p2pdiloco.node.run_creation import found_from_script
from p2pdiloco.node.run_folder import RunStore
from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.ending import Ending
from p2pdiloco.peer.options import LearnerOptions, PeerOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.manifest import Manifest, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import ConfigError, folder_of
from p2pdiloco.swarm.run_lookup import DirectoryOptions, RunLookup
from p2pdiloco.training import founding_file
from p2pdiloco.transport.identity import Identity

CONFIG = RunConfig(name="story", model=ModelConfig(kind="external"), schedule=ScheduleConfig(fragments=1, sync_every=4))
WEIGHTS = torch.arange(6.0).view(2, 3)


class Brought:
    """Whoever takes part: what it brings."""

    def __init__(self) -> None:
        self.theta: torch.Tensor | None = None
        self.shows_how_to_join = False

    async def take_part(self, manifest: Manifest, *given: Any, shows_how_to_join: bool, only_serves: bool) -> Ending:
        assert not only_serves, "a script's node takes part"
        self.shows_how_to_join = shows_how_to_join
        initial = given[3]
        assert isinstance(initial, InitialState)
        self.theta = initial.take()[0]
        return Ending(0, "")


@contextlib.asynccontextmanager
async def nobody(*_: Any, **__: Any) -> AsyncIterator[None]:
    """A directory that is not asked."""
    yield


async def none_has_a_state(*_: Any) -> bool:
    return False


@pytest.mark.parametrize("what", ["nothing", "a checkpoint", "a spoilt one", "the end", "the end, served"])
def test_a_scripts_node_goes_on_from_its_checkpoint_or_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    brought, identity = Brought(), Identity.ephemeral()
    path = tmp_path / founding_file.NAME
    founding_file.write(path, CONFIG, [("w", WEIGHTS)], frozenset())
    manifest, initial = found_from_script(path, identity.peer_id)
    folder = folder_of(tmp_path, manifest.run) / "checkpoint"
    taken: list[InitialState] = []
    take = InitialState.take
    if what != "nothing":
        checkpoint.save(folder, manifest, initial.shards, *initial.take(), keep=1)
    if what == "a spoilt one":
        for tensors in folder.glob("*.safetensors"):
            tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x55")

    def load_state(*given: Any) -> InitialState | None:
        assert len(taken) == (what != "nothing"), "version 0 is let go before a checkpoint is read"
        return read(*given)

    def noted(self: InitialState) -> Any:
        taken.append(self)
        return take(self)

    read = RunStore.load_state
    monkeypatch.setattr(RunStore, "load_state", load_state)
    monkeypatch.setattr(RunLookup, "has_state", none_has_a_state)
    for name, value in (
        ("open_directory", nobody),
        ("take_part", brought.take_part),
        ("has_finished", lambda *_: "the end" in what),
    ):
        monkeypatch.setattr(launcher, name, value)
    monkeypatch.setattr(InitialState, "take", noted)
    options = PeerOptions(
        folder=tmp_path, learner=LearnerOptions(script="there"), stay_s=9.0 if "served" in what else None
    )
    directory = DirectoryOptions(listen=())
    asyncio.run(launcher.start_from_script(path, options, directory, identity, lambda _: None))
    assert brought.theta is not None
    assert torch.equal(brought.theta, WEIGHTS.view(-1))
    assert brought.shows_how_to_join is (what != "the end"), "who would join a run that is over, and goes at once?"


@pytest.mark.parametrize("options", [{}, {"is_follower": True}, {"learner": LearnerOptions(script="there")}])
def test_who_has_no_script_is_refused_by_a_run_of_scripts_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    class Begun(Exception):  # noqa: N818
        """A peer that takes part."""

    async def begin(*_: Any) -> None:
        raise Begun

    monkeypatch.setattr(launcher, "refuse_duplicate_identity", begin)
    path, identity = tmp_path / founding_file.NAME, Identity.ephemeral()
    founding_file.write(path, replace(CONFIG, access="open"), [("w", WEIGHTS)], frozenset())
    manifest, _ = found_from_script(path, identity.peer_id)
    own = PeerOptions(folder=tmp_path / "run", **options)
    with pytest.raises(Begun if options else ConfigError) as error:
        asyncio.run(launcher.take_part(manifest, own, identity, None, None, None, lambda _: None))  # type: ignore[arg-type]
    if not options:
        for word in ("run='story', initial_peers=[ADDR]", "p2pdiloco join ADDR --follow", "p2pdiloco fetch ADDR"):
            assert word in str(error.value)
