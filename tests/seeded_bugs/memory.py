"""Bugs in what is in memory, what lies on the disk instead, and what is given back."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_SHIFTS = "p2pdiloco.peer.learner_updates"
_VECTORS = "p2pdiloco.peer.learner_updates"
_STORE = "p2pdiloco.peer.payload_store"
_QUEUE_TESTS = "tests/unit/test_peer_learner_updates.py"
_SAVER = "p2pdiloco.peer.checkpoint_writer"
_SEGMENTS = "p2pdiloco.peer.commit_wal"
_SAVER_TESTS = "tests/unit/test_peer_checkpoint_writer.py"
_STORE_TESTS = "tests/unit/test_peer_payload_store.py"

_GOOD = "p2pdiloco.peer.checkpoint"
_GOOD_TESTS = "tests/unit/test_peer_checkpoint_known_good.py"

BUGS = (
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
        name="reading payloads has no bound",
        module=_STORE,
        where="PayloadStore.fetch",
        old="self._reading_bytes and self._reading_bytes + held.size > READ_BYTES",
        new="False",
        harm="whoever asks for commits fills the memory",
        killed_by=(f"{_STORE_TESTS}::test_what_is_read_at_once_is_bounded",),
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
        killed_by=("tests/unit/test_peer_commit_wal.py::test_a_length_that_no_commit_has_is_not_believed",),
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
)
