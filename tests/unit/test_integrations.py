"""The callbacks without a run, and without their libraries."""

from __future__ import annotations

import copy
import importlib
import inspect
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from p2pdiloco.diloco import DiLoCo, DiLoCoError
from p2pdiloco.integrations.lr_schedules import follow
from p2pdiloco.training.step_counter import StepCounter
from p2pdiloco.training.swarm_view import CallHook


@pytest.mark.parametrize(("name", "library"), [("transformers", "transformers"), ("lightning", "lightning.pytorch")])
def test_without_the_library_the_line_to_type_is_told(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"p2pdiloco.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'p2pdiloco\["):
        importlib.import_module(f"p2pdiloco.integrations.{name}")


class Words(nn.Module):
    """Takes what a Hugging Face model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        return torch.as_tensor(x).sum()


class Outer:
    """Stands where the run is."""

    def __init__(self) -> None:
        self.tokens = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.heavy
def test_tokens_are_what_the_model_sees_while_it_trains() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations.transformers import DiLoCoCallback

    callback, model, outer = DiLoCoCallback(run=None), Words(), Outer()
    callback.outer = outer  # type: ignore[assignment]
    model.register_forward_pre_hook(CallHook(callback._count), with_kwargs=True)
    outer.socket = socket.socket()  # type: ignore[attr-defined]  # as a run has, which no deepcopy takes
    average = copy.deepcopy(model)
    ids = torch.zeros(3, 5, dtype=torch.int64)
    model(input_ids=ids)
    model(ids)
    assert outer.tokens == 30
    average(ids)
    assert outer.tokens == 30, "a copy's calls are not the model's"
    model(inputs_embeds=torch.zeros(3, 5, 4))
    assert outer.tokens == 45, "vectors count by their places"
    model.eval()
    model(input_ids=ids)
    model.train()
    with torch.no_grad():
        model(input_ids=ids)
    assert outer.tokens == 45, "evaluation is no training"
    embed = nn.Identity()
    embed.register_forward_pre_hook(CallHook(callback._count), with_kwargs=True)
    embed({"input_ids": ids, "attention_mask": ids})
    assert outer.tokens == 60, "all inputs as one, which sentence-transformers gives"


@pytest.mark.heavy
def test_without_a_run_nothing_happens() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations.transformers import DiLoCoCallback

    callback, model = DiLoCoCallback(run=None), Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control: Any = SimpleNamespace(should_training_stop=False)
    nobody: Any = None
    callback.on_train_begin(nobody, nobody, control, model=model, optimizer=optimizer)
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).backward()
    optimizer.step()
    callback.on_step_end(nobody, nobody, control)
    callback.on_train_end(nobody, nobody, control)
    assert not control.should_training_stop
    assert not model._forward_pre_hooks


class Swarmed(Outer):
    """A run that says how it stands, and whose options are seen."""

    __signature__ = inspect.signature(DiLoCo)
    made: ClassVar[list[dict[str, Any]]] = []
    swarm: ClassVar[dict[str, float]] = {"loss": 1.5, "peers": 2.0}
    is_complete = False
    global_step = 0
    total_steps = 100

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()
        self.made.append(options)
        self.shared: list[Any] = []

    def __enter__(self) -> Swarmed:
        return self

    def __exit__(self, *_: Any) -> None:
        self.has_left = True

    def load_global(self) -> None: ...

    def share(self, loader: Any) -> bool:
        self.shared.append(loader)
        return True

    def record_batch(self, batch: Any) -> None: ...

    def report(self, loss: float, *, reward: float | None = None) -> None:
        self.loss, self.reward = loss, reward


@pytest.mark.heavy
def test_the_swarms_figures_are_in_the_trainers_logs_before_others_report_them(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations import transformers as integration

    monkeypatch.setattr(integration, "DiLoCo", Swarmed)
    reported: list[dict[str, float]] = []

    class Board(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            reported.append(dict(logs))

    model, callback = Words(), integration.DiLoCoCallback(run="story")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = transformers.trainer_callback.CallbackHandler(
        [transformers.DefaultFlowCallback(), Board(), callback], model, None, optimizer, None
    )
    handler.train_dataloader = ["a loader"]
    args: Any = SimpleNamespace(logging_first_step=False, load_best_model_at_end=True)
    state = SimpleNamespace(max_steps=77, log_history=[{"loss": 3.0}])
    handler.on_train_begin(args, state, transformers.TrainerControl())
    assert Swarmed.made[-1]["total_steps"] == 77
    assert not args.load_best_model_at_end, "it would be merged as progress"
    assert callback.outer.shared == [["a loader"]]
    handler.on_log(args, state, transformers.TrainerControl(), {"loss": 3.0})
    expected = {"loss": 3.0, "swarm/loss": 1.5, "swarm/peers": 2.0}
    assert reported == [expected], "as TensorBoard's and W&B's callbacks, which the Trainer puts before its users'"
    assert state.log_history == [expected]
    assert (callback.outer.loss, callback.outer.reward) == (3.0, None)
    handler.on_log(args, state, transformers.TrainerControl(), {"loss": 2.0, "reward": 0.25})
    assert (callback.outer.loss, callback.outer.reward) == (2.0, 0.25), "as TRL's GRPO logs it"
    own = integration.DiLoCoCallback(run="story", total_steps=5, share_data=False)
    own.on_train_begin(args, state, transformers.TrainerControl(), model=model, optimizer=optimizer)
    assert Swarmed.made[-1]["total_steps"] == 5
    assert own.outer.shared == []


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of four tokens each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(4)}


class Hungry(Words):
    """Has memory for so many texts at once."""

    room = 4

    def forward(self, input_ids: torch.Tensor | None = None, **_: Any) -> Any:
        assert input_ids is not None
        if len(input_ids) > self.room:
            raise RuntimeError("CUDA out of memory. Tried to allocate more")
        return {"loss": super().forward(input_ids)}


@pytest.mark.heavy
@pytest.mark.parametrize("is_found", [True, False])
def test_a_trainer_that_begins_anew_counts_each_token_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_found: bool
) -> None:
    """It looks for a batch that fits; or a person calls ``train`` again after an error, which told no callback."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations import transformers as integration

    begun: list[Any] = []

    class Begun(Swarmed):
        swarm: ClassVar[dict[str, float]] = {}
        has_left = False

        def __enter__(self) -> Swarmed:
            assert all(one.has_left for one in begun), "who took part before has left"
            begun.append(self)
            return self

    monkeypatch.setattr(integration, "DiLoCo", Begun)
    callback, model = integration.DiLoCoCallback(run="story"), Hungry()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        auto_find_batch_size=is_found,
        max_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), callbacks=[callback])
    if not is_found:
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
        model.room = 8
    trainer.train()
    assert len(begun) >= 2
    assert all(one.has_left for one in begun)
    batch = model.room if not is_found else trainer._train_batch_size
    assert batch <= model.room
    assert begun[-1].tokens == 3 * batch * 4
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "made",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 7),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            milestones=[5],
        ),
    ],
    ids=["lambda", "cosine", "steps", "sequence"],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_follows_the_runs_step(made: Any) -> None:
    """Who joins at step 40 trains at the rate that all others have; who is ahead of the run is not set back."""

    def rate(*steps: int | None) -> float:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = made(optimizer)
        for step in steps:
            if step is None:
                scheduler.step()
            else:
                follow(SimpleNamespace(scheduler=scheduler) if step % 2 else scheduler, step)
        return float(optimizer.param_groups[0]["lr"])

    alone = rate(*[None] * 41)
    assert rate(40, None) == pytest.approx(alone)
    assert rate(None, None, 41) == pytest.approx(alone)
    assert rate(*[None] * 41, 7, 0) == pytest.approx(alone)


def test_what_goes_by_a_measurement_or_is_no_schedule_of_torchs_stays() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    for scheduler in (lr_scheduler.ReduceLROnPlateau(optimizer), None, SimpleNamespace(last_epoch=0)):
        follow(scheduler, 40)
    assert optimizer.param_groups[0]["lr"] == 1.0
    chained = lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.5)])
    follow(chained, 40)
    assert optimizer.param_groups[0]["lr"] == 1.0
    cycle = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=3)
    follow(cycle, 40)
    optimizer.step()
    for _ in range(2):
        cycle.step()


CASES = pytest.mark.parametrize(
    ("follows", "steps", "expected"),
    [(True, 100, (40, 50)), (False, 100, (0, 0)), (True, 60, (0, 0))],
    ids=["as long as the run", "not wanted", "shorter than the run"],
)
"""Whether it is to follow, the trainer's steps, and where its schedule is at the run's steps 40 and 50."""


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:Detected call of")
@CASES
def test_the_trainers_schedule_follows_the_run_if_it_is_as_long(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    follows: bool,
    steps: int,
    expected: tuple[int, int],
) -> None:
    """One that is over before the run would rise again, or give nothing for all its tokens."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations import transformers as integration

    monkeypatch.setattr(integration, "DiLoCo", Swarmed)
    monkeypatch.setattr(Swarmed, "global_step", 40)
    model, callback = Words(), integration.DiLoCoCallback(run="story", follow_schedule=follows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 10, steps)
    handler = transformers.trainer_callback.CallbackHandler(
        [transformers.DefaultFlowCallback(), callback], model, None, optimizer, scheduler
    )
    args: Any = transformers.TrainingArguments(report_to=[])
    state, control = transformers.TrainerState(max_steps=steps), transformers.TrainerControl()
    handler.on_train_begin(args, state, control)
    begins = scheduler.last_epoch
    monkeypatch.setattr(Swarmed, "global_step", 50)
    handler.on_step_end(args, state, control)
    assert (begins, scheduler.last_epoch) == expected
    assert ("the trainer makes 60 steps and the run has 100" in caplog.text) is (steps == 60)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:Detected call of")
@CASES
def test_lightnings_schedules_follow_the_run_if_they_are_as_long(
    monkeypatch: pytest.MonkeyPatch, follows: bool, steps: int, expected: tuple[int, int]
) -> None:
    pytest.importorskip("lightning", reason="needs the extra lightning: pip install '.[lightning]'")
    from p2pdiloco.integrations import lightning as integration

    monkeypatch.setattr(integration, "DiLoCo", Swarmed)
    monkeypatch.setattr(Swarmed, "global_step", 40)
    module: Any = SimpleNamespace(log_dict=lambda _: None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedulers = [lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) for _ in range(3)]
    ways = [("step", 1), ("epoch", 1), ("step", 5)]
    configs = [
        SimpleNamespace(scheduler=one, interval=interval, frequency=frequency)
        for one, (interval, frequency) in zip(schedulers, ways, strict=True)
    ]
    trainer: Any = SimpleNamespace(
        max_steps=-1,
        estimated_stepping_batches=steps,
        precision_plugin=None,
        optimizers=[optimizer],
        train_dataloader=None,
        lr_scheduler_configs=configs,
    )
    for run in (None, "story"):
        callback = integration.DiLoCoCallback(run=run, tokens=len, follow_schedule=follows)
        callback.on_train_start(trainer, module)
        begins = schedulers[0].last_epoch
        monkeypatch.setattr(Swarmed, "global_step", 50)
        callback.on_train_batch_end(trainer, module, None, None, 0)
        assert (begins, schedulers[0].last_epoch) == (expected if run else (0, 0))
        assert [one.last_epoch for one in schedulers[1:]] == [0, 0]
        monkeypatch.setattr(Swarmed, "global_step", 40)
    assert Swarmed.made[-1]["total_steps"] == steps


@pytest.mark.heavy
def test_a_callback_that_has_trained_is_refused_for_another_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second fold of a cross-validation would begin with the first one's parameters."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations import transformers as integration

    monkeypatch.setattr(integration, "DiLoCo", Swarmed)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    callback = integration.DiLoCoCallback(run="story")
    transformers.Trainer(Hungry(), args, train_dataset=Texts(), callbacks=[callback]).train()
    with pytest.raises(DiLoCoError, match=r"Make a new callback .*, with another run"):
        transformers.Trainer(Hungry(), args, train_dataset=Texts(), callbacks=[callback]).train()


@pytest.mark.heavy
@pytest.mark.parametrize("often", [1, 5])
def test_lightnings_several_optimizers_make_one_step_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, often: int
) -> None:
    """Lightning itself counts each one's. Where one steps more often, the run is not over when Lightning stops."""
    pytest.importorskip("lightning", reason="needs the extra lightning: pip install '.[lightning]'")
    import lightning.pytorch

    from p2pdiloco.integrations import lightning as integration

    class Counting(Swarmed):
        """Counts as the real one does."""

        swarm: ClassVar[dict[str, float]] = {}

        def __init__(self, model: nn.Module, optimizers: Any, **options: Any) -> None:
            super().__init__(model, optimizers, **options)
            tally = StepCounter(optimizers, None, 1)
            self.total_steps, self.global_step = options["total_steps"], 0
            for one in optimizers:
                one.register_step_post_hook(lambda which, *_: self.note(tally.stepped(which)))

        def note(self, is_complete: bool) -> None:
            self.global_step += is_complete
            self.is_complete = self.global_step >= self.total_steps

    class Two(lightning.pytorch.LightningModule):  # type: ignore[misc]
        """A GAN's loop."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            (self.first(batch) + self.second(batch)).sum().backward()
            first.step()
            if batch_idx % often == 0:
                second.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.first, self.second)]

    monkeypatch.setattr(integration, "DiLoCo", Counting)
    callback, outers = integration.DiLoCoCallback(run="story", tokens=len), []
    monkeypatch.setattr(Counting, "__exit__", lambda outer, *_: outers.append(outer))

    def fit() -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = lightning.pytorch.Trainer(
            max_steps=20, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet
        )
        trainer.fit(Two(), torch.utils.data.DataLoader(torch.ones(64, 2), batch_size=1))

    fit()
    (outer,) = outers
    assert outer.total_steps == 10
    assert (outer.global_step == 10) is (often == 1)
    assert ("training has ended at step" in caplog.text) is (often == 5)
    with pytest.raises(DiLoCoError, match=r"Make a new callback"):
        fit()
