"""Chat: texts are continued by the version that is the newest when they are asked for."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from test_cli_results import leave

from p2pdiloco.cli.main import main
from p2pdiloco.node import chat, launcher
from p2pdiloco.node.chat import Chat, ChatQuestion, TextGenerator
from p2pdiloco.node.results import Result, find_result
from p2pdiloco.observability.snapshot import ChatBusyError
from p2pdiloco.peer.options import PeerOptions, WatchOptions
from p2pdiloco.protocol.manifest import DataConfig, ModelConfig, RunConfig
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training.export import ExportError
from p2pdiloco.training.generation import Sampling
from p2pdiloco.transport.identity import KEY_FILE


@pytest.fixture
def question(tmp_path: Path) -> ChatQuestion:
    """A question to a run of which there is version 0."""
    manifest = leave(tmp_path / "state", "story")
    folder = str(folder_of(tmp_path / "state", manifest.run))
    return ChatQuestion(
        source=folder, state=folder, run=manifest.run, prompt="def ", sampling=Sampling(tokens=9, seed=1)
    )


def test_the_model_is_built_once_for_each_version(question: ChatQuestion, monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = find_result(question.source, Path(question.state), question.run), list[int]()

    def find(*_: object) -> Result:
        read.append(len(read))
        theta = torch.full_like(found.checkpoint.theta, float(len(read)))
        return found._replace(step=len(read), checkpoint=msgspec.structs.replace(found.checkpoint, theta=theta))

    monkeypatch.setattr(chat, "find_result", find)
    generator = TextGenerator()
    first = [generator.answer(question) for _ in range(3)]
    assert first[0].text.startswith("def ")
    assert len(first[0].text) > len("def ")
    assert {one.step for one in first} == {1}
    assert len(read) == 1
    for path in Path(question.state).rglob("state-*.json"):
        path.write_bytes(path.read_bytes())
    assert generator.answer(question).step == 2
    other = msgspec.structs.replace(question, sampling=Sampling(tokens=9, seed=2))
    assert generator.answer(other).step == 2
    assert len(read) == 2


def test_a_run_by_its_name_below_the_state_folder_is_followed(tmp_path: Path) -> None:
    """As of the demo, whose peers have their folders in one."""
    leave(tmp_path / "state" / "peer-A", "story")
    (tmp_path / "state" / "peer-A" / KEY_FILE).touch()
    question = ChatQuestion(source="story", state=str(tmp_path / "state"), prompt="def ", sampling=Sampling(tokens=2))
    generator = TextGenerator()
    assert generator.answer(question).text.startswith("def ")
    assert generator._seen
    built = generator._generate
    for path in tmp_path.rglob("state-*.json"):
        path.write_bytes(path.read_bytes())
    assert generator.answer(question).text
    assert generator._generate is not built


def test_what_is_missing_is_told(question: ChatQuestion, tmp_path: Path) -> None:
    nowhere = msgspec.structs.replace(question, source=str(tmp_path), state=str(tmp_path / "nothing"))
    for path in Path(question.state).rglob("state-*.json"):
        path.unlink()
    for asked in (nowhere, question):
        reply = TextGenerator().answer(asked)
        assert reply.error
        assert not reply.text


@pytest.mark.heavy
def test_the_page_is_answered_by_a_process_of_its_own_by_the_newest_version(
    question: ChatQuestion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    can_save = [True]

    async def save() -> bool:
        saved.append(0)
        return can_save[0]

    async def work() -> None:
        node = Chat(question, tmp_path / "chat.log", save)
        try:
            first = asyncio.ensure_future(node.answer("import "))
            await asyncio.sleep(0)
            with pytest.raises(ChatBusyError):
                await node.answer("class ")
            texts = [(await first).text, (await node.answer("import ")).text]
            assert all(text.startswith("import ") for text in texts)
            assert texts[0] != texts[1], "asked again, it writes something else"
            assert len(saved) == 1, "the last version is not old"
            monkeypatch.setattr(chat, "FRESH_S", 0.0)
            process = node._process._process
            assert process is not None
            psutil.Process(process.pid).kill()
            await process.wait()
            assert "its process" in (await node.answer("import ")).error
            assert (await node.answer("import ")).text
            assert len(saved) == 3
            can_save[0] = False
            reply = await node.answer("import ")
            assert (reply.text, reply.error) == ("", chat.NO_CHECKPOINT), "an old version must not pass for a new one"
        finally:
            process = node._process._process
            node.close()
            if process is not None:
                await process.wait()

    asyncio.run(work())


def test_the_command_continues_each_line(
    question: ChatQuestion, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_logging: None
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def \nimport \n"))
    assert main(["chat", question.source, "--tokens", "8"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("[the model at step 0]\ndef ")
    assert "\nimport " in told
    for path in Path(question.state).rglob("state-*.json"):
        path.unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("def \n"))
    assert main(["chat", question.source]) != 0


@pytest.mark.parametrize(
    ("model", "data", "fix"),
    [
        (ModelConfig(kind="external"), DataConfig(), "load_into"),
        (ModelConfig(vocabulary=300), DataConfig(kind="jsonl"), "--tokenizer FOLDER"),
        (ModelConfig(), DataConfig(), ""),
    ],
    ids=["a script's model", "tokens without a tokenizer", "bytes"],
)
def test_what_no_text_can_be_generated_with_is_told_before_the_peer_starts(
    tmp_path: Path, model: ModelConfig, data: DataConfig, fix: str
) -> None:
    options = PeerOptions(folder=tmp_path, watch=WatchOptions(has_chat=True))
    config = RunConfig(name="story", model=model, data=data)
    if not fix:
        launcher._check_uses(config, options)
        return
    with pytest.raises(ExportError, match=fix):
        launcher._check_uses(config, options)
    launcher._check_uses(config, PeerOptions(folder=tmp_path))
