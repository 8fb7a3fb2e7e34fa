"""The examples in the guide run as printed, but join no run. Those of hivemind and torchft in docs/comparison.md are
checked against the libraries' signatures; tests/integration/test_comparison.py trains with p2pdiloco's."""

from __future__ import annotations

import inspect
import re
import socket
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import p2pdiloco
from p2pdiloco.node.run_creation import decode_config

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("scripts", "fine-tuning")
OPTIONAL = ("transformers", "peft", "lightning")


def examples(page: str, language: str = "python") -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Ids(Dataset[Any]):
    """What a trainer's dataset gives."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), float(index)), "labels": torch.zeros(())}


class Network(nn.Module):
    """Its loss, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss = (self.layers(x).squeeze(-1) - x.sum(-1)).square().mean()
        return loss if labels is None else {"loss": loss}


def names() -> dict[str, Any]:
    """What the reader has."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, 8)
    given: dict[str, Any] = {
        "torch": torch,
        "p2pdiloco": p2pdiloco,
        "dist": torch.distributed,
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "INVITE": "/ip4/127.0.0.1/tcp/9",
        "model": model,
        "optimizer": optimizer,
        "muon": optimizer,
        "adamw": optimizer,
        "batch": batch,
        "batches": [batch] * 2,
        "loss": model(batch),
        "data": Ids(),
        "dataset": Ids(),
        "peak": 0.1,
        "tokenizer": None,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
    }
    given["outer"] = p2pdiloco.DiLoCo(model, optimizer, run="story", tokens_per_step=8)
    if find_spec("lightning"):
        given |= lightning_names(model)
    return given


def lightning_names(model: nn.Module) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"module": Module(), "loader": DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)))}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No node is started. One rank, of however many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(p2pdiloco.DiLoCo, "start", lambda self: self)
    monkeypatch.setattr(p2pdiloco.DiLoCo, "__enter__", lambda self: self)
    monkeypatch.setattr(p2pdiloco.DiLoCo, "load_global", lambda self: None)
    monkeypatch.setattr(p2pdiloco.DiLoCo, "total_steps", 100)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model in ``base``, and an adapter for it."""
    import peft
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder / "base")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    return folder


CASES = [(page, text) for page in PAGES for text in examples(page)]


@pytest.mark.heavy
@pytest.mark.parametrize(("page", "text"), CASES, ids=[f"{page} {i}" for i, (page, _) in enumerate(CASES)])
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs_as_printed(
    page: str, text: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in OPTIONAL:
        if re.search(rf"^(?:from|import) {library}\b", text, re.MULTILINE):
            pytest.importorskip(library)
    if '"base"' in text:
        monkeypatch.chdir(request.getfixturevalue("base"))
    text = re.sub(r"max_steps=\d+", "max_steps=2", text)
    exec(compile(text, f"docs/{page}.md", "exec"), names())


def test_a_configuration_in_a_page_is_sound() -> None:
    (text,) = examples("fine-tuning", "toml")
    assert decode_config(text.encode(), Path("full.toml")).model.folder == "base"


# -- docs/comparison.md: one task, three libraries ---------------------------------------------------------------------


class Pretended:
    """An object of a foreign library, made as its signature says, that has ended at once."""

    def __init__(self, kind: type, **answers: Any) -> None:
        self._kind, self._answers = kind, answers

    def __call__(self, *given: Any, **named: Any) -> Any:
        inspect.signature(self._kind).bind(*given, **named)
        return self

    def __getattr__(self, name: str) -> Any:
        assert hasattr(self._kind, name) or name in self._answers, f"{self._kind.__name__} has no {name}"
        return self._answers.get(name, lambda *_, **__: None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By library; their common task can be imported."""
    task, *others = examples("comparison")
    module = ModuleType("task")
    exec(compile(task, "task.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "task", module)
    monkeypatch.setattr(sys, "argv", ["program", "/ip4/192.0.2.1/tcp/1"])
    return dict(zip(("p2pdiloco", "torchft", "hivemind"), others, strict=True))


@pytest.mark.heavy
@pytest.mark.usefixtures("offline")
def test_the_comparisons_own_program_runs(programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pdiloco.DiLoCo, "is_complete", property(lambda self: True))
    exec(compile(programs["p2pdiloco"], "comparison.md", "exec"), {})


@pytest.mark.heavy
@pytest.mark.usefixtures("offline")
def test_the_comparisons_hivemind_program_fits_its_signatures(
    programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hivemind", "hivemind.dht", "hivemind.utils"):  # of which a directory loads no ``__init__``
        monkeypatch.delitem(sys.modules, name, raising=False)
    hivemind = pytest.importorskip("hivemind")
    dht = Pretended(hivemind.DHT, get_visible_maddrs=list)
    monkeypatch.setattr(hivemind, "DHT", dht)
    monkeypatch.setattr(hivemind, "Optimizer", Pretended(hivemind.Optimizer, local_epoch=10**6))
    exec(compile(programs["hivemind"], "comparison.md", "exec"), {})


@pytest.mark.heavy
@pytest.mark.usefixtures("offline")
def test_the_comparisons_torchft_program_fits_its_signatures(
    programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torchft = pytest.importorskip("torchft")
    from torchft import local_sgd

    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setattr(torchft, "Manager", Pretended(torchft.Manager, current_step=lambda: 10**6))
    monkeypatch.setattr(local_sgd, "DiLoCo", Pretended(local_sgd.DiLoCo))
    exec(compile(programs["torchft"], "comparison.md", "exec"), {})
