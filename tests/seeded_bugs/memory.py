"""Bugs in what is in memory, what lies on the disk instead, and what is given back."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_SHIFTS = "p2pdiloco.peer.learner_updates"
_VECTORS = "p2pdiloco.peer.learner_updates"
_SNAPSHOTS = "p2pdiloco.peer.learner_supervisor"
_SNAPSHOT_TESTS = "tests/unit/test_peer_learner_supervisor_snapshots.py"
_STORE = "p2pdiloco.peer.payload_store"
_QUEUE_TESTS = "tests/unit/test_peer_learner_updates.py"
_SAVER = "p2pdiloco.peer.checkpoint_writer"
_SEGMENTS = "p2pdiloco.peer.commit_wal"
_SAVER_TESTS = "tests/unit/test_peer_checkpoint_writer.py"
_STORE_TESTS = "tests/unit/test_peer_payload_store.py"

_OUTER_TESTS = "tests/unit/test_codec_outer_optimizer.py"
_FORM_TESTS = "tests/unit/test_codec_digests_states.py"
_DEFAULT_TESTS = "tests/unit/test_protocol_manifest_defaults.py"
_GOOD = "p2pdiloco.peer.checkpoint"
_GOOD_TESTS = "tests/unit/test_peer_checkpoint_known_good.py"

BUGS = (
    # -- momentum in two bytes -----------------------------------------------------------------------------------------
    Bug(
        name="what rounding takes off the momentum is lost",
        module="p2pdiloco.codec.outer_optimizer",
        where="carry",
        old="momentum_factor * momentum_factor / (1.0 - momentum_factor)",
        new="0.0",
        harm="small gradients are lost in a large momentum",
        killed_by=(f"{_OUTER_TESTS}::test_where_parameters_end_does_not_depend_on_what_momentum_is_kept_in",),
    ),
    Bug(
        name="momentum is cut to bfloat16, not rounded",
        module="p2pdiloco.codec.outer_optimizer",
        where="round_to",
        old="bits + odd + 32767",
        new="bits",
        harm="peers without the C library have other bits, and are refused",
        killed_by=(f"{_OUTER_TESTS}::test_kernel_and_torch_give_the_same_bits_and_the_change",),
    ),
    Bug(
        name="ties of a momentum go up",
        module="p2pdiloco.codec.outer_optimizer",
        where="round_to",
        old="bits >> 16 & 1",
        new="1",
        harm="peers without the C library have other bits, and are refused",
        killed_by=(f"{_OUTER_TESTS}::test_rounding_to_bfloat16_is_that_of_torch_also_at_ties_and_at_the_ends",),
    ),
    Bug(
        name="an int4 body's step keeps the momentum as it was",
        module="p2pdiloco.codec.outer_optimizer",
        where="_pair",
        old="_bits(momentum)",
        new="_bits(momentum.clone())",
        harm="a peer's next commits give another state than everybody else's",
        killed_by=(f"{_OUTER_TESTS}::test_a_body_is_taken_and_looked_at_with_the_same_bits",),
    ),
    Bug(
        name="a run of an earlier release keeps its momentum in two bytes",
        module="p2pdiloco.protocol.manifest_defaults",
        where="",
        old="OLD_MOMENTUM_TYPE: Final = 'float32'",
        new="OLD_MOMENTUM_TYPE: Final = 'bfloat16'",
        harm="peers of both releases refuse each other's commits",
        killed_by=(f"{_DEFAULT_TESTS}::test_a_manifest_of_an_older_release_is_taken_and_keeps_its_name",),
    ),
    Bug(
        name="a long momentum is kept in two bytes",
        module="p2pdiloco.protocol.manifest_defaults",
        where="completed",
        old="'bfloat16' if outer.momentum <= LONG_MOMENTUM else 'float32'",
        new="'bfloat16'",
        harm="steps are noise",
        killed_by=(f"{_DEFAULT_TESTS}::test_momentum_is_kept_in_two_bytes_unless_it_is_long_or_the_founder_says_so",),
    ),
    Bug(
        name="a chunk is cut in its middle whatever momentum is kept in",
        module="p2pdiloco.codec.digests",
        where="StateForm.vectors",
        old="len(chunk) // self.width * THETA_BYTES",
        new="len(chunk) // 2",
        harm="a newcomer's state is noise",
        killed_by=(f"{_FORM_TESTS}::test_what_was_packed_comes_back_with_the_digests_of_its_chunks",),
    ),
    # -- known-good checkpoints ----------------------------------------------------------------------------------------
    Bug(
        name="the newest checkpoint is the good one",
        module=_GOOD,
        where="KnownGood.judge_previous(self, number)",
        old="mark_good(self._folder, before, self._disk)",
        new="mark_good(self._folder, number, self._disk)",
        harm="a poisoned state is marked as good before anybody has trained on it",
        killed_by=(f"{_GOOD_TESTS}::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",),
    ),
    Bug(
        name="bad losses become the measure",
        module=_GOOD,
        where="KnownGood.judge_previous(self, number, loss)",
        old="return False",
        new="self._losses.append(loss or 0.0)\nreturn False",
        harm="a run that has been poisoned for long is its own measure",
        killed_by=(f"{_GOOD_TESTS}::test_what_goes_up_a_little_or_is_not_measured",),
    ),
    Bug(
        name="the good checkpoint goes with the others",
        module="p2pdiloco.peer.checkpoint",
        where="Draft.finish",
        old="old != good",
        new="old",
        harm="three checkpoints after a poisoned merge there is nothing to go back to",
        killed_by=(f"{_GOOD_TESTS}::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",),
    ),
    Bug(
        name="checkpoints may be infinite",
        module="p2pdiloco.peer.checkpoint",
        where="_read",
        old="not (theta[span].isfinite().all() and momentum[span].isfinite().all())",
        new="False",
        harm="a peer begins with what is no number",
        killed_by=(f"{_GOOD_TESTS}::test_a_checkpoint_that_is_not_finite_is_not_loaded",),
    ),
    Bug(
        name="the learner goes on from its poisoned state",
        module=_GOOD,
        where="go_back",
        old=("{f'{stem(number)}{suffix}' for number in newer for suffix in ('.json', '.safetensors')} | {LEARNER}"),
        new="{f'{stem(number)}{suffix}' for number in newer for suffix in ('.json', '.safetensors')}",
        harm="the inner optimizer brings back what the parameters were taken back from",
        killed_by=(f"{_GOOD_TESTS}::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",),
    ),
    # -- shifts and snapshots ------------------------------------------------------------------------------------------
    Bug(
        name="memory in use goes as soon as anybody rests",
        module=_VECTORS,
        where="VectorMemory.release_unused",
        old="if is_fresh:\n    self._kept[place, slot] = False\nelse:\n    self._give_back(place, slot)",
        new="if not place:\n    self._kept[place, slot] = False\nelse:\n    self._give_back(place, slot)",
        harm="memory that turns need again at once is fetched from the kernel each time",
        killed_by=(f"{_QUEUE_TESTS}::test_what_is_used_between_two_rests_stays",),
    ),
    Bug(
        name="a snapshot's memory goes while the learner writes it",
        module=_SHIFTS,
        where="LearnerUpdates.begin_snapshot",
        old="self.memory.acquire",
        new="self.memory.release",
        harm="an outer gradient is made of zeros",
        killed_by=(f"{_QUEUE_TESTS}::test_a_snapshot_stays_until_it_is_encoded",),
    ),
    Bug(
        name="memory that a device has locked is given back",
        module=_VECTORS,
        where="VectorMemory.release_unused",
        old="self.is_pinned",
        new="not self",
        harm="the device copies from pages that nobody writes any more",
        killed_by=(f"{_QUEUE_TESTS}::test_nothing_is_given_back_under_a_device_that_has_locked_it",),
    ),
    Bug(
        name="memory that is used again still counts as unused",
        module=_VECTORS,
        where="VectorMemory.acquire",
        old="self._kept.pop((place, slot), None)",
        new="slot",
        harm="a shift that waits is given back to the system, and the learner adds zeros",
        killed_by=(f"{_QUEUE_TESTS}::test_shifts_that_the_learner_has_not_taken_stay",),
    ),
    Bug(
        name="every turn fetches its memory anew",
        module=_VECTORS,
        where="VectorMemory.release",
        old="slot < self._lasting[place]",
        new="slot < 0",
        harm="an exchange takes half as much processor time again, in page faults",
        killed_by=(f"{_QUEUE_TESTS}::test_turns_use_the_same_memory_again",),
    ),
    Bug(
        name="turns walk through all slots",
        module=_VECTORS,
        where="VectorMemory.acquire",
        old="heapq.heappop(self._free[place])",
        new="self._free[place].pop()",
        harm="each turn fetches its memory anew, and a device page-locks all of it",
        killed_by=(f"{_QUEUE_TESTS}::test_turns_use_the_same_memory_again",),
    ),
    Bug(
        name="a snapshot of which nothing was given stays",
        module=_SNAPSHOTS,
        where="Snapshots._encode",
        old="self._shifts.end_snapshot(event.fragment)",
        new="None",
        harm="a fragment's copy is in memory until its next turn, and kept up to date",
        killed_by=(f"{_SNAPSHOT_TESTS}::test_where_every_fragment_has_a_turn_at_once_they_follow_each_other",),
    ),
    Bug(
        name="a stopped learner is asked for everything at once",
        module=_SNAPSHOTS,
        where="Snapshots._has_room",
        old="if fragment in self._under_way:\n    return False",
        new="if fragment not in self._under_way:\n    return True",
        harm="at the run's end snapshots are a whole model",
        killed_by=(f"{_SNAPSHOT_TESTS}::test_where_every_fragment_has_a_turn_at_once_they_follow_each_other",),
    ),
    Bug(
        name="questions of a learner that is gone are waited for",
        module="p2pdiloco.peer.learner_supervisor",
        where="LearnerSupervisor.new_child",
        old="Snapshots(self._driver, self._state, self._view.sync_every, self._ask_for_snapshot)",
        new=(
            "self.child.snapshots if self.child "
            "else Snapshots(self._driver, self._state, self._view.sync_every, self._ask_for_snapshot)"
        ),
        harm="the next learner is never asked for that fragment",
        killed_by=(f"{_SNAPSHOT_TESTS}::test_the_next_learner_is_asked_for_what_the_last_did_not_answer",),
    ),
    # -- payloads ------------------------------------------------------------------------------------------------------
    Bug(
        name="a payload that is read back is not compared",
        module=_STORE,
        where="Held.read",
        old="digest_of(found) != self.digest",
        new="False",
        harm="what the disk has altered is sent, and a learner keeps what is none of its own",
        killed_by=(f"{_STORE_TESTS}::test_what_the_disk_has_lost_is_not_sent",),
    ),
    Bug(
        name="a payload that could not be written keeps its place",
        module=_STORE,
        where="PayloadStore.spill",
        old="held.path = None",
        new="pass",
        harm="two payloads are written over each other once the disk has room again",
        killed_by=(f"{_STORE_TESTS}::test_a_full_disk_costs_memory_and_no_payload",),
    ),
    Bug(
        name="an own contribution that the disk has lost is ignored",
        module="p2pdiloco.peer.payload_cache",
        where="PayloadCache.read_moves.read",
        old=(
            "log.warning('cannot read an own contribution: the learner takes the global parameters', "
            "reason=str(error))\n"
            "return Moves(effect.learner, (), (), is_reset=True)"
        ),
        new=(
            "log.warning('cannot read an own contribution: the learner takes the global parameters', "
            "reason=str(error))\n"
            "return Moves(effect.learner, (), (), is_reset=False)"
        ),
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(f"{_STORE_TESTS}::test_a_learner_whose_contribution_is_lost_takes_the_global_parameters",),
    ),
    Bug(
        name="places of dropped payloads stay taken",
        module=_STORE,
        where="PayloadStore.sweep",
        old="if gone:\n    ...",
        new="if not self:\n    ...",
        harm="the disk fills",
        killed_by=(f"{_STORE_TESTS}::test_all_but_the_newest_are_in_a_file_whose_places_are_used_again",),
    ),
    Bug(
        name="a payload's place is given away while it is read",
        module=_STORE,
        where="PayloadStore.sweep",
        old="[place for held, place in self._doomed if held() is None]",
        new="[place for held, place in self._doomed]",
        harm="a learner loses what it has trained",
        killed_by=(f"{_STORE_TESTS}::test_a_payload_that_is_being_read_keeps_its_place",),
    ),
    Bug(
        name="memory is given back though the file was not written",
        module=_STORE,
        where="PayloadStore.spill.done",
        old="held.path = None",
        new="held.data = None",
        harm="a full disk costs payloads",
        killed_by=(f"{_STORE_TESTS}::test_a_full_disk_costs_memory_and_no_payload",),
    ),
    Bug(
        name="what is still to be merged lies on the disk",
        module="p2pdiloco.peer.payload_cache",
        where="PayloadCache._sweep",
        old="shelf.beyond(store.window_bytes(elements, elements / self._elements), machine.at_work(shard))",
        new="shelf.beyond(store.window_bytes(elements, elements / self._elements))",
        harm="a disk that loses it holds up a turn, and at the run's end costs tokens",
        killed_by=(f"{_STORE_TESTS}::test_what_is_still_to_be_merged_stays_in_memory",),
    ),
    Bug(
        name="reading payloads has no bound",
        module=_STORE,
        where="PayloadStore.fetch",
        old="self._reading_bytes and self._reading_bytes + held.size > READ_BYTES",
        new="False",
        harm="whoever asks for commits fills the memory",
        killed_by=(f"{_STORE_TESTS}::test_what_is_read_at_once_is_bounded",),
    ),
    Bug(
        name="payloads are written without a budget",
        module=_STORE,
        where="PayloadStore.may_write",
        old="not is_resting and (rate is None or self._allowed > 0)",
        new="not is_resting",
        harm="a disk is worn out by what its user has forbidden",
        killed_by=(f"{_STORE_TESTS}::test_no_more_is_written_than_a_day_allows",),
    ),
    Bug(
        name="copies for newcomers stay for ever",
        module="p2pdiloco.peer.state_server",
        where="StateServer._make",
        old="self._look_later()\nreturn copy",
        new="return copy",
        harm="whoever has helped one newcomer holds 128 MiB more than it needs, for the rest of the run",
        killed_by=(
            "tests/unit/test_peer_state_server_donor.py::test_copies_that_nobody_asks_for_any_more_leave_no_memory",
        ),
    ),
    # -- commits since a checkpoint ------------------------------------------------------------------------------------
    Bug(
        name="what is committed since a checkpoint is not kept",
        module=_SAVER,
        where="CheckpointWriter._write",
        old="number = await self._follower.begin()",
        new="number = len(self._host.disk.names(self._folder)) + 1",
        harm="a crash costs hours",
        killed_by=(f"{_SAVER_TESTS}::test_a_crash_costs_what_was_committed_in_the_last_seconds",),
    ),
    Bug(
        name="commits are not forced to the disk",
        module=_SEGMENTS,
        where="CommitLog._append_batch",
        old="self._sync()",
        new="pass",
        harm="a power cut costs what was committed since the last checkpoint",
        killed_by=(f"{_SAVER_TESTS}::test_what_is_committed_is_forced_to_the_disk",),
    ),
    Bug(
        name="commits of a torn checkpoint lead on from nothing",
        module="p2pdiloco.peer.checkpoint",
        where="Draft.finish",
        old="commit_wal.remove(folder, disk, before=min(there[:keep]))",
        new="commit_wal.remove(folder, disk, before=there[0])",
        harm="where the newest checkpoint is torn, hours are lost",
        killed_by=(f"{_SAVER_TESTS}::test_of_a_torn_checkpoint_nothing_is_lost_while_the_one_before_is_led_on",),
    ),
    Bug(
        name="a missing commit is not noticed",
        module=_SAVER,
        where="CommitFollower._update_budget",
        old="self._is_following and None not in self._heads",
        new="self._is_following",
        harm="what is committed after a fetched state is lost by a crash, for hours",
        killed_by=(f"{_SAVER_TESTS}::test_after_a_fetched_state_the_next_checkpoint_comes_sooner",),
    ),
    Bug(
        name="commits are written whatever they are",
        module=_SAVER,
        where="CommitFollower._update_budget",
        old="rate > self._budget.most_log_bytes_per_day and self._is_following",
        new="False",
        harm="a fast run writes half a terabyte a day",
        killed_by=(f"{_SAVER_TESTS}::test_more_commits_than_the_budget_has_are_not_written",),
    ),
    Bug(
        name="what led to a state is forgotten by who takes commits from its disk",
        module=_SEGMENTS,
        where="ShardReplay._proved",
        old="before.header is not None",
        new="False",
        harm="a fork that grew before a crash and after it does not meet the others",
        killed_by=(f"{_SAVER_TESTS}::test_a_crash_costs_what_was_committed_in_the_last_seconds",),
    ),
    Bug(
        name="a length on the disk is believed",
        module=_SEGMENTS,
        where="entries",
        old="header_bytes > MOST_HEADER_BYTES or data_bytes > most_bytes",
        new="header_bytes > MOST_HEADER_BYTES",
        harm="one flipped bit in what was committed since a checkpoint, and a peer does not start: no memory suffices",
        killed_by=("tests/unit/test_peer_commit_wal.py::test_a_length_in_an_earlier_releases_segment_is_not_believed",),
    ),
    Bug(
        name="a commit from the disk need not fit its chain",
        module=_SEGMENTS,
        where="ShardReplay._proved",
        old=(
            "if (problem := self._chain.problem(header)):\n"
            "    raise ValueError(problem)\n"
            "self._chain.advance(header, commit_id(header))"
        ),
        new="self._chain.advance(header, commit_id(header))",
        harm="a chain counts what it was never meant to see, before anybody's signature is looked at",
        killed_by=(f"{_SAVER_TESTS}::test_a_commit_that_does_not_fit_its_chain_is_not_taken_again",),
    ),
    Bug(
        name="an altered commit is taken from the disk",
        module=_SEGMENTS,
        where="ShardReplay.add",
        old="ValueError",
        new="ZeroDivisionError",
        harm="one flipped bit, and a peer cannot begin from its checkpoints",
        killed_by=(f"{_SAVER_TESTS}::test_what_is_torn_of_the_commits_costs_what_came_after_it",),
    ),
    Bug(
        name="who goes back takes the commits since",
        module=_GOOD,
        where="go_back",
        old="number >= good",
        new="number < 0",
        harm="the poisoned merge is taken again",
        killed_by=(f"{_GOOD_TESTS}::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",),
    ),
    Bug(
        name="who says how often checkpoints come has no budget",
        module="p2pdiloco.cli.peer_options",
        where="peer_options",
        old="1000000000.0 * arguments.write_gb",
        new="1000000000.0 * arguments.write_gb if arguments.checkpoint_s is None else None",
        harm="commits that are kept beside such checkpoints fill the disk's day",
        killed_by=(f"{_SAVER_TESTS}::test_checkpoints_by_the_users_clock_leave_the_rest_a_budget",),
    ),
    Bug(
        name="payloads take what checkpoints need",
        module="p2pdiloco.peer.disk_budget",
        where="DiskBudget.spare_bytes_per_s",
        old="self._width",
        new="0 * self._width",
        harm="twice what the user allows is written",
        killed_by=(
            f"{_SAVER_TESTS}::test_the_budget_of_writes_is_kept_at_defaults_up_to_a_hundred_million_parameters",
        ),
    ),
    # -- a learner -----------------------------------------------------------------------------------------------------
    Bug(
        name="the model goes on with what it was evaluated with",
        module="p2pdiloco.training.parameters",
        where="FlatParameters.showing",
        old="parameter.data = data",
        new="parameter.grad = None",
        harm="whoever evaluates loses what it has trained, and trains in the node's memory",
        killed_by=("tests/unit/test_training_parameters.py::test_a_model_shows_a_vector_and_is_itself_again",),
    ),
    Bug(
        name="the inner optimizer's state is written whole",
        module="p2pdiloco.training.optimizer_state",
        where="parts",
        old=(
            "for start in range(0, flat.numel(), PIECE):\n"
            "    piece = flat[start:start + PIECE].to('cpu').contiguous()\n"
            "    yield piece.view(torch.uint8).numpy().data"
        ),
        new=(
            "for start in range(0, 1 if flat.numel() else 0):\n"
            "    piece = flat[start:].to('cpu').contiguous()\n"
            "    yield piece.view(torch.uint8).numpy().data"
        ),
        harm="a learner holds its largest tensor twice while it saves, on a GPU in the machine's memory",
        killed_by=("tests/unit/test_training_optimizer_state.py::test_what_is_written_needs_memory_for_a_piece",),
    ),
)
