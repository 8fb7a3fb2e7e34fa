"""Bugs of a learner's link and of a script's node; see ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_LINK = "p2pdiloco.training.node_link"
_COMPANION = "p2pdiloco.script_node"

_SIDE = "p2pdiloco.training.cuda_copies"
_SIDE_TESTS = "tests/unit/test_training_cuda_copies.py"
_LINK_TESTS = "tests/unit/test_training_node_link.py"
_COMPANION_TESTS = "tests/unit/test_script_node.py"
_ADOPTED = "test_a_learner_that_is_adopted_keeps_its_progress_since_the_loss_and_counts_nothing_twice"
_CONSERVATION = "tests/property/test_conservation.py::test_every_token_trained_stands_in_the_parameters_once"
_QUEUE = "tests/unit/test_util_executor.py"

_ARGUMENT_TESTS = "tests/unit/test_training_script_arguments.py"
_CHECK = "p2pdiloco.training.step_check"
_CHECK_TESTS = "tests/unit/test_training_step_check.py"

BUGS = (
    Bug(
        name="a loop may put back a copy between steps",
        module=_CHECK,
        where="StepCheck._read",
        old="lost > 1.0 - KEPT",
        new="False",
        harm="Lookahead around an optimizer undoes half of what comes from the other peers",
        killed_by=(f"{_CHECK_TESTS}::test_lookahead_around_the_optimizer_is_told_within_a_turn",),
    ),
    Bug(
        name="weight decay is taken for a copy",
        module=_CHECK,
        where="StepCheck._judge_step",
        old="KEPT - max(map(_decay, self._optimizer.param_groups))",
        new="KEPT",
        harm="nothing of an honest peer with a large rate is merged",
        killed_by=(f"{_CHECK_TESTS}::test_an_optimizer_that_starts_from_the_parameters_is_never_told",),
    ),
    Bug(
        name="a schedule that is over before the run follows it",
        module="p2pdiloco.integrations.lr_schedules",
        where="Schedules.__init__",
        old="steps == outer.total_steps",
        new="True",
        harm="a peer trains at rate 0, or at one that rises again, and its tokens count all the same",
        killed_by=("tests/unit/test_integrations.py::test_the_trainers_schedule_follows_the_run_if_it_is_as_long",),
    ),
    Bug(
        name="whatever run has the name goes on",
        module=_COMPANION,
        where="ScriptNode._kept_run",
        old="[run for run in self._runs_here() if not invites or run in invites]",
        new="self._runs_here()[:1]",
        harm="a script with an invite to one run trains another one of the same name, which its folder has",
        killed_by=(f"{_COMPANION_TESTS}::test_of_several_runs_of_one_name_the_invites_goes_on",),
    ),
    Bug(
        name="a schedule begins anew wherever the run is",
        module="p2pdiloco.integrations.lr_schedules",
        where="follow",
        old="range(at, step)",
        new="range(0)",
        harm="who joins late, or comes back, trains at the peak's rate until the run's end",
        killed_by=("tests/unit/test_integrations.py::test_a_schedule_follows_the_runs_step",),
    ),
    Bug(
        name="who goes on alone asks for the bootstrap again",
        module=_COMPANION,
        where="ScriptNode.connect",
        old="self._resume(kept)",
        new="self._resume(kept, *self._wish.peers)",
        harm="all others have gone, and the script ends with a state of the run in its folder",
        killed_by=(f"{_COMPANION_TESTS}::test_who_has_the_runs_state_goes_on_though_nobody_answers",),
    ),
    Bug(
        name="a run of the same name is founded beside the one that is there",
        module=_COMPANION,
        where="ScriptNode.__init__",
        old="wish._replace(foundation=None)",
        new="wish",
        harm="a script that is told to name no peers begins from a random model, at step 0",
        killed_by=(f"{_COMPANION_TESTS}::test_a_folder_with_a_run_that_somebody_else_founded_is_not_founded_anew",),
    ),
    Bug(
        name="a learner's socket has a small number",
        module="p2pdiloco.training.ipc_channel",
        where="Channel.wait",
        old="self._poll(reading | (select.POLLOUT if self._outgoing else 0))",
        new="select.select([self._socket], [], [])",
        harm="the learner of a node with a thousand connections ends before it has begun, without a word",
        killed_by=("tests/unit/test_training_ipc_channel.py::test_a_node_with_many_connections_has_a_learner",),
    ),
    Bug(
        name="a run of steps has its decay by what is merged",
        module="p2pdiloco.training.optimizers",
        where="learning_rate",
        old="global_step / config.steps if config.tokens is UNSET else merged_tokens / config.tokens",
        new="merged_tokens / (config.tokens or config.steps)",
        harm="the rate of a run that has no budget of tokens is at its end after its first turn",
        killed_by=(
            "tests/unit/test_training_corpus.py::"
            "test_a_run_of_steps_that_says_its_decay_falls_in_a_line_and_to_nothing_if_it_likes",
        ),
    ),
    Bug(
        name="matrices that are computed together change places",
        module="p2pdiloco.training.optimizers",
        where="Muon._step_together",
        old="orthogonalized(torch.cat([update.reshape(-1, *update.shape[-2:]) for update in updates]))",
        new="orthogonalized(torch.cat([update.reshape(-1, *update.shape[-2:]) for update in updates[::-1]]))",
        harm="layers of one shape are moved by each other's gradients",
        killed_by=(
            "tests/unit/test_training_optimizers.py::test_muon_computes_matrices_of_one_shape_together_and_alike",
        ),
    ),
    # -- copies from and to a device -----------------------------------------------------------------------------------
    Bug(
        name="parameters travel without having been cloned",
        module=_SIDE,
        where="CudaCopies.to_host",
        old="view.to(torch.float32, copy=True)",
        new="view.to(torch.float32)",
        harm="a snapshot holds parts of steps that came after it",
        killed_by=(f"{_SIDE_TESTS}::test_what_reaches_the_host_is_what_the_parameters_were",),
    ),
    Bug(
        name="a whole model is staged on the device",
        module=_SIDE,
        where="CudaCopies._make_room",
        old="event.synchronize",
        new="event.query",
        harm="loading needs four bytes a parameter more of the GPU than training",
        killed_by=(f"{_SIDE_TESTS}::test_a_whole_model_takes_only_so_much_of_the_device",),
    ),
    # -- the learner's link --------------------------------------------------------------------------------------------
    Bug(
        name="an adopted learner's old tokens counted again",
        module=_LINK,
        where="NodeLink._lost_node",
        old="self.counts.steps = self.counts.tokens = 0",
        new="self.counts.steps = self.counts.steps",
        harm="tokens that the last node merged, or that are gone, are claimed once more",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="an adopted learner has paused before it is asked",
        module=_LINK,
        where="NodeLink._stop",
        old="not self.is_alone",
        new="True",
        harm="a node that comes back to an older state takes the run for complete, and leaves what is trained next",
        killed_by=(f"{_LINK_TESTS}::test_who_reached_the_runs_end_alone_trains_on_where_its_nodes_next_life_says",),
    ),
    Bug(
        name="an adopted learner's progress thrown away",
        module=_LINK,
        where="NodeLink._copy",
        old="self._anchor is not None",
        new="False and self._anchor is not None",
        harm="what was trained without a node is claimed, and is not there",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="answers to the last node go to the next",
        module=_LINK,
        where="NodeLink._lost_node",
        old="self._answers.clear",
        new="self._answers.copy",
        harm="a snapshot that was never asked for is encoded from an empty buffer",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="a replacement is added",
        module=_LINK,
        where="NodeLink._apply",
        old="self._flat.copy_from if replace else self._flat.add_from",
        new="self._flat.add_from",
        harm="a learner that is reset doubles its parameters",
        killed_by=(f"{_LINK_TESTS}::test_a_replacement_takes_the_place_of_what_was_trained", _CONSERVATION),
    ),
    Bug(
        name="what the socket did not take is dropped",
        module="p2pdiloco.training.ipc_channel",
        where="Channel._send",
        old="del self._outgoing[:sent]",
        new="self._outgoing.clear()",
        harm="a busy node gets half a message, and loses its learner",
        killed_by=(f"{_LINK_TESTS}::test_answers_that_do_not_fit_into_the_socket_come_later_and_whole",),
    ),
    Bug(
        name="what a node said last is lost with it",
        module=_LINK,
        where="NodeLink.boundary",
        old="if not self.is_training or self.is_resting:\n    ...",
        new=(
            "commands = [] if self._node.channel.is_closed else commands\n"
            "if not self.is_training or self.is_resting:\n"
            "    ..."
        ),
        harm="a script whose run is over finds no result",
        killed_by=(f"{_LINK_TESTS}::test_what_the_node_has_said_before_it_left_is_done",),
    ),
    Bug(
        name="snapshots not looked at",
        module=_LINK,
        where="NodeLink._release",
        old="self._judge_snapshot(message.fragment)",
        new="pass",
        harm="parameters that are not finite stop a swarm in silence",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    Bug(
        name="one sound fragment outweighs a spoilt one",
        module="p2pdiloco.training.node_link",
        where="Health.copied",
        old="not self._spoilt",
        new="None not in self._spoilt",
        harm="trouble comes and goes with the fragments",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    # -- a script's node -----------------------------------------------------------------------------------------------
    Bug(
        name="a large model's node has no more time to end than a small one's",
        module="p2pdiloco.script_node",
        where="leaving_s",
        old="LEAVE_S + max(0.0, given_s) + parameters * WRITTEN_BYTES / WRITTEN_BYTES_PER_S",
        new="LEAVE_S",
        harm="what was trained last is killed while it is merged and written",
        killed_by=("tests/unit/test_script_node.py::test_the_node_of_a_large_model_is_waited_for_longer",),
    ),
    Bug(
        name="an empty variable founds a second run",
        module="p2pdiloco.training.script_arguments",
        where="peers",
        old="is_blank and found is None",
        new="False",
        harm="a script that should join trains a run of its own, in silence",
        killed_by=(f"{_ARGUMENT_TESTS}::test_a_mistake_is_told_with_the_remedy_before_anything_is_founded",),
    ),
    Bug(
        name="an error of ours leaves the user's step",
        module="p2pdiloco.diloco",
        where="DiLoCo._fail",
        old="self._island is not None",
        new="True",
        harm="a folder that was moved ends the training",
        killed_by=(
            f"{_ARGUMENT_TESTS}::test_no_error_leaves_a_step_and_a_script_that_trains_alone_ends_at_the_runs_last_step",
        ),
    ),
    Bug(
        name="the probe is not in the copies",
        module=_CHECK,
        where="StepCheck._put_on",
        old="self._tell_copies(self._probe)",
        new="None",
        harm="a script that changes its master weights too is never merged",
        killed_by=(f"{_CHECK_TESTS}::test_copies_that_are_changed_too_are_honest_and_those_that_are_not_are_told",),
    ),
    Bug(
        name="a schedule-free optimizer keeps its points where they were",
        module="p2pdiloco.training.script_arguments",
        where="_change_points",
        old="point.add_(change)",
        new="None",
        harm="it pulls back what came from other peers, and is never merged, or in silence if it has made many steps",
        killed_by=("tests/unit/test_training_optimizer_copies.py::test_two_peers_learn_both_halves",),
    ),
    Bug(
        name="SAM's own steps are looked at",
        module="p2pdiloco.training.script_arguments",
        where="_inner",
        old='"base_optimizer"',
        new='"optimizer"',
        harm="a script that calls both halves of its step is never merged, in silence",
        killed_by=("tests/unit/test_training_optimizer_copies.py::test_two_peers_learn_both_halves",),
    ),
    Bug(
        name="an optimizer that goes back is probed on after it was told",
        module=_CHECK,
        where="StepCheck._put_on",
        old="len(self._lost) >= TIMES",
        new="False",
        harm="each probe is taken off where it is no longer, and the script's model drifts away",
        killed_by=(
            f"{_CHECK_TESTS}::test_an_optimizer_that_goes_back_after_its_closure_is_told_and_its_model_not_spoilt",
        ),
    ),
    Bug(
        name="DeepSpeed's optimizer is taken",
        module="p2pdiloco.training.script_arguments",
        where="_refuse_unreachable_copies",
        old="kind.__module__.startswith('deepspeed.runtime.')",
        new="False",
        harm="its users are told to give its inner optimizer, which does not hold the parameters",
        killed_by=(f"{_ARGUMENT_TESTS}::test_a_mistake_is_told_with_the_remedy_before_anything_is_founded",),
    ),
    Bug(
        name="a frozen base is known by its names alone",
        module="p2pdiloco.training.parameters",
        where="frozen_digest",
        old="sample.view(torch.uint8).numpy().tobytes()",
        new="b''",
        harm="adapters that are merged belong to different bases, in silence",
        killed_by=(
            "tests/unit/test_training_founding_file.py::test_a_script_with_another_base_is_told_with_both_names",
        ),
    ),
    Bug(
        name="containers of one path meet each other's nodes",
        module="p2pdiloco.training.node_reconnect",
        where="meeting_place",
        old="path.stat().st_ino",
        new="0",
        harm="two containers on the host's network are told that scripts need Linux",
        killed_by=(f"{_COMPANION_TESTS}::test_folders_of_one_path_in_two_containers_have_meeting_places_of_their_own",),
    ),
    Bug(
        name="more is read than the welcome",
        module="p2pdiloco.training.node_reconnect",
        where="Reunion._has_said_all",
        old="visitor.recv(missing)",
        new="visitor.recv(missing + 4096)",
        harm="the first commands are taken for a piece of the manifest",
        killed_by=(f"{_COMPANION_TESTS}::test_a_script_is_told_the_run_before_it_takes_the_node_however_slowly",),
    ),
    # -- threads for tensors -------------------------------------------------------------------------------------------
    Bug(
        name="threads do not wait for each other",
        module="p2pdiloco.util.executor",
        where="WorkQueue.do",
        old="threading.Barrier(len(self._jobs))",
        new="threading.Barrier(1)",
        harm="a snapshot is brought up to date while a shift of one of its shards is being made",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="a shard has no thread of its own",
        module="p2pdiloco.util.executor",
        where="WorkQueue.do",
        old="self._jobs[(key or 0) % len(self._jobs)]",
        new="min(self._jobs, key=lambda jobs: jobs.qsize())",
        harm="a shard's next commit is applied before the one that it follows",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="all shards have one thread",
        module="p2pdiloco.util.executor",
        where="WorkQueue.do",
        old="(key or 0) % len(self._jobs)",
        new="0",
        harm="more cores are of no use",
        killed_by=(f"{_QUEUE}::test_what_has_different_keys_is_done_at_the_same_time",),
    ),
    Bug(
        name="gates stay shut when a node ends",
        module="p2pdiloco.util.executor",
        where="WorkQueue.close",
        old="gate.abort()",
        new="gate.n_waiting",
        harm="its process never ends",
        killed_by=(f"{_QUEUE}::test_who_closes_leaves_no_thread_behind",),
    ),
    Bug(
        name="threads wait for work that was called off",
        module="p2pdiloco.util.executor",
        where="WorkQueue._has_done_one",
        old=(
            "if job.gate is not None:\n"
            "    job.gate.wait()\n"
            "if job.future is not None and (not job.future.cancelled()):\n"
            "    self._do(job.future, job.work)"
        ),
        new=(
            "if job.gate is not None and (not job.future or not job.future.cancelled()):\n"
            "    job.gate.wait()\n"
            "if job.future is not None and (not job.future.cancelled()):\n"
            "    self._do(job.future, job.work)"
        ),
        harm="a node hangs after a copy that came too late",
        killed_by=(f"{_QUEUE}::test_work_that_is_called_off_holds_nobody_up",),
    ),
    Bug(
        name="a learner holds its node's status pipe open",
        module="p2pdiloco.node.learner_process",
        where="bear",
        old="status_pipe.writer.close()",
        new="status_pipe.writer",
        harm="whoever has started a node is not told of its death while its learner lives",
        killed_by=(
            "tests/unit/test_util_status_pipe.py::test_a_learner_that_outlives_its_node_does_not_keep_the_pipe_open",
        ),
    ),
    Bug(
        name="threads share their scratch",
        module="p2pdiloco.peer.model_state",
        where="",
        old="class _Scratch(threading.local):\n    ...",
        new="class _Scratch:\n    ...",
        harm="a merge has another shard's values",
        killed_by=("tests/unit/test_peer_tensor_threads.py::test_several_threads_make_the_bits_of_one",),
    ),
)
