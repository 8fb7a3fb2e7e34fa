"""``p2pdiloco.DiLoCo``: train in a run from your own training loop.

Example::

    with p2pdiloco.DiLoCo(model, optimizer, run="story", initial_peers=INVITE, tokens_per_step=8192) as outer:
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()          # DiLoCo hooks into this call
            optimizer.zero_grad()
            if outer.is_complete:
                break

The script is the learner. Its node runs beside it in a process of its own (``script_node.py``), so the loop never waits
for the network. The script of configuration files (``learner.py``) is started by its node instead; all else is the
same. Without ``run`` nothing happens, and the script trains alone. Under ``torchrun`` all ranks are one peer
(``training/multi_rank.py``); each rank runs the same lines.

Rules of this file:
1. Only trainable parameters are exchanged, in the model's order. Frozen parameters, buffers and the state of the inner
   optimizer stay on the machine. The buffers are saved beside the node's checkpoints, for exports and the next start.
2. A step is one that the optimizer made. A step that a GradScaler skipped does not count, and neither do its tokens.
3. The script's loop continues whatever happens to the node. It then trains alone, and one warning says so.
4. The ranks of an island base common decisions on values that all ranks have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from p2pdiloco import script_lifecycle
from p2pdiloco.access.invite_code import InviteError
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import Layout, Manifest, RunConfig
from p2pdiloco.script_node import (
    JOIN_S,
    NODE_LOG,
    NodeRequest,
    ParentNode,
    RestartedNode,
    ScriptNode,
    ScriptNodeError,
    leaving_s,
)
from p2pdiloco.training import founding_file, script_arguments
from p2pdiloco.training.node_link import NewNode, NodeLink, NodeSearch
from p2pdiloco.training.parameters import (
    MOST_TOLD,
    FlatParameters,
    OnUpdate,
    embedding_names,
    named_buffers,
    read_buffers,
    trainable,
    trained_share,
    write_buffers,
)
from p2pdiloco.training.script_arguments import DiLoCoError as DiLoCoError
from p2pdiloco.training.step_check import StepCheck
from p2pdiloco.training.step_counter import StepCounter
from p2pdiloco.training.swarm_view import SwarmView
from p2pdiloco.util.files import read_regular

if TYPE_CHECKING:  # it imports torch.distributed.tensor: a second and 40 MB, which only several ranks need
    from p2pdiloco.training.multi_rank import RankGroup, RankGroupParameters

log = logging.getLogger("p2pdiloco")


class DiLoCo(SwarmView):
    """Connects a training loop to a run (Decoupled DiLoCo, arXiv 2604.21428).

    Use it as a context manager, or call ``start`` and ``close`` (in notebooks). ``start`` loads the run's parameters
    into the model. From then on ``DiLoCo`` hooks into ``optimizer.step()``: it sends the model's changes to the other
    peers, and adds theirs to the model in place. It never waits for the network there.

    No error of p2pdiloco leaves ``optimizer.step()``. If the model has moved to another device since ``start``
    (``model.to()``), or holds other parameters instead (``load_state_dict(assign=True)``), p2pdiloco warns, and merges
    nothing more from this script. New values (``p.data = ...``) are merged as progress.
    """

    @script_arguments.checks_names
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        run: str | ParentNode | None = None,
        initial_peers: str | Sequence[str] = (),
        found: bool | None = None,
        tokens_per_step: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        total_steps: int | None = None,
        sync_every: int | None = None,
        n_fragments: int | None = None,
        fragment_sync_delay: int | None = None,
        min_quorum: int | None = None,
        merge: str | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        codec: str | None = None,
        access: str | None = None,
        state: str | os.PathLike[str] | None = None,
        wait_for_peers: int = 1,
        stay_s: float = 0.0,
        node_options: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        on_update: Callable[[Tensor, Tensor], None] | None = None,
        evaluate: Callable[[], float | Tensor] | None = None,
        on_save: Callable[[], None] | None = None,
    ) -> None:
        """
        The arguments from ``total_steps`` to ``access`` belong to the run. The script that creates the run sets them;
        all other scripts take over the run's values, and warn if their own differ. All arguments are checked here,
        before a node is started or a file is written.

        Args:
            model: The model, as it is trained: after ``.to(device)``, DDP, ``fully_shard`` and ``torch.compile``.
                Parameters with ``requires_grad`` are exchanged as float32, whatever their floating-point dtype is here.
                All peers need the same names, shapes and order.
            optimizer: The optimizer that trains the model's parameters, also as accelerate has prepared it, or SAM. Or
                a list of several: a step of the run is complete when each of them has stepped, in any order.
            run: Name of the run, at most 64 letters, digits, dots, dashes and underscores. None: train alone.
                The shipped script passes the node that has started it.
            initial_peers: The invite that the first script prints. In a run with ``access="open"``, multiaddrs of
                directory nodes (bootstrap nodes or peers) instead. A single one may be a str. An empty text or None is
                an error unless ``found`` is given, because it usually is a variable that was not set.
            found: Whether this script creates the run, with the model's parameters as version 0. None: only if
                ``initial_peers`` is left out, or an empty list. Pass True to create a run at the directory that
                ``initial_peers`` names. If ``state`` already holds the run, that run continues.
            tokens_per_step: Tokens that this process trains on per optimizer step, at most 2^24. The merge weights
                contributions by them, so all peers must count the same unit. ``count`` overrides it for a step.
                Required; 0: ``count`` is called for each step.
            grad_scaler: The GradScaler that the loop uses. Steps that it skips are then not counted. Default: that of
                an optimizer that accelerate has prepared.
            total_steps: Global step at which the run is complete, at least ``sync_every``. Later, the command
                ``p2pdiloco prolong`` makes a run longer. Default: 10^9, practically endless.
            sync_every: H, steps between two exchanges of the same fragment. Default, as for configuration files: from 3
                to 24. 3 if at most 4 million parameters, or an eighth of the model's (adapters), are exchanged, 1 more
                for each further 1.4 million, but 24 instead of 12 and more; fewer in a run of less than 960 steps.
            n_fragments: P, number of parts into which the model is divided. They are exchanged one after the other. P
                must divide ``sync_every`` and be at most the number of trainable tensors. Default: 1 if ``sync_every``
                is given; else the largest such number.
            fragment_sync_delay: tau, optimizer steps that an exchange may take. Less than ``sync_every``. Raise it if
                steps are short or links are slow. Default: 2.
            min_quorum: Contributions needed for a merge. If fewer peers train, all of them are enough. Default: 1.
            merge: Merge rule: ``"direct"`` (the plain mean) or ``"rda"`` (radial-directional averaging, which keeps the
                length of the changes). Default: ``"direct"`` if ``sync_every`` and the outer optimizer are left out and
                H comes out below 24; else ``"rda"``.
            outer_lr: Learning rate of the outer optimizer (SGD with Nesterov momentum). Default: 0.4; where ``merge``
                becomes ``"direct"`` by default, 1.0.
            outer_momentum: Momentum of the outer optimizer, from 0 to below 1. Default: 0.7; where ``merge`` becomes
                ``"direct"`` by default, 0.0.
            codec: Encoding of the exchanged changes: ``"int4"``, ``"int8"``, ``"bf16"``, ``"int2"`` or ``"e3m0"``.
                ``"auto"``: each sender takes the finest one that its link can carry in time. Default: ``"int4"``.
            access: Who may join: ``"invite"`` (holders of an invite), ``"list"`` (only peers that an admin names) or
                ``"open"`` (anyone). Default: ``"invite"``.
            state: Folder of this peer: identity, checkpoints, logs. One script uses it at a time. Default:
                ``~/.local/state/p2pdiloco/RUN``, or ``$XDG_STATE_HOME/p2pdiloco/RUN``.
            wait_for_peers: Number of training peers, this one included, to wait for in ``start``. After ten minutes
                training begins without them, with a warning.
            stay_s: Seconds for which ``close`` keeps serving the result of a complete run to peers that come later.
            node_options: Further arguments of ``p2pdiloco join`` for the node, such as ``("--up", "20mbit")``. Only
                ``start`` checks them.
            process_group: The ranks that form this peer, if ``torch.distributed`` is initialized. None: all ranks.
            on_update: Function for optimizers that keep copies of the parameters (float32 master weights, slow
                weights). It is called with a parameter and a float32 tensor of its shape that was added to it, and must
                add this tensor to the copies. Not with several ranks. Default: one for schedule-free optimizers
                and MADGRAD, if the optimizer is one.
            evaluate: Function that returns a loss, as a number or a tensor with one element, on data that no peer
                trains on. The peers take turns: it is called without arguments and without gradients, in the step after
                every fifth version, while the model holds the run's parameters. It must restore what it changes, such
                as the training mode. The run then shows this loss, marks checkpoints as good by it, and goes back to
                one if the loss jumps. Give it in all scripts of a run, with the same data. With several ranks, each
                calls it, and the first one's loss counts. Default: the run has no such loss.
            on_save: Function without arguments that saves what the run does not have, such as the optimizer's state. It
                is called between two steps whenever the node saves, and when training stops. Several ranks call it.

        Raises:
            DiLoCoError: An argument or a combination is not allowed; an invite has a typo; the model has no trainable
                parameter, or one that cannot be exchanged; an optimizer holds none of them, does not call torch's step
                hooks, or is known to keep copies of the parameters (Lookahead) and there is no ``on_update``.
            ValueError: The model is wrapped in ``FullyShardedDataParallel``. Use ``fully_shard`` instead.
        """
        super().__init__(model, process_group, has_run=run is not None)
        # The node that has started this process, if it was not the other way round.
        self._parent = run if isinstance(run, ParentNode) else None
        self._named: list[tuple[str, nn.Parameter]] = []
        self._request: NodeRequest | None = None
        self._config: RunConfig | None = None
        self._given: dict[str, Any] = {}
        self._state = Path()
        self._wait_for_peers = wait_for_peers
        self._check: StepCheck | None = None
        self._ranks: RankGroup | None = None
        self._node_process: ScriptNode | None = None
        self._hooks: list[Any] = []
        self._on_update: OnUpdate | None = None
        self._evaluate = script_arguments.function("evaluate", evaluate)
        self._on_save = script_arguments.function("on_save", on_save)
        tokens = 0
        prepared: Sequence[Any] = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        optimizers: Sequence[torch.optim.Optimizer] = prepared
        if run is not None:
            self._named = script_arguments.exchanged(model)
            optimizers = script_arguments.stepping(prepared, has_hook=on_update is not None)
            if grad_scaler is None and prepared[0] is not optimizers[0]:
                grad_scaler = getattr(prepared[0], "scaler", None)  # accelerate's
            script_arguments.require_training(self._named, optimizers)
            script_arguments.tell_outside(model, optimizers)
            script_arguments.grad_scaler(grad_scaler)
            script_arguments.process_group(process_group)
            script_arguments.require_ranks(self._named, process_group)
            self._on_update = script_arguments.on_update(on_update, optimizers)
            tokens = script_arguments.tokens_per_step(tokens_per_step)
            self._hooks.append(optimizers[0].register_step_post_hook(script_lifecycle.alone(self)))
        if isinstance(run, ParentNode):
            self._state = run.folder
        elif run is not None:
            self._wait_for_peers = script_arguments.whole("wait_for_peers", wait_for_peers, 1, 1024)
            self._given = {
                "run": run,
                "access": access,
                "total_steps": total_steps,
                "n_fragments": n_fragments,
                "sync_every": sync_every,
                "fragment_sync_delay": fragment_sync_delay,
                "min_quorum": min_quorum,
                "merge": merge,
                "outer_lr": outer_lr,
                "outer_momentum": outer_momentum,
                "codec": codec,
                "evaluate": evaluate,
            }
            sizes = [parameter.numel() for _, parameter in self._named]
            share = trained_share(model)
            try:
                config = founding_file.settings(self._given, tensors=len(sizes), parameters=sum(sizes), share=share)
            except founding_file.FoundationError as error:
                raise DiLoCoError(str(error)) from error
            self._config = founding_file.with_frozen(founding_file.with_architecture(config, model), model)
            self._state = script_arguments.state_folder(state, run)
            self._request = self._node_request(run, initial_peers, found, node_options, stay_s)
        self._optimizers = optimizers
        self._tally = StepCounter(optimizers, grad_scaler, tokens, () if self._is_sharded else self._named)
        self._begun_in = 0  # the process that takes part; a forked one does not
        self._stepped_at = 0.0
        self._run = RunId("")
        # True if the model's buffers belong to the run's parameters: this script has trained, now or before.
        self._has_buffers = False

    def _node_request(
        self, run: str, initial_peers: object, found: object, node_options: object, stay_s: object
    ) -> NodeRequest:
        is_founder = script_arguments.is_founder(found)
        peers = script_arguments.peers(initial_peers, is_founder)
        options, stay_s = script_arguments.node_options(node_options), script_arguments.stay_s(stay_s)
        try:
            request = NodeRequest.of(run, peers, is_founder, self._state / founding_file.NAME, options, stay_s)
        except InviteError as error:
            raise DiLoCoError(f"initial_peers: {error}") from error
        if request.foundation is not None and not request.foundation.exists():
            script_arguments.require_finite(self._named)
        return request

    # -- the run -------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Create or join the run, and load its parameters into the model. Entering the ``with`` block calls it.

        It may take minutes: it starts the node and downloads the run's state. All ranks of an island call it. Without
        ``run`` it does nothing.

        Returns:
            This object.

        Raises:
            DiLoCoError: The run could not be created or joined (on all ranks alike); the model is not the run's; the
                trainable parameters have changed since the constructor; or this object takes part already.
        """
        if not self._has_run:
            return self
        if self._begun_in:
            raise DiLoCoError("this DiLoCo takes part already: call close() before start()")
        if [id(p) for _, p in trainable(self._model)] != [id(p) for _, p in self._named]:
            raise DiLoCoError(
                "the model's trainable parameters have changed since DiLoCo was created (replaced, frozen, unfrozen): "
                "create DiLoCo when model and optimizer are complete"
            )
        script_arguments.require_training(self._named, self._optimizers)
        self._ranks = _rank_group(self._process_group, self._leave_s, is_sharded=self._is_sharded)
        if self._ranks is not None and self._on_update is not None:
            raise DiLoCoError(
                "on_update, schedule-free optimizers and MADGRAD cannot be used with several ranks: use one process "
                "for each peer, or another optimizer"
            )
        is_alone = self._ranks is None and self._parent is None
        script_lifecycle.begin(self._state, self._leave_at_once, heeds_sigterm=is_alone)
        self._begun_in = os.getpid()
        self._unhook()
        try:
            self._take_part(*self._meet_node())
        except BaseException as error:
            self._tell_parent(error)
            self._begun_in, self._link, self._is_linked = 0, None, False
            self._end_node(signal.SIGKILL)
            script_lifecycle.end(self._state)
            raise
        self._stepped_at = time.perf_counter()
        self._hook_steps()
        self._tally.begin()
        if self._check is not None:
            self._check.rest()
        return self

    @property
    def _is_sharded(self) -> bool:
        """True if a rank has pieces of parameters (``fully_shard``), and none as a whole."""
        return any(hasattr(p, "to_local") for _, p in self._named)

    def _meet_node(self) -> tuple[NewNode | None, Manifest, bytes]:
        """The connection to the node, and the run's manifest: decoded, and encoded as the node sent it."""
        if self._request is not None:
            return self._lead_to_manifest(self._request)
        assert self._parent is not None
        told = read_regular(self._parent.manifest)
        return self._parent, msgspec.msgpack.decode(told, type=Manifest), told

    def _lead_to_manifest(self, request: NodeRequest) -> tuple[NewNode | None, Manifest, bytes]:
        """The leader's connection to its node, and the run's manifest: decoded, and encoded as the node sent it."""
        initial: Sequence[tuple[str, Tensor]] = ()
        if request.foundation is not None:  # an island: a copy at its leader
            initial = self._named if self._ranks is None else self._ranks.gather(self._named)
        visits: list[NewNode] = []

        def meet() -> bytes:
            self._node_process = node_process = ScriptNode(self._state, request)
            is_new = False
            if node_process.is_founder and request.foundation is not None and self._config is not None:
                embeddings = frozenset(embedding_names(self._model))
                is_new = not request.foundation.exists()
                founding_file.write_once(request.foundation, self._config, initial, embeddings, self._given)
            try:
                found = node_process.connect()
            except ScriptNodeError:
                if is_new and request.foundation is not None and not node_process.has_run:
                    request.foundation.unlink()  # nothing was founded: the next try may have other settings
                raise
            visits.append(found)
            return found.manifest

        try:
            data = meet() if self._ranks is None else self._ranks.lead(meet, DiLoCoError)
            manifest = msgspec.msgpack.decode(data, type=Manifest)
        except (ScriptNodeError, founding_file.FoundationError, OSError) as error:
            remedy = ": the state folder cannot be used; choose another (state=)" if isinstance(error, OSError) else ""
            raise DiLoCoError(f"{error}{remedy}") from error
        except ValueError as error:
            raise DiLoCoError(f"the node sent no valid manifest ({error}): see its log, {self._log}") from error
        if manifest.config.model.kind != "external":
            raise DiLoCoError(
                f"run {manifest.config.name} was not created by a training script: join it with p2pdiloco join"
            )
        return (visits[0] if visits else None), manifest, data

    def _take_part(self, new_node: NewNode | None, manifest: Manifest, told: bytes) -> None:
        """Build the link, and wait for the global parameters."""
        layout, island, parent = Layout.of(manifest), self._ranks, self._parent
        back: NodeSearch | None = None if parent is None else parent.listener
        if self._node_process is not None:
            back = RestartedNode(self._node_process, told)
        flat: FlatParameters | RankGroupParameters
        try:
            if island is None:
                flat = FlatParameters(self._named, manifest.tensors, layout)
            else:
                from p2pdiloco.training import multi_rank

                flat = multi_rank.RankGroupParameters(self._named, manifest.tensors, layout, island)
                new_node = multi_rank.RankGroupNewNode(island, new_node)
                back = multi_rank.RankGroupNodeSearch(island, back)
            assert new_node is not None
            vectors, channel = new_node.attach(layout)
        except ValueError as error:
            raise DiLoCoError(f"this model does not match run {manifest.config.name}: {error}") from error
        if self._node_process is not None and not self._node_process.is_founder:
            founding_file.tell_differences(manifest.config, self._given)
            if self._config is not None:
                founding_file.tell_other_base(manifest.config, self._config)
        inner, evaluate = manifest.config.inner, self._evaluate
        self._check = StepCheck(self._model, self._optimizers, () if self._is_sharded else self._named)

        def measure(theta: Tensor) -> float:
            assert evaluate is not None
            shown = flat.showing(theta) if isinstance(flat, FlatParameters) else self.global_parameters()
            with shown, torch.no_grad():
                return float(evaluate())

        self._link = link = NodeLink(
            flat,
            vectors,
            channel,
            last_step=inner.steps,
            token_budget=0 if inner.tokens is msgspec.UNSET else inner.tokens,
            node_search=back,
            doubt=self._problem,
            on_update=self._on_update,
            evaluate=None if evaluate is None else measure,
            save=self._save,
            blocks=None if parent is None else parent.blocks,
        )
        device = str(self._named[0][1].device)
        if parent is None:
            link.greet(device=device)
        else:
            parent.link = link
            link.greet(device=device, inner_steps=parent.inner_steps, has_blocks=parent.has_blocks)
        self._is_linked = True
        while self._is_linked and not link.is_loaded:
            link.wait()
            self._is_linked = link.boundary()
        self._run = manifest.run
        if parent is not None:
            return  # it may have ended: then ``wait`` returns False
        if not link.is_loaded:
            ending = "" if self._node_process is None else self._node_process.ending
            raise DiLoCoError(ending or f"the node ended before it had joined the run: see its log, {self._log}")
        if self._node_process is not None:
            founding_file.tell_end(manifest.config.name, self._given["total_steps"], link.last_step, self._state)
            self._tell_end(manifest.config.name, link.last_step, self._state)
        self._load_buffers()
        self._wait_for_swarm(self._wait_for_peers)
        self._begin_to_look()

    __enter__ = start

    @torch.no_grad()
    def _load_buffers(self) -> None:
        """Load the buffers that an earlier process of this script has saved."""
        here = named_buffers(self._model)
        try:
            saved = read_buffers(self._state, self._run)
        except (OSError, ValueError) as error:
            raise DiLoCoError(str(error)) from error
        for name, value in saved.items():
            if name in here and here[name].shape == value.shape:
                here[name].copy_(value)
                self._has_buffers = True

    def _save(self) -> None:
        self._save_buffers()
        if self._on_save is not None:
            self._on_save()

    def _save_buffers(self) -> None:
        """Save the model's buffers. Only the leader of an island does."""
        if self._node_process is None or not self._has_buffers:
            return
        try:
            write_buffers(self._state, self._run, self._model)
        except OSError as error:
            log.warning("the model's buffers cannot be saved, so exports lack them: %s", error)

    @property
    def _log(self) -> Path:
        return self._state / NODE_LOG

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``close``. All ranks of an island leave together. A rank that fails leaves alone; the peer's node stays until
        the island is restarted."""
        if self._begun_in != os.getpid():
            return
        self._begun_in = 0
        self._unhook()
        self._tally.end()
        self._look_no_more()
        try:
            self._tell_parent(error)
            if error is None or (self._ranks is None and self._parent is None):
                self._save_buffers()
                self._part()
                self._end_node(None)
        finally:
            self._is_linked = False
            if self._node_process is not None:  # a rank has failed, or this one was told to end while it left
                if not isinstance(sys.exc_info()[1] or error, Exception):
                    self._node_process.send(signal.SIGTERM)
                self._node_process.release_folder()
            script_lifecycle.end(self._state)

    def _tell_parent(self, error: BaseException | None) -> None:
        """Tell the node that has started this process why it ends."""
        if self._parent is not None and isinstance(error, Exception):
            self._parent.fail(str(error) or type(error).__name__)

    def close(self) -> None:
        """Contribute unmerged progress, and leave the run. Leaving the ``with`` block calls it.

        The node sends unmerged progress for up to 20 s (``node_options=("--leave-s", "60")``: 60 s); what is not merged
        by then is lost. At the end of a run it may take 60 s. It then saves its state, and serves the result of
        a complete run for ``stay_s``. A node that hangs is killed after 90 s and ``--leave-s``, plus 160 s per billion
        parameters.

        A second call does nothing. The model keeps its own parameters; call ``load_global`` for the run's. All ranks of
        an island call it.
        """
        self.__exit__(None, None, None)

    def _leave_at_once(self) -> None:
        """At the exit of the process. A rank of an island has failed then, unless a user interrupted it."""
        self.__exit__(None, None if self._ranks is None else getattr(sys, "last_value", None), None)

    def _hook_steps(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._on_step))

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def _leave_s(self) -> float:
        options = () if self._request is None else self._request.options
        return leaving_s(sum(parameter.numel() for _, parameter in self._named), options)

    def _part(self) -> None:
        """Ask the node to leave, and serve its requests meanwhile. Wait first for a node that is being restarted."""
        link, node_process, is_told = self._link, self._node_process, False
        deadline = time.monotonic() + self._leave_s
        while link is not None and self._is_linked and link.boundary():
            if node_process is not None:
                if not is_told and not link.is_alone and not self.is_complete:
                    is_told = True
                    node_process.stop(signal.SIGTERM)
                if time.monotonic() > deadline:
                    log.warning("the node does not exit and is killed (see %s)", self._log)
                    node_process.stop(signal.SIGKILL)
                    deadline += self._leave_s
            link.wait()
        self._is_linked = False

    def _end_node(self, number: signal.Signals | None) -> None:
        if (node_process := self._node_process) is None:
            return
        if number is not None:
            node_process.stop(number)
        status, self._node_process = node_process.wait(self._leave_s), None
        if status and number is None:
            log.warning("%s (its log is %s)", node_process.describe_exit(status), self._log)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def count(self, tokens: int, loss: float | Tensor | None = None) -> None:
        """Count tokens of the optimizer step under way, instead of ``tokens_per_step``.

        Several calls before one ``optimizer.step()`` add up, as micro-batches do.

        Args:
            tokens: Tokens that this process trains on, a whole number (or a tensor with one). With several ranks, each
                counts its own.
            loss: Loss for status and metrics, a number or a tensor with one element. A tensor is read at most once a
                second, because reading one waits for the GPU.

        Raises:
            DiLoCoError: One of them is something else.
        """
        tokens = script_arguments.whole("tokens", tokens, 0, script_arguments.MOST_TOKENS)
        self._tally.count(tokens, None if loss is None else script_arguments.loss(loss))

    def report(self, loss: float | Tensor | None = None, *, reward: float | None = None) -> None:
        """Report the loss, if ``count`` does not, and a reward, for status and metrics.

        Args:
            loss: As for ``count``.
            reward: Mean reward of the latest completions, in reinforcement learning.

        Raises:
            DiLoCoError: It is something else.
        """
        if loss is not None or reward is None:
            self._tally.report(script_arguments.loss(loss))
        if reward is not None and self._link is not None:
            self._link.reward = float(script_arguments.loss(reward, "reward"))

    def wait(self) -> bool:
        """Wait until a step may be made: ``while outer.wait():`` is the loop of a script that stays to the end of its
        peer.

        It returns at once while the run is trained. At the end of the run it serves the result until the peer leaves,
        and training continues if the run is prolonged meanwhile. All ranks of an island call it.

        Returns:
            True if a step may be made; without a run always. False if the peer has left, or its node is lost for good.

        Raises:
            DiLoCoError: ``start`` was never called.
        """
        link, check = self._link, self._check
        if link is None or check is None:
            if self._has_run:
                raise DiLoCoError(script_lifecycle.NOT_BEGUN)
            return True
        if link.is_training:
            return self._is_linked
        try:
            while self._is_linked and not link.is_training:
                link.wait()
                self._is_linked = link.boundary()
        except Exception:  # noqa: BLE001
            self._fail()
        check.on_parameters_set()
        self._stepped_at = time.perf_counter()
        return self._is_linked

    @property
    def is_complete(self) -> bool:
        """True when training should stop: the run is complete, or this peer is leaving. False without a run.

        If the node is lost for good and the script trains alone, it is True once ``global_step`` is ``total_steps``.
        """
        link = self._link
        return link is not None and (not link.is_training or link.counts.global_step >= link.last_step)

    @property
    def global_step(self) -> int:
        """The run's step, an int from 0 to ``total_steps``; 0 without a run. Base learning-rate schedules on it.

        It grows by 1 with each step of this script, and follows the fastest peer whenever an exchange arrives. So it is
        about the same at all peers.
        """
        return 0 if self._link is None else min(self._link.counts.global_step, self._link.last_step)

    @property
    def total_steps(self) -> int:
        """The step at which the run is complete; 0 without a run. It grows if the run is prolonged."""
        return 0 if self._link is None else self._link.last_step

    @property
    def progress(self) -> float:
        """The part of the run that is over, a float from 0.0 to 1.0; 0.0 without a run. For learning-rate schedules.

        This is ``global_step / total_steps``; in a run with a token budget, the merged part of it.
        """
        link = self._link
        if link is not None and link.token_budget:
            return min(1.0, link.merged_tokens / link.token_budget)
        return 0.0 if link is None else self.global_step / link.last_step

    def load_global(self) -> None:
        """Load the run's parameters into the model, in place. Its buffers stay this peer's own.

        This drops progress of this script that is not merged yet, so call it after ``close``; for evaluation while
        training use ``global_parameters``. All ranks of an island call it. Without ``run`` it does nothing.

        Raises:
            DiLoCoError: ``start`` was never called, or the model has moved or holds other parameters since then.
        """
        if self._link is not None:
            if self._check is not None and (why := self._check.replaced()):
                raise DiLoCoError(f"{why}, so the run's parameters cannot be loaded: call load_global before that")
            self._link.load_global()
            if self._check is not None:
                self._check.on_parameters_set()
            if self.global_step and not self._has_buffers and (names := list(named_buffers(self._model))):
                log.warning(
                    "this script has not trained, so the model's buffers (%s) do not fit the run's parameters: peers "
                    "do not exchange them. BatchNorm's statistics need some batches in training mode",
                    ", ".join(names[:MOST_TOLD]) + (", ..." if len(names) > MOST_TOLD else ""),
                )
        elif self._has_run:
            raise DiLoCoError(script_lifecycle.NOT_BEGUN)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Context manager: inside the block the model holds the run's parameters, for evaluation or saving.

        Afterwards it holds its own again. Buffers, such as BatchNorm's statistics, are this peer's own all the time.
        The block must not step the optimizer. It takes memory for a copy of the trainable parameters on their device.
        All ranks of an island enter it.

        Raises:
            DiLoCoError: ``start`` was never called.
        """
        own = [p.detach().clone() for _, p in self._named] if self._link is not None else []
        try:
            self.load_global()
            yield
        finally:
            with torch.no_grad():
                for (_, p), before in zip(self._named, own, strict=False):
                    p.copy_(before)
            if self._check is not None:
                self._check.on_parameters_set()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._check is None or not self._is_linked or self._begun_in != os.getpid() or not self._tally.is_between:
            return
        try:
            self._check.before()
        except Exception:  # noqa: BLE001 - none of ours leaves the user's optimizer.step()
            self._fail()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        link, check = self._link, self._check
        if link is None or check is None or self._begun_in != os.getpid() or not self._tally.stepped(optimizer):
            return
        if not self._is_linked:  # the script trains alone, for as many steps as the run has
            link.counts.global_step += not link.is_dismissed
            return
        try:
            self._exchange(link, check)
        except Exception:  # noqa: BLE001
            self._fail()

    def _fail(self) -> None:
        """Train alone from now on, because of the error that is being handled. It is raised again where others restart
        this process: in an island, whose ranks wait for this one, and where a node has started it."""
        if self._ranks is not None or self._parent is not None:
            raise
        notes = getattr(sys.exception(), "__notes__", ())
        given = next((note for note in notes if note.startswith(script_arguments.GIVEN_AS)), "")
        what, remedy = ("an error ", "Mend it") if given else ("an error of p2pdiloco", "Please report it")
        log.exception("%s%s: from now on this script trains alone. %s", what, given, remedy)
        self._is_linked = False
        if self._node_process is not None:
            self._node_process.stop(signal.SIGTERM)

    def _problem(self) -> str:
        """Return why this script's updates must not be merged; empty: they may."""
        own = "" if self._check is None else self._check.problem()
        return own or self._tally.problem()

    def _exchange(self, link: NodeLink, check: StepCheck) -> None:
        """Do everything between two steps: check the step, count it, and exchange what is due."""
        check.after()
        now = time.perf_counter()
        tokens, loss, is_step = self._tally.take()
        if self._ranks is not None:
            ranks, tokens, losses, known = self._ranks.totals(is_step, tokens, loss)
            is_step, loss = ranks > 0, losses / known if known else None
        if is_step:
            self._tally.settle(tokens)
        if link.is_training and is_step:
            self._has_buffers = True
            link.stepped(tokens, loss, now - self._stepped_at)
        self._look_at_batches(link)
        self._is_linked = link.boundary()
        while self._is_linked and link.is_training and link.is_resting:
            link.wait()
            self._is_linked = link.boundary()
        if not self._is_linked and not link.is_dismissed and self._parent is None:
            log.warning("the node is lost: from now on this script trains alone (see %s)", self._log)
        check.rest()
        self._stepped_at = time.perf_counter()


def _rank_group(group: dist.ProcessGroup | None, leave_s: float, *, is_sharded: bool) -> RankGroup | None:
    """The island to which this process belongs; None if it is the only rank and has plain parameters."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size(group) <= 1 and not is_sharded:
        return None
    from p2pdiloco.training.multi_rank import RankGroup

    return RankGroup(group, JOIN_S + leave_s)
