"""Checks of what a training script gives to ``p2pdiloco.DiLoCo``, before a node is started or a file is written.

Rules of this file:
1. Every check raises ``DiLoCoError`` with the argument, what it is, and what to write instead.
2. The settings of a run are checked as those of a configuration file are (``founding_file.settings``).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2pdiloco.training.parameters import OnUpdate, trainable
from p2pdiloco.util.files import state_home

log = logging.getLogger("p2pdiloco")

_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Callable[..., Any] | None)
MOST_TOKENS = 1 << 24
"""Maximum number of tokens of a step."""
MOST_STAY_S = 1e7
# Options of the node that ``DiLoCo`` sets itself, and the argument for each.
_OWN_OPTIONS = {
    "--state": "state=",
    "--run": "run=",
    "--bootstrap": "initial_peers=",
    "--stay-s": "stay_s=",
    "--learner": "",
    "--reattach-s": "",
    "--status-fd": "",
}
GIVEN_AS = "in the function that was given as "
"""Beginning of the note of an error that a user's function raised."""
_FEW = "Convert it with int(...)"
_SCHEDULE_FREE = "ScheduleFree"
# In the names of classes that average the parameters with points of their own, and where their state has these points.
_AVERAGING = (_SCHEDULE_FREE, "MADGRAD", "DAdaptSGD", "DAdaptAdaGrad")
_POINTS = ("x0", "x", "y", "z")
_DEEPSPEED = (
    "DeepSpeed's {name} trains float32 copies of the parameters and overwrites the parameters with them: the other "
    "peers' progress would be lost. Use torch.distributed.fsdp.fully_shard(model) and a torch optimizer under torchrun "
    "instead; with accelerate or the Hugging Face Trainer, remove the DeepSpeed configuration"
)
_SLOW = "slow weights, to which it returns: give the optimizer inside of it, train without it"
_MASTERS = (
    "float32 copies of the parameters, with which it overwrites them: train float32 parameters under torch.autocast "
    "with a torch optimizer, give DiLoCo the float32 copy as its model"
)
COPIES = {
    "Lookahead": _SLOW,
    "Ranger": _SLOW,
    "TRAC": "the first parameters, from which it computes all later ones: give the optimizer inside of it",
    "FP16_Optimizer": _MASTERS,  # apex
    "FP16Optimizer": _MASTERS,  # fairseq
    "SafeFP16Optimizer": _MASTERS,  # pytorch_optimizer
    "BF16_Optimizer": _MASTERS,
    "Float16OptimizerWithFloat16Params": _MASTERS,  # Megatron
    "MixedPrecisionOptimizer": _MASTERS,
    "CPUOffloadOptimizer": "a copy of the parameters in the CPU's memory: give a torch optimizer",  # torchao
}
"""Optimizers that keep copies of the parameters and write them back, by the beginning of the class's name: what they
keep, and what to do."""

TRAINED_ALREADY = (
    "this DiLoCoCallback has trained already: this training would begin with the parameters of the one before, and its "
    "measurements would be false. Make a new callback for each training, with another run: such as "
    'DiLoCoCallback(run=f"story-{fold}", ...) in cross-validation or a search for hyperparameters'
)


class DiLoCoError(Exception):
    """A run cannot be created or joined, or ``DiLoCo`` is used wrongly. The message says why and what to do."""


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def whole(name: str, value: object, least: int, most: int, hint: str = _FEW) -> int:
    """Return ``value`` as a whole number from ``least`` to ``most``. Integer tensors and numpy integers are accepted.

    Raises:
        DiLoCoError: it is another one, or none.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise DiLoCoError(f"{name} = {_shown(value)}: write a whole number from {least} to {most}. {hint}")
    try:
        number = int(value.__index__())  # type: ignore[attr-defined]
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of floats, or of several elements
        raise DiLoCoError(f"{name} = {_shown(value)}: write a whole number from {least} to {most}. {hint}") from error
    if not least <= number <= most:
        raise DiLoCoError(f"{name} = {number}: write a whole number from {least} to {most}")
    return number


def tokens_per_step(value: object) -> int:
    """Check the argument ``tokens_per_step``.

    Raises:
        DiLoCoError: it was left out, or is not a number of tokens.
    """
    if value is None:
        raise DiLoCoError(
            "tokens_per_step is missing: write how many tokens (samples, if the model has none) this process trains on "
            "per optimizer step, in the same unit at all peers. The merge weights peers by it. If steps differ, write "
            "tokens_per_step=0, and call outer.count(tokens) before each optimizer.step()"
        )
    return whole("tokens_per_step", value, 0, MOST_TOKENS)


def loss(value: object, name: str = "loss") -> float | Tensor:
    """Check the argument ``name``, a loss or reward: a number, or a tensor with one element, which is not read.

    Raises:
        DiLoCoError: it is something else.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        raise DiLoCoError(f"{name} has the shape {shape}: give a number or one element, such as {name}.mean()")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise DiLoCoError(f"{name} = {_shown(value)}: give a number or a tensor with one element") from error


def stay_s(value: object) -> float:
    """Check the argument ``stay_s``.

    Raises:
        DiLoCoError: it is not a number of seconds.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 <= float(value) <= MOST_STAY_S:  # type: ignore[arg-type]
        raise DiLoCoError(f"stay_s = {_shown(value)}: write seconds, a number from 0 to {MOST_STAY_S:g}")
    return float(value)  # type: ignore[arg-type]


def run_name(value: object) -> str:
    """Check that ``run`` is a text; ``founding_file.settings`` checks which.

    Raises:
        DiLoCoError: it is none.
    """
    if not isinstance(value, str):
        raise DiLoCoError(f"run = {_shown(value)}: write a text, the name of the run")
    return value


def peers(value: object, found: bool | None) -> tuple[str, ...]:
    """Return the argument ``initial_peers`` as texts.

    A text that is empty, as of a variable that is not set, would create a second run. So it must come with ``found``.

    Raises:
        DiLoCoError: it is not a text or a list of texts, or one of them is empty or no invite or address.
    """
    given = (value,) if isinstance(value, str) or value is None else value
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise DiLoCoError(f"initial_peers = {_shown(value)}: write an invite or an address, or a list of them")
    found_peers = []
    for one in given:
        is_blank = one is None or (isinstance(one, str) and not one.strip())
        if is_blank and found is None:
            raise DiLoCoError(
                f"initial_peers = {_shown(value)} is empty: give the invite that the first script prints. To create "
                "the run here, leave initial_peers out, or add found=True"
            )
        if is_blank:
            continue
        if not isinstance(one, str):
            raise DiLoCoError(f"initial_peers has {_shown(one)}: write an invite or an address, as a text")
        if not one.strip().startswith(("/", "p2pdiloco")):
            raise DiLoCoError(
                f"initial_peers has {_shown(one)}, which is neither an invite (p2pdiloco...) nor a multiaddr "
                "(/ip4/203.0.113.5/tcp/31337/p2p/ID): copy what the first script prints"
            )
        found_peers.append(one)
    return tuple(found_peers)


def is_founder(value: object) -> bool | None:
    """Check the argument ``found``.

    Raises:
        DiLoCoError: it is not True, False or None.
    """
    if value is not None and not isinstance(value, bool):
        raise DiLoCoError(f"found = {_shown(value)}: write True (create the run), False (join it) or leave it out")
    return value


def state_folder(value: object, run: str) -> Path:
    """Return the state folder as an absolute path, so that a later ``os.chdir`` does not change it. None: ``run``'s.

    Raises:
        DiLoCoError: it is not a path, or not one of a folder.
    """
    if value is None:
        value = state_home() / run
    if not isinstance(value, str | os.PathLike) or not (text := os.fspath(value)) or isinstance(text, bytes):
        raise DiLoCoError(f"state = {_shown(value)}: write the path of a folder, or leave it out")
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise DiLoCoError(f"state = {_shown(text)} is a file: write the path of a folder, or leave it out")
    if text != text.encode(errors="replace").decode():
        raise DiLoCoError(f"state = {text!a} is not valid UTF-8, which safetensors needs: choose another folder")
    return folder


def node_options(value: object) -> tuple[str, ...]:
    """Check the argument ``node_options``.

    Raises:
        DiLoCoError: it is not a list of texts, or has an option that ``DiLoCo`` sets.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise DiLoCoError(
            f'node_options = {_shown(value)}: write a list of texts, such as ["--up", "20mbit"]; numbers in quotes, too'
        )
    for one in value:
        if (word := one.partition("=")[0]) in _OWN_OPTIONS:
            instead = _OWN_OPTIONS[word]
            raise DiLoCoError(
                f"node_options has {word}, which DiLoCo sets itself: " + (f"use {instead}" if instead else "remove it")
            )
    return tuple(value)


def grad_scaler(value: Any) -> None:
    """Check the argument ``grad_scaler``.

    Raises:
        DiLoCoError: it is not like ``torch.amp.GradScaler``.
    """
    if value is not None and not (callable(getattr(value, "step", None)) and callable(getattr(value, "scale", None))):
        raise DiLoCoError(f"grad_scaler = {_shown(value)}: give the torch.amp.GradScaler of the loop, or leave it out")


def process_group(value: object) -> None:
    """Check the argument ``process_group``.

    Raises:
        DiLoCoError: it is not one.
    """
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return
    raise DiLoCoError(
        f"process_group = {_shown(value)}: give what torch.distributed.new_group returns, or leave it out for all ranks"
    )


def function(name: str, value: _F, of: str = "") -> _F:
    """Return ``value``, a function or None; its errors get the note ``GIVEN_AS`` with its name. ``of`` describes its
    arguments.

    Raises:
        DiLoCoError: it is something else.
    """
    if value is None:
        return value
    if not callable(value):
        raise DiLoCoError(f"{name} = {_shown(value)}: give a function{of}, or leave it out")

    @wraps(value)
    def noted(*arguments: Any) -> Any:
        try:
            return value(*arguments)
        except Exception as error:
            error.add_note(f"{GIVEN_AS}{name}")
            raise

    return cast("_F", noted)


def on_update(value: OnUpdate | None, optimizers: Sequence[torch.optim.Optimizer]) -> OnUpdate | None:
    """Return the function that changes the optimizers' copies of the parameters: ``value``, or ours for schedule-free
    optimizers and those of dual averaging; None if nothing is known of copies.

    Raises:
        DiLoCoError: ``value`` is not a function, or it is missing and an optimizer is known to need it.
    """
    value = function("on_update", value, " of a parameter and of what was added to it")
    if value is None and (averaging := [one for one in optimizers if _is_averaging(one)]):
        return partial(_change_points, averaging)
    return value


def _is_averaging(optimizer: torch.optim.Optimizer) -> bool:
    return any(word in kind.__name__ for kind in type(optimizer).__mro__ for word in _AVERAGING)


def _change_points(optimizers: Sequence[torch.optim.Optimizer], p: Tensor, change: Tensor) -> None:
    """Add ``change`` to the points that the optimizers average with ``p``: the iterates of schedule-free optimizers
    (arXiv 2405.15682), and the starting point of dual averaging (arXiv 2101.11075). All must move alike."""
    for optimizer in optimizers:
        for name in _POINTS:
            if isinstance(point := optimizer.state.get(p, {}).get(name), Tensor):
                point.add_(change)


def stepping(given: Sequence[Any], *, has_hook: bool) -> list[torch.optim.Optimizer]:
    """Return the optimizers that make the steps: those inside of accelerate's and Lightning's wrappers, and of those
    that keep them as ``base_optimizer`` (SAM). ``has_hook``: the script has an ``on_update``.

    Raises:
        DiLoCoError: there is none; one is no optimizer, or a class, or a scheduler of one; or it trains copies of the
            parameters that cannot be reached from here, or that no ``on_update`` changes.
    """
    if not given:
        raise DiLoCoError("optimizer is empty: give the torch.optim.Optimizer that trains the model, or a list of them")
    for one in given:
        _refuse_unreachable_copies(one)
        if not has_hook:
            _refuse_copies(one)
    return [_stepping(one) for one in given]


def _stepping(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(inner := _inner(optimizer), torch.optim.Optimizer):
        optimizer = inner
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, type):
        why = "a class: give an instance, such as torch.optim.AdamW(model.parameters())"
    elif isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        why = f"a {type(optimizer).__name__}: give its optimizer"
    else:
        why = f"{_shown(optimizer)}: give the torch.optim.Optimizer that trains the model, or a list of them"
    raise DiLoCoError(f"optimizer is {why}")


def _inner(optimizer: Any) -> Any:
    """Return the optimizer whose steps must be seen in place of this wrapper's; None if it is no such wrapper.

    SAM (arXiv 2010.01412) climbs, and returns to where it was before its base optimizer steps. Its own ``step`` would
    show this as a copy that is put back, and scripts that call ``first_step`` and ``second_step`` never call it.
    """
    is_known = type(optimizer).__module__.partition(".")[0] in ("accelerate", "lightning")
    return getattr(optimizer, "optimizer" if is_known else "base_optimizer", None)


def _refuse_copies(given: Any) -> None:
    """Refuse an optimizer that keeps copies of the parameters and writes them back (``COPIES``), also in wrappers."""
    while given is not None:
        for kind in type(given).__mro__:
            if why := next((why for name, why in COPIES.items() if kind.__name__.startswith(name)), ""):
                raise DiLoCoError(
                    f"{kind.__name__} keeps {why}, or add on_update=, a function that changes the copies, too. "
                    "Otherwise it undoes the progress of the other peers"
                )
        given = getattr(given, "optimizer", None) or getattr(given, "base_optimizer", None)


def _refuse_unreachable_copies(given: Any) -> None:
    """Refuse an optimizer, or a model, whose library trains copies of the parameters that p2pdiloco cannot change. It
    may be inside of wrappers."""
    for _ in range(4):
        for kind in type(given).__mro__:
            if kind.__module__.startswith("deepspeed.runtime.") and "Optimizer" in kind.__name__:
                raise DiLoCoError(_DEEPSPEED.format(name=kind.__name__))
            if kind.__name__.startswith(_SCHEDULE_FREE) and hasattr(given, "base"):
                raise DiLoCoError(
                    f"{kind.__name__} swaps other values into the parameters around its base optimizer's step, so "
                    "neither of the two can be used: take AdamWScheduleFree, RAdamScheduleFree or SGDScheduleFree"
                )
        given = getattr(given, "optimizer", None) or getattr(given, "module", None)


def exchanged(model: object) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters that are exchanged: those that require a gradient.

    Raises:
        DiLoCoError: ``model`` is no model, it has none, or one that cannot be exchanged.
        ValueError: the model is wrapped in FSDP's first version.
    """
    if not isinstance(model, nn.Module):
        what = f"of type {type(model).__name__}" if not isinstance(model, type) else "a class"
        raise DiLoCoError(
            f"model is {what}: give the torch.nn.Module that is trained, not its class, parameters or state_dict"
        )
    _refuse_unreachable_copies(model)
    named = trainable(model)
    if not named:
        raise DiLoCoError("the model has no parameter that requires a gradient: there is nothing to exchange")
    for name, parameter in named:
        if why := _not_exchangeable(parameter):
            raise DiLoCoError(f"parameter {name} {why}")
    return named


def _not_exchangeable(p: nn.Parameter) -> str:
    """Return why a parameter cannot be exchanged, and what to do; empty if it can."""
    if isinstance(p, UninitializedParameter):
        return "has no shape yet: call the model once with a batch first"
    if p.is_meta:
        return "is on the meta device and has no values: model.to_empty(device=...) and initialize it first"
    if not p.is_floating_point():
        return f"is {p.dtype}, and only real floating-point numbers are exchanged: keep torch.view_as_real(...) of it"
    if p.layout is not torch.strided:
        return f"is stored as {p.layout}, and only dense parameters are exchanged: use p.to_dense()"
    if is_traceable_wrapper_subclass(p) and not hasattr(p, "to_local") and not _is_plain_inside(p):
        return (
            f"is a {type(p).__name__}, which packs or quantizes its values: freeze it (requires_grad_(False)) and "
            "train adapters, or train the plain model and quantize the export"
        )
    if p.numel() == 0:
        return f"is empty (shape {tuple(p.shape)}): remove it, or freeze it with requires_grad_(False) at all peers"
    if not p.is_contiguous():
        return "is not contiguous in memory: set p.data = p.data.contiguous() first"
    return ""


def _is_plain_inside(p: Any) -> bool:
    """Return True if this tensor subclass keeps its values in one ordinary tensor, which can be changed in place."""
    inner = [getattr(p, name) for name in p.__tensor_flatten__()[0]]
    return len(inner) == 1 and inner[0].is_floating_point() and inner[0].shape == p.shape


def require_ranks(named: Sequence[tuple[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Check that all ranks that hold a part of a parameter (``fully_shard``) are ranks of this peer.

    Raises:
        DiLoCoError: ``group`` lacks one.
    """
    for name, p in named:
        if not hasattr(p, "to_local"):
            continue
        holders, ranks = set(p.device_mesh.mesh.flatten().tolist()), set(dist.get_process_group_ranks(group))
        if not holders <= ranks:
            raise DiLoCoError(
                f"parameter {name} is sharded over the ranks {sorted(holders)}, but process_group has {sorted(ranks)}: "
                "give the group of all ranks of this peer, or shard the model over a mesh of these ranks alone"
            )


def require_finite(named: Sequence[tuple[str, Tensor]]) -> None:
    """Check the parameters from which a run would be created.

    Raises:
        DiLoCoError: one has values that are not finite.
    """
    for name, p in named:
        local: Tensor = p.to_local() if hasattr(p, "to_local") else p
        if not bool(local.detach().isfinite().all()):
            raise DiLoCoError(
                f"parameter {name} has values that are not finite (NaN or inf): initialize the model anew"
            )


def require_training(named: Sequence[tuple[str, Tensor]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that the optimizers train the model, and that their steps can be hooked.

    Raises:
        DiLoCoError: One holds none of these parameters, or does not call torch's step hooks.
    """
    for optimizer in optimizers:
        held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        if not any(id(p) in held for _, p in named):
            raise DiLoCoError(
                f"the optimizer ({type(optimizer).__name__}) holds none of the model's trainable parameters, so its "
                "steps would never change the exchanged model. Create the optimizer from this model's parameters, "
                "after anything that replaces them (fully_shard, an adapter). If the model has copies (deepcopy, an "
                "average, float32 masters), give DiLoCo the one that the optimizer holds. Models with an optimizer "
                "each, such as a GAN's, need one module around them: torch.nn.ModuleList([first, second])"
            )
        if not getattr(type(optimizer).step, "hooked", False) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise DiLoCoError(
                f"this {type(optimizer).__name__} does not call torch's step hooks, so DiLoCo cannot see its steps. It "
                "probably wraps another optimizer: give DiLoCo that one"
            )


def tell_outside(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn if the optimizers train parameters that are no part of the model."""
    inside = {id(p) for p in model.parameters()}
    held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if outside := [p for p in held if p.requires_grad and id(p) not in inside]:
        log.warning(
            "%s tensors of the optimizer (%s parameters) are no part of the model that p2pdiloco.DiLoCo was given, "
            "such as a head or a loss with weights: they are not exchanged, so each peer trains its own. To exchange "
            "them, give DiLoCo one module that holds both, at all peers: torch.nn.ModuleList([model, head])",
            len(outside),
            f"{sum(p.numel() for p in outside):,}",
        )


def known_options(options: Mapping[str, object], owner: Callable[..., object]) -> None:
    """Check the names of arguments that a callback passes on to ``owner``, before its training begins.

    Raises:
        DiLoCoError: it has no such argument, or the callback gives it itself.
    """
    known = set(inspect.signature(owner).parameters) - {"self", "model", "optimizer", "run"}
    _check_names(
        "DiLoCoCallback", options, known, f"its own are in its docstring, the others are {', '.join(sorted(known))}"
    )


def checks_names(init: Callable[_P, None]) -> Callable[_P, None]:
    """Return the constructor ``init`` so that an unknown keyword is a ``DiLoCoError`` with the nearest name."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        _check_names("DiLoCo", kwargs, known, f"it has {', '.join(known)}")
        init(*args, **kwargs)

    return checked


def _check_names(owner: str, given: Mapping[str, object], known: Collection[str], all_of_them: str) -> None:
    if unknown := next((name for name in given if name not in known), None):
        near = difflib.get_close_matches(unknown, known, 1)
        raise DiLoCoError(
            f"{owner} has no argument {unknown}: " + (f"did you mean {near[0]}?" if near else all_of_them)
        )
