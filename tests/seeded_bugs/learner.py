"""Bugs of a learner's link and of a script's node; see ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_LINK = "p2pdiloco.training.node_link"
_COMPANION = "p2pdiloco.script_node"
_PARTICIPATION = "p2pdiloco.script_lifecycle"

_SIDE = "p2pdiloco.training.cuda_copies"
_SIDE_TESTS = "tests/unit/test_training_cuda_copies.py"
_LINK_TESTS = "tests/unit/test_training_node_link.py"
_PARTICIPATION_TESTS = "tests/unit/test_script_lifecycle.py"
_COMPANION_TESTS = "tests/unit/test_script_node.py"
_ADOPTED = "test_a_learner_that_is_adopted_keeps_its_progress_since_the_loss_and_counts_nothing_twice"
_CONSERVATION = "tests/property/test_conservation.py::test_every_token_trained_stands_in_the_parameters_once"
_QUEUE = "tests/unit/test_util_executor.py"

_CHECK = "p2pdiloco.training.step_check"
_CHECK_TESTS = "tests/unit/test_training_step_check.py"
_DOUBTED = "test_what_the_training_loop_doubts_is_told_and_given_to_nobody_until_it_is_over"

BUGS = (
    Bug(
        name="an optimizer may put back its own copy",
        module=_CHECK,
        old="if mean + SIGMAS * error < least:",
        new="if False:",
        harm="master weights undo what comes from the other peers at each step, and count as much as what those train",
        killed_by=(f"{_CHECK_TESTS}::test_master_weights_are_told_within_a_turn",),
    ),
    Bug(
        name="a loop may put back a copy between steps",
        module=_CHECK,
        old="and lost > 1.0 - KEPT:",
        new="and False:",
        harm="Lookahead around an optimizer undoes half of what comes from the other peers",
        killed_by=(f"{_CHECK_TESTS}::test_lookahead_around_the_optimizer_is_told_within_a_turn",),
    ),
    Bug(
        name="weight decay is taken for a copy",
        module=_CHECK,
        old="KEPT - max(map(_decay, self._optimizer.param_groups))",
        new="KEPT",
        harm="nothing of an honest peer with a large rate is merged",
        killed_by=(f"{_CHECK_TESTS}::test_an_optimizer_that_starts_from_the_parameters_is_never_told",),
    ),
    Bug(
        name="a model that never moves is merged",
        module=_CHECK,
        old="if self._idle_steps >= (IDLE_STEPS if self._has_changed else 2):",
        new="if False:",
        harm="a script trains a copy of its model, and holds all others back with its full weight",
        killed_by=(f"{_CHECK_TESTS}::test_a_model_whose_copy_is_trained_is_told_until_it_is_trained_itself",),
    ),
    Bug(
        name="a probe stays when a step fails",
        module=_CHECK,
        old="        self._take_off()\n        self._at_rest = None\n",
        new="        self._at_rest = None\n",
        harm="the model that a script saves after an error has noise in it",
        killed_by=(f"{_CHECK_TESTS}::test_a_step_that_fails_leaves_no_probe",),
    ),
    Bug(
        name="what is doubted is given all the same",
        module=_LINK,
        old="                piece.fill_(math.nan)\n",
        new="                pass\n",
        harm="people are told that nothing is merged, and it is",
        killed_by=(f"{_LINK_TESTS}::{_DOUBTED}",),
    ),
    Bug(
        name="an optimizer of another model is taken",
        module="p2pdiloco.diloco",
        old="    if not any(id(p) in held for _, p in named):",
        new="    if False:",
        harm="a run is founded from a copy that nobody trains",
        killed_by=(
            "tests/unit/test_training_parameters_trainable.py::"
            "test_an_optimizer_that_holds_none_of_the_model_is_refused_and_one_that_holds_a_part_is_not",
        ),
    ),
    Bug(
        name="a Trainer that begins anew counts twice",
        module="p2pdiloco.integrations.transformers",
        old="        self._leave()\n        model, wrapped",
        new="        model, wrapped",
        harm="after a search for the batch size each token counts as often as there were attempts",
        killed_by=("tests/unit/test_integrations.py::test_a_trainer_that_begins_anew_counts_each_token_once",),
    ),
    Bug(
        name="parameters may move",
        module="p2pdiloco.training.step_counter",
        old="if any(p.data_ptr() != place for p, place in self._places):",
        new="if False:",
        harm="a model is put into another type in mid-run: its peer gives zeros for all its tokens, and nobody is told",
        killed_by=(
            "tests/unit/test_training_step_counter.py::test_parameters_that_were_given_other_memory_are_told_at_the_next_step",
        ),
    ),
    Bug(
        name="another optimizer takes ours' place in silence",
        module="p2pdiloco.training.step_counter",
        old="            self._other_steps += 1\n",
        new="            pass\n",
        harm="an optimizer is made anew in mid-run: nothing is merged from there on, and the run is never complete",
        killed_by=("tests/unit/test_training_step_counter.py::test_an_optimizer_that_takes_the_place_of_ours_is_told",),
    ),
    Bug(
        name="a schedule that is over before the run follows it",
        module="p2pdiloco.integrations.lr_schedules",
        old="self._is_as_long = steps == outer.total_steps",
        new="self._is_as_long = True",
        harm="a peer trains at rate 0, or at one that rises again, and its tokens count all the same",
        killed_by=("tests/unit/test_integrations.py::test_the_trainers_schedule_follows_the_run_if_it_is_as_long",),
    ),
    Bug(
        name="whatever run has the name goes on",
        module=_COMPANION,
        old="found = [run for run in self._runs_here() if not invites or run in invites]",
        new="found = self._runs_here()[:1]",
        harm="a script with an invite to one run trains another one of the same name, which its folder has",
        killed_by=(f"{_COMPANION_TESTS}::test_of_several_runs_of_one_name_the_invites_goes_on",),
    ),
    Bug(
        name="a script that has begun nothing changes the optimizer's hooks in its step",
        module="p2pdiloco.script_lifecycle",
        old="not is_told and not _here and living() is not None",
        new="not is_told and living() is not None",
        harm="a notebook's second DiLoCo, which was not begun, says that the first one trains alone",
        killed_by=(f"{_PARTICIPATION_TESTS}::test_what_was_not_begun_is_told_once_at_a_step_and_changes_nothing",),
    ),
    Bug(
        name="a schedule begins anew wherever the run is",
        module="p2pdiloco.integrations.lr_schedules",
        old="        for _ in range(at, step):",
        new="        for _ in range(0):",
        harm="who joins late, or comes back, trains at the peak's rate until the run's end",
        killed_by=("tests/unit/test_integrations.py::test_a_schedule_follows_the_runs_step",),
    ),
    Bug(
        name="who takes part again does not leave first",
        module=_PARTICIPATION,
        old="        _here[place][1]()\n    _here[place] =",
        new="    _here[place] =",
        harm="a notebook's cell that is run again waits ten minutes for a node that has met the interrupted one",
        killed_by=(f"{_PARTICIPATION_TESTS}::test_who_takes_part_again_leaves_first",),
    ),
    Bug(
        name="a forked process leaves for its parent",
        module=_PARTICIPATION,
        old="return place in _here and _here[place][0] == os.getpid()",
        new="return place in _here",
        harm="a DataLoader's worker ends, and the peer leaves the run",
        killed_by=(f"{_PARTICIPATION_TESTS}::test_what_another_process_began_is_nobodys_here",),
    ),
    Bug(
        name="who goes on alone asks for the bootstrap again",
        module=_COMPANION,
        old="self._start(self._resume(kept))",
        new="self._start(self._resume(kept, *self._wish.peers))",
        harm="all others have gone, and the script ends with a state of the run in its folder",
        killed_by=(f"{_COMPANION_TESTS}::test_who_has_the_runs_state_goes_on_though_nobody_answers",),
    ),
    Bug(
        name="a run of the same name is founded beside the one that is there",
        module=_COMPANION,
        old="self._wish = wish._replace(foundation=None)",
        new="self._wish = wish",
        harm="a script that is told to name no peers begins from a random model, at step 0",
        killed_by=(f"{_COMPANION_TESTS}::test_a_folder_with_a_run_that_somebody_else_founded_is_not_founded_anew",),
    ),
    Bug(
        name="a learner's socket has a small number",
        module="p2pdiloco.training.ipc_channel",
        old="self._poll(reading | (select.POLLOUT if self._outgoing else 0))",
        new="select.select([self._socket], [], [])",
        harm="the learner of a node with a thousand connections ends before it has begun, without a word",
        killed_by=("tests/unit/test_training_ipc_channel.py::test_a_node_with_many_connections_has_a_learner",),
    ),
    Bug(
        name="a run of steps has its decay by what is merged",
        module="p2pdiloco.training.optimizers",
        old="global_step / config.steps if config.tokens is UNSET else merged_tokens / config.tokens",
        new="merged_tokens / (config.tokens or config.steps)",
        harm="the rate of a run that has no budget of tokens is at its end after its first turn",
        killed_by=(
            "tests/unit/test_training_corpus.py::"
            "test_a_run_of_steps_that_says_its_decay_falls_in_a_line_and_to_nothing_if_it_likes",
        ),
    ),
    # -- copies from and to a device -----------------------------------------------------------------------------------
    Bug(
        name="parameters travel without having been cloned",
        module=_SIDE,
        old="torch.float32, copy=True)",
        new="torch.float32)",
        harm="a snapshot holds parts of steps that came after it",
        killed_by=(f"{_SIDE_TESTS}::test_what_reaches_the_host_is_what_the_parameters_were",),
    ),
    Bug(
        name="the training does not wait for a shift",
        module=_SIDE,
        old="            training.wait_event(self._stream.record_event())\n",
        new="",
        harm="learners add what is not there yet",
        killed_by=(f"{_SIDE_TESTS}::test_what_reaches_the_device_is_taken_once_and_after_the_side_stream",),
    ),
    Bug(
        name="a whole model is staged on the device",
        module=_SIDE,
        old="            event.synchronize()",
        new="            event.query()",
        harm="loading needs four bytes a parameter more of the GPU than training",
        killed_by=(f"{_SIDE_TESTS}::test_a_whole_model_takes_only_so_much_of_the_device",),
    ),
    Bug(
        name="a refused lock is raised by the next kernel",
        module=_SIDE,
        old="            torch.ones(1, device=self._device)\n",
        new="            pass\n",
        harm="a machine with a limit on locked memory cannot train",
        killed_by=(f"{_SIDE_TESTS}::test_memory_that_cuda_does_not_lock_costs_speed_alone",),
    ),
    Bug(
        name="who becomes no learner waits for ever",
        module="p2pdiloco.node.learner_process",
        old="        self._ours.close()",
        new="        pass",
        harm="a node that goes on with its last life's learner keeps another process",
        killed_by=("tests/unit/test_firstborn.py::test_who_is_dismissed_is_told",),
    ),
    # -- the learner's link --------------------------------------------------------------------------------------------
    Bug(
        name="an adopted learner's old tokens counted again",
        module=_LINK,
        old="            self.counts.steps = self.counts.tokens = 0\n",
        new="            self.counts.steps = self.counts.steps\n",
        harm="tokens that the last node merged, or that are gone, are claimed once more",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="an adopted learner has paused before it is asked",
        module=_LINK,
        old="        if not self.is_alone:  # else it",
        new="        if True:  # else it",
        harm="a node that comes back to an older state takes the run for complete, and leaves what is trained next",
        killed_by=(f"{_LINK_TESTS}::test_who_reached_the_runs_end_alone_trains_on_where_its_nodes_next_life_says",),
    ),
    Bug(
        name="an adopted learner's progress thrown away",
        module=_LINK,
        old="            case Shift(shards=shards, replace=True) if self._anchor is not None:\n",
        new="            case Shift(shards=shards, replace=True) if False and self._anchor is not None:\n",
        harm="what was trained without a node is claimed, and is not there",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="answers to the last node go to the next",
        module=_LINK,
        old="        self._answers.clear()\n",
        new="        self._answers.copy()\n",
        harm="a snapshot that was never asked for is encoded from an empty buffer",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="a replacement is added",
        module=_LINK,
        old="take = self._flat.copy_from if replace else self._flat.add_from",
        new="take = self._flat.add_from",
        harm="a learner that is reset doubles its parameters",
        killed_by=(f"{_LINK_TESTS}::test_a_replacement_takes_the_place_of_what_was_trained", _CONSERVATION),
    ),
    Bug(
        name="what the socket did not take is dropped",
        module="p2pdiloco.training.ipc_channel",
        old="del self._outgoing[:sent]",
        new="self._outgoing.clear()",
        harm="a busy node gets half a message, and loses its learner",
        killed_by=(f"{_LINK_TESTS}::test_answers_that_do_not_fit_into_the_socket_come_later_and_whole",),
    ),
    Bug(
        name="what a node said last is lost with it",
        module=_LINK,
        old="        commands = self._node.channel.exchange()\n",
        new="        commands = self._node.channel.exchange()\n"
        "        commands = [] if self._node.channel.is_closed else commands\n",
        harm="a script whose run is over finds no result",
        killed_by=(f"{_LINK_TESTS}::test_what_the_node_has_said_before_it_left_is_done",),
    ),
    Bug(
        name="snapshots not looked at",
        module=_LINK,
        old="                self._judge_snapshot(message.fragment)\n",
        new="                pass\n",
        harm="parameters that are not finite stop a swarm in silence",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    Bug(
        name="one sound fragment outweighs a spoilt one",
        module="p2pdiloco.training.node_link",
        old="        if not self._spoilt:",
        new="        if None not in self._spoilt:",
        harm="trouble comes and goes with the fragments",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    Bug(
        name="large parameters taken for infinite ones",
        module="p2pdiloco.training.node_link",
        old="return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())",
        new="return math.isfinite(float(vector.sum()))",
        harm="a sound peer is told that it is in trouble",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    Bug(
        name="what a second node had given is forgotten when it dies, too",
        module="p2pdiloco.training.node_link",
        old="            anchor[piece.start : piece.stop].copy_(shift[piece.start : piece.stop])\n",
        new="            pass\n",
        harm="the third node's parameters come on top of the second's",
        killed_by=(
            f"{_LINK_TESTS}::test_a_learner_whose_next_node_dies_while_it_gives_the_parameters_keeps_all_progress",
        ),
    ),
    # -- a script's node -----------------------------------------------------------------------------------------------
    Bug(
        name="a large model's node has no more time to end than a small one's",
        module="p2pdiloco.script_node",
        old="    return LEAVE_S + parameters * WRITTEN_BYTES / WRITTEN_BYTES_PER_S",
        new="    return LEAVE_S",
        harm="what was trained last is killed while it is merged and written",
        killed_by=("tests/unit/test_script_node.py::test_the_node_of_a_large_model_is_waited_for_longer",),
    ),
    Bug(
        name="a node that always dies is started for ever",
        module=_COMPANION,
        old="            if self._lost_lives > RESTARTS:\n",
        new="            if False:\n",
        harm="a process a minute, for days",
        killed_by=(
            f"{_COMPANION_TESTS}::test_a_node_that_keeps_dying_is_started_with_growing_pauses_and_then_no_more",
        ),
    ),
    Bug(
        name="a node that was told to end is started again",
        module=_COMPANION,
        old="        self._is_ending = True\n        self.send(number)\n",
        new="        self.send(number)\n",
        harm="a script that leaves starts a peer",
        killed_by=(f"{_COMPANION_TESTS}::test_one_that_is_told_to_end_is_not_started_again",),
    ),
    Bug(
        name="more is read than the welcome",
        module="p2pdiloco.training.node_reconnect",
        old="self._welcome.take(visitor.recv(missing))",
        new="self._welcome.take(visitor.recv(missing + 4096))",
        harm="the first commands are taken for a piece of the manifest",
        killed_by=(f"{_COMPANION_TESTS}::test_a_script_is_told_the_run_before_it_takes_the_node_however_slowly",),
    ),
    # -- threads for tensors -------------------------------------------------------------------------------------------
    Bug(
        name="threads do not wait for each other",
        module="p2pdiloco.util.executor",
        old="gate = threading.Barrier(len(self._jobs))",
        new="gate = threading.Barrier(1)",
        harm="a snapshot is brought up to date while a shift of one of its shards is being made",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="a shard has no thread of its own",
        module="p2pdiloco.util.executor",
        old="self._jobs[(key or 0) % len(self._jobs)].put",
        new="min(self._jobs, key=lambda jobs: jobs.qsize()).put",
        harm="a shard's next commit is applied before the one that it follows",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="all shards have one thread",
        module="p2pdiloco.util.executor",
        old="self._jobs[(key or 0) % len(self._jobs)].put",
        new="self._jobs[0].put",
        harm="more cores are of no use",
        killed_by=(f"{_QUEUE}::test_what_has_different_keys_is_done_at_the_same_time",),
    ),
    Bug(
        name="gates stay shut when a node ends",
        module="p2pdiloco.util.executor",
        old="            gate.abort()",
        new="            gate.n_waiting",
        harm="its process never ends",
        killed_by=(f"{_QUEUE}::test_who_closes_leaves_no_thread_behind",),
    ),
    Bug(
        name="threads wait for work that was called off",
        module="p2pdiloco.util.executor",
        old="            if job.gate is not None:\n                job.gate.wait()\n            if job.future",
        new="            if job.gate is not None and (not job.future or not job.future.cancelled()):\n"
        "                job.gate.wait()\n            if job.future",
        harm="a node hangs after a copy that came too late",
        killed_by=(f"{_QUEUE}::test_work_that_is_called_off_holds_nobody_up",),
    ),
    Bug(
        name="threads share their scratch",
        module="p2pdiloco.peer.model_state",
        old="class _Scratch(threading.local):",
        new="class _Scratch:",
        harm="a merge has another shard's values",
        killed_by=("tests/unit/test_peer_tensor_threads.py::test_several_threads_make_the_bits_of_one",),
    ),
)
