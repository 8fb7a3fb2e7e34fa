"""Mistakes in training scripts: each is told at construction, with the remedy, and nothing is founded."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import p2pdiloco
from p2pdiloco.training.node_link import Counts
from p2pdiloco.training.script_arguments import DiLoCoError, loss, tokens_per_step, whole
from p2pdiloco.training.step_check import StepCheck
from p2pdiloco.training.swarm_view import CallHook


def linear() -> nn.Module:
    """A model with two tensors."""
    return nn.Linear(4, 4)


def sgd(model: nn.Module) -> Any:
    """An ordinary optimizer of all its parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def having(tensor: torch.Tensor) -> Callable[[], nn.Module]:
    """A model with one parameter more."""

    def made() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_parameter("odd", nn.Parameter(tensor.clone().contiguous() if tensor.is_complex() else tensor))
        return model

    return made


def packed() -> nn.Module:
    """A model with a parameter that is not one tensor inside, as quantized ones are."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    return model


def without_groups(model: Any) -> Any:
    """An optimizer that keeps its parameters elsewhere, as some wrappers do."""
    optimizer = sgd(model)
    del optimizer.param_groups
    return optimizer


def spoilt() -> nn.Module:
    """A model whose initialization went wrong."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, math.nan)
    return model


class Mistake(NamedTuple):
    """What a script gives instead of what is meant, and words of the complaint."""

    said: str
    given: dict[str, Any] = {}  # noqa: RUF012 - never changed
    model: Callable[[], Any] = linear
    optimizer: Callable[[Any], Any] = sgd


def a_model(made: Callable[[], Any], said: str) -> Mistake:
    """A wrong model, beside a sound optimizer."""
    return Mistake(said, model=made, optimizer=lambda _: sgd(linear()))


def an_optimizer(made: Callable[[Any], Any], said: str) -> Mistake:
    """A wrong optimizer of a sound model."""
    return Mistake(said, optimizer=made)


def zero_of(optimizer: Any) -> Any:
    """Like DeepSpeed's, as far as it is known by: it is no optimizer of torch, and has one."""
    kind = type("DeepSpeedZeroOptimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
    return kind(optimizer=optimizer)


def engine() -> nn.Module:
    """Like DeepSpeed's engine around a model."""
    model = linear()
    model.optimizer = zero_of(None)
    return model


WHOLE = "write a whole number"
EMPTY = "To create the run here, leave initial_peers out, or add found=True"
MISTAKES = {
    # -- what is trained
    "a state_dict as model": a_model(lambda: linear().state_dict(), "of type OrderedDict: give the torch.nn.Module"),
    "parameters as model": a_model(lambda: list(linear().parameters()), "of type list: give the torch.nn.Module"),
    "no model": a_model(lambda: None, "of type NoneType: give the torch.nn.Module"),
    "a class as model": a_model(lambda: nn.Linear, "a class: give the torch.nn.Module"),
    "a frozen model": a_model(lambda: linear().requires_grad_(False), "there is nothing to exchange"),
    "a model without parameters": a_model(nn.ReLU, "there is nothing to exchange"),
    "complex parameters": Mistake("view_as_real", model=having(torch.zeros(2, dtype=torch.complex64))),
    "an empty parameter": Mistake("odd is empty (shape (0,)): remove it", model=having(torch.empty(0))),
    "a sparse parameter": Mistake("use p.to_dense()", model=having(torch.eye(3).to_sparse())),
    "a transposed parameter": Mistake("p.data.contiguous()", model=having(torch.zeros(4, 5).t())),
    "a model on meta": Mistake("to_empty", model=lambda: nn.Linear(4, 4, device="meta")),
    "a packed parameter": a_model(packed, "weight is a TwoTensor, which packs or quantizes its values: freeze it"),
    "a lazy model": Mistake("call the model once with a batch", model=lambda: nn.LazyLinear(3)),
    "a model of NaN": Mistake("not finite (NaN or inf): initialize the model anew", model=spoilt),
    # -- what trains it
    "no optimizer": an_optimizer(lambda _: None, "optimizer is None: give the torch.optim.Optimizer"),
    "no optimizer in a list": an_optimizer(lambda _: [], "optimizer is empty"),
    "a scheduler in a list": an_optimizer(
        lambda model: [sgd(model), torch.optim.lr_scheduler.StepLR(sgd(model), 1)], "a StepLR: give its optimizer"
    ),
    "another model's optimizer in a list": an_optimizer(
        lambda model: [sgd(model), sgd(linear())], "torch.nn.ModuleList([first, second])"
    ),
    "an optimizer's class": an_optimizer(lambda _: torch.optim.SGD, "a class: give an instance"),
    "a scheduler": an_optimizer(
        lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1), "a StepLR: give its optimizer"
    ),
    "another model's optimizer": an_optimizer(lambda _: sgd(linear()), "holds none of the model's"),
    "an optimizer without groups": an_optimizer(without_groups, "holds none of the model's"),
    "an average as model": Mistake("holds none", model=linear, optimizer=lambda model: sgd(copy.deepcopy(model))),
    "DeepSpeed's optimizer": an_optimizer(
        lambda model: zero_of(sgd(model)), "DeepSpeed's DeepSpeedZeroOptimizer trains"
    ),
    "DeepSpeed's, in accelerate": an_optimizer(
        lambda model: SimpleNamespace(optimizer=zero_of(sgd(model))), "fully_shard(model) and a torch optimizer"
    ),
    "DeepSpeed's engine as model": a_model(engine, "remove the DeepSpeed configuration"),
    "a schedule-free wrapper": an_optimizer(
        lambda model: type("ScheduleFreeWrapper", (SimpleNamespace,), {})(base=sgd(model)), "take AdamWScheduleFree"
    ),
    "a scaler's name": Mistake("give the torch.amp.GradScaler", {"grad_scaler": "fp16"}),
    "an optimizer as scaler": Mistake("give the torch.amp.GradScaler", {"grad_scaler": sgd(linear())}),
    # -- how much
    "no tokens_per_step": Mistake("tokens_per_step is missing: write how many tokens", {"tokens_per_step": None}),
    "tokens as text": Mistake(WHOLE, {"tokens_per_step": "8192"}),
    "negative tokens": Mistake(WHOLE, {"tokens_per_step": -5}),
    "half a token": Mistake("Convert it with int(...)", {"tokens_per_step": 8.5}),
    "tokens that are NaN": Mistake(WHOLE, {"tokens_per_step": math.nan}),
    "tokens as True": Mistake(WHOLE, {"tokens_per_step": True}),
    "too many tokens": Mistake("from 0 to 16777216", {"tokens_per_step": 1 << 25}),
    "a batch as tokens": Mistake(WHOLE, {"tokens_per_step": torch.ones(2, 3)}),
    # -- with whom
    "an empty variable": Mistake(EMPTY, {"initial_peers": ""}),
    "a variable that is not set": Mistake(EMPTY, {"initial_peers": None}),
    "a blank invite": Mistake(EMPTY, {"initial_peers": " \n"}),
    "an empty invite in a list": Mistake(EMPTY, {"initial_peers": [""]}),
    "no text in a list": Mistake(EMPTY, {"initial_peers": [None]}),
    "a number as peers": Mistake("write an invite or an address", {"initial_peers": 5}),
    "a number among peers": Mistake("as a text", {"initial_peers": ["/ip4/192.0.2.1/tcp/1", 5]}),
    "bytes as peers": Mistake("write an invite or an address", {"initial_peers": b"p2pdiloco"}),
    "a dictionary of peers": Mistake("write an invite or an address", {"initial_peers": {"a": 1}}),
    "a host as peer": Mistake("neither an invite (p2pdiloco...) nor a multiaddr", {"initial_peers": "192.0.2.1:31337"}),
    "a run's name as peer": Mistake("neither an invite", {"initial_peers": "story"}),
    "half an invite": Mistake("copy it again", {"initial_peers": "p2pdiloco"}),
    "found as text": Mistake("write True (create the run)", {"found": "yes"}),
    "found as number": Mistake("write True (create the run)", {"found": 1}),
    "peers to wait for as text": Mistake(WHOLE, {"wait_for_peers": "2"}),
    "no peers to wait for": Mistake("wait_for_peers = 0", {"wait_for_peers": 0}),
    "half a peer to wait for": Mistake(WHOLE, {"wait_for_peers": 2.5}),
    "a hook that is none": Mistake("give a function", {"on_update": "masters"}),
    "ranks as group": Mistake("torch.distributed.new_group", {"process_group": [0, 1]}),
    # -- where, and how long
    "a number as state": Mistake("write the path of a folder", {"state": 5}),
    "an empty state": Mistake("write the path of a folder", {"state": ""}),
    "a file as state": Mistake("is a file: write the path of a folder", {"state": __file__}),
    "a stay as text": Mistake("write seconds", {"stay_s": "10"}),
    "a stay before now": Mistake("write seconds", {"stay_s": -1.0}),
    "a stay that is NaN": Mistake("write seconds", {"stay_s": math.nan}),
    "an endless stay": Mistake("write seconds", {"stay_s": math.inf}),
    "options as text": Mistake("write a list of texts", {"node_options": "--up 20mbit"}),
    "a number among options": Mistake("numbers in quotes, too", {"node_options": ["--leave-s", 60]}),
    "no options": Mistake("write a list of texts", {"node_options": None}),
    "the state among options": Mistake("use state=", {"node_options": ["--state=here"]}),
    "a misspelt argument": Mistake("no argument total_step: did you mean total_steps?", {"total_step": 5}),
    "an argument of others": Mistake("DiLoCo has no argument epochs: it has model, optimizer, run", {"epochs": 5}),
    "the peers among options": Mistake("use initial_peers=", {"node_options": ["--bootstrap", "x"]}),
    # -- the run (all its keys: test_training_founding_file.py)
    "an empty name": Mistake("run = ''", {"run": ""}),
    "a number as name": Mistake("run = 5: write a text", {"run": 5}),
    "a path as name": Mistake("write a text of letters, digits", {"run": "runs/story"}),
    "steps as text": Mistake("total_steps = '20_000': write a whole number", {"total_steps": "20_000"}),
    "steps with a point": Mistake("total_steps = 10000.0: write a whole number", {"total_steps": 1e4}),
    "fewer steps than rounds": Mistake(
        "total_steps = 20 is less than sync_every = 24", {"total_steps": 20, "sync_every": 24}
    ),
    "more fragments than tensors": Mistake("at most the model's 2 tensors", {"n_fragments": 3, "sync_every": 24}),
    "a rule that is none": Mistake("merge = 'mean': choose one of direct, rda", {"merge": "mean"}),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_the_remedy_before_anything_is_founded(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = mistake.model()
    with pytest.raises(p2pdiloco.DiLoCoError) as told:
        p2pdiloco.DiLoCo(model, mistake.optimizer(model), **{"run": "story", "tokens_per_step": 8, **mistake.given})
    assert mistake.said in str(told.value)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())
    if isinstance(model, nn.Module) and "no argument" not in mistake.said:  # alone, nothing is asked of it
        p2pdiloco.DiLoCo(model, mistake.optimizer(model), **{**mistake.given, "run": None})


def test_there_are_sixty_of_them() -> None:
    assert len(MISTAKES) >= 60


SOUND: dict[str, dict[str, Any]] = {
    "an empty variable of who founds": {"initial_peers": "", "found": True},
    "no peers, as a list": {"initial_peers": []},
    "tokens of numpy": {"tokens_per_step": numpy.int64(8)},
    "tokens of torch": {"tokens_per_step": torch.tensor(8)},
    "each step is counted": {"tokens_per_step": 0},
    "a path": {"state": Path("here")},
    "a scaler": {"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)},
    "a stay": {"stay_s": 10},
    "a rule": {"merge": "direct", "outer_lr": 1.0, "outer_momentum": 0.0},
}


@pytest.mark.parametrize("given", SOUND.values(), ids=SOUND)
def test_what_is_no_mistake_is_taken(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = linear()
    options = {"run": "story", "state": tmp_path / "state", "tokens_per_step": 8}
    outer = p2pdiloco.DiLoCo(model, sgd(model), **{**options, **given})
    assert outer._request is not None
    assert outer._request.foundation is not None
    os.chdir("/")
    assert outer._state.is_absolute()
    assert outer._state.parent == tmp_path, "a later chdir does not move it"


def test_an_optimizer_that_accelerate_has_prepared_is_taken_with_its_scaler(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = linear()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=False)
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared.scaler = scaler
    outer = p2pdiloco.DiLoCo(model, prepared, run="story", tokens_per_step=8, state=tmp_path)
    assert outer._optimizers == [optimizer]
    assert outer._tally._scaler is scaler


def test_a_model_that_is_sharded_over_other_ranks_than_the_peers_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = fully_shard(linear(), mesh=init_device_mesh("cpu", (2,)))
        made = partial(p2pdiloco.DiLoCo, model, sgd(model), run="story", tokens_per_step=8, state=tmp_path / "state")
        made()
        with pytest.raises(DiLoCoError, match=r"sharded over the ranks \[0, 1\], but process_group has \[0\]: give"):
            made(process_group=dist.new_group([0]))
    finally:
        dist.destroy_process_group()
    assert not list(tmp_path.iterdir())


def test_what_is_counted_and_reported_is_checked_at_once(tmp_path: Path) -> None:
    model = linear()
    outer = p2pdiloco.DiLoCo(model, sgd(model), run="story", tokens_per_step=0, state=tmp_path)
    for tokens in (math.nan, -5, "8", 1 << 25, torch.ones(2)):
        with pytest.raises(p2pdiloco.DiLoCoError, match=r"tokens = .*write a whole number"):
            outer.count(tokens)  # type: ignore[arg-type]
    outer.count(torch.tensor(5))  # type: ignore[arg-type]
    outer.count(numpy.int32(3), loss=torch.tensor([0.5]))
    assert outer._tally.take() == (8, 0.5, True)
    for wrong in (torch.ones(2), "low", None):
        with pytest.raises(p2pdiloco.DiLoCoError, match="one element"):
            outer.report(wrong)  # type: ignore[arg-type]


def test_the_checks_return_what_they_have_checked() -> None:
    assert tokens_per_step(8) == whole("n", 8, 0, 8) == 8
    assert loss(1) == 1.0
    with pytest.raises(DiLoCoError):
        whole("n", 9, 0, 8)


def test_a_hook_in_a_model_is_not_in_its_copies(tmp_path: Path) -> None:
    """A model with a hook is saved and copied, as by averages of weights."""
    model, calls = linear(), []
    model.register_forward_pre_hook(CallHook(lambda *given: calls.append(given)), with_kwargs=True)
    torch.save(model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        copied(torch.ones(1, 4))
    assert not calls
    model(torch.ones(1, 4))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("size", "given", "found"),
    [
        (64, {}, (3, 3, "direct", 1.0, 0.0)),
        (64, {"total_steps": 200}, (3, 3, "direct", 1.0, 0.0)),
        (3000, {}, (24, 12, "rda", 0.4, 0.7)),
        (3000, {"total_steps": 480}, (6, 6, "direct", 1.0, 0.0)),
        (64, {"sync_every": 12}, (12, 1, "rda", 0.4, 0.7)),
        (64, {"merge": "rda"}, (3, 3, "rda", 0.4, 0.7)),
        (64, {"sync_every": 12, "merge": "direct", "n_fragments": 3}, (12, 3, "direct", 0.4, 0.7)),
    ],
)
def test_a_script_has_the_defaults_of_configuration_files(
    size: int, given: dict[str, Any], found: tuple[object, ...], tmp_path: Path
) -> None:
    """``manifest_defaults.in_rounds``, by the number of parameters and steps; P also by the number of tensors."""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(12))) if size < 1000 else nn.Module()
    if size >= 1000:
        for index in range(12):
            model.register_parameter(f"p{index}", nn.Parameter(torch.empty(2 << 20)))
    options = {"run": "story", "tokens_per_step": 8, "state": tmp_path, "initial_peers": "/ip4/192.0.2.1/tcp/1"}
    config = p2pdiloco.DiLoCo(model, sgd(model), **options, **given)._config
    assert config is not None
    outer, schedule = config.outer, config.schedule
    assert (schedule.sync_every, schedule.fragments, outer.merge, outer.learning_rate, outer.momentum) == found


def test_adapters_have_the_defaults_of_small_models(tmp_path: Path) -> None:
    """They are at most an eighth of the model, frozen parameters included; those without values do not count, and two
    that bitsandbytes packs into a byte count as two."""

    def sync_every(frozen: int, *, is_packed: bool = False) -> int:
        model = nn.Module()
        base: Any = nn.Parameter(torch.empty(frozen), requires_grad=False)
        if is_packed:
            base = nn.Parameter(torch.empty(frozen // 2, 1, dtype=torch.uint8), requires_grad=False)
            base.quant_state = SimpleNamespace(shape=torch.Size((frozen,)), absmax=torch.ones(1))
        model.register_parameter("base", base)
        model.register_parameter("later", nn.UninitializedParameter(requires_grad=False))
        for index in range(12):
            model.register_parameter(f"p{index}", nn.Parameter(torch.empty(1 << 20)))
        options = {"tokens_per_step": 8, "state": tmp_path, "initial_peers": "/ip4/192.0.2.1/tcp/1"}
        config = p2pdiloco.DiLoCo(model, sgd(model), run="story", **options)._config
        assert config is not None
        return config.schedule.sync_every

    assert (sync_every(84 << 20), sync_every((84 << 20) - 1)) == (3, 9)
    assert sync_every(84 << 20, is_packed=True) == 3


class Broken(SimpleNamespace):
    """A link to a node that fails, or whose node is lost."""

    is_training, is_dismissed, is_resting, last_step = True, False, False, 5

    def __init__(self, error: Exception | None) -> None:
        super().__init__(counts=Counts(), batches=lambda _: None, swarm=None)
        self._error = error

    def stepped(self, *_: Any) -> None:
        """Count the step."""
        self.counts.global_step += 1

    def boundary(self) -> bool:
        """Fail as it was made to."""
        if self._error is not None:
            raise self._error
        return False


@pytest.mark.parametrize("error", [OSError("the folder is gone"), ValueError("an odd message"), None], ids=str)
def test_no_error_leaves_a_step_and_a_script_that_trains_alone_ends_at_the_runs_last_step(
    error: Exception | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    optimizer = sgd(model)
    outer = p2pdiloco.DiLoCo(model, optimizer, run="story", tokens_per_step=8, state=tmp_path)
    outer._link, outer._is_linked = Broken(error), True  # type: ignore[assignment]
    outer._check = StepCheck(model, [optimizer], outer._named)
    outer._begun_in = os.getpid()
    outer._unhook()
    outer._hook_steps()
    steps = 0
    while not outer.is_complete:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        steps += 1
    assert steps == 5
    told = "from now on this script trains alone"
    assert [told in record.getMessage() for record in caplog.records] == [True]


def test_an_error_of_a_function_that_the_user_gave_is_told_as_one_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is none of ours, and nobody should report it to us."""
    model = linear()
    optimizer = sgd(model)

    def broken() -> None:
        raise ValueError("no space left")

    outer = p2pdiloco.DiLoCo(model, optimizer, run="story", tokens_per_step=8, state=tmp_path, on_save=broken)
    link = Broken(None)
    link.boundary = outer._save
    outer._link, outer._is_linked, outer._begun_in = link, True, os.getpid()  # type: ignore[assignment]
    outer._check = StepCheck(model, [optimizer], outer._named)
    outer._unhook()
    outer._hook_steps()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "an error in the function that was given as on_save: from now on this script trains alone. Mend it"
    assert "no space left" in caplog.text


def test_parameters_of_the_optimizers_outside_of_the_model_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a head, or a loss with weights: each peer would train its own."""
    model, head = linear(), nn.Linear(4, 8)
    head.bias.requires_grad_(False)
    given: dict[str, Any] = {"run": "story", "tokens_per_step": 8, "state": tmp_path}
    both = [torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)]
    p2pdiloco.DiLoCo(model, both, **given)
    (record,) = caplog.records
    assert record.getMessage().startswith("1 tensors of the optimizer (32 parameters) are no part of the model")
    assert "torch.nn.ModuleList([model, head])" in record.getMessage()
    caplog.clear()
    p2pdiloco.DiLoCo(nn.ModuleList([model, head]), both, **given)
    assert not caplog.records


def test_the_signature_stays_that_of_the_constructor() -> None:
    assert "tokens_per_step" in inspect.signature(p2pdiloco.DiLoCo).parameters
