"""Bugs outside the protocol: driver, shift queue, retention, transfers, checkpoints, supervision, connections, the
learner's link.

Each names tests that must fail with it (``python -m tests.mutation planted``, and tests/mutation/test_planted.py), and
can be planted in any process that has not imported its module yet (``planter.plant``). Bugs of the protocol itself are
in ``mutants``, and found by seeds.
"""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug
from tests.seeded_bugs.learner import BUGS as LEARNER_BUGS
from tests.seeded_bugs.members import BUGS as MEMBERS_BUGS
from tests.seeded_bugs.memory import BUGS as MEMORY_BUGS
from tests.seeded_bugs.net import BUGS as NET_BUGS
from tests.seeded_bugs.payloads import BUGS as PAYLOADS_BUGS
from tests.seeded_bugs.results import BUGS as RESULTS_BUGS
from tests.seeded_bugs.state import BUGS as STATE_BUGS
from tests.seeded_bugs.strangers import BUGS as STRANGERS_BUGS
from tests.seeded_bugs.values import BUGS as VALUES_BUGS
from tests.seeded_bugs.watch import BUGS as WATCH_BUGS

_CARGO = "p2pdiloco.peer.payload_cache"
_DRIVER = "p2pdiloco.peer.driver"
_CHECKPOINT = "p2pdiloco.peer.checkpoint"
_SAVER = "p2pdiloco.peer.checkpoint_writer"
_DOWNLOADS = "p2pdiloco.peer.state_client"
_SUPERVISION = "p2pdiloco.peer.learner_supervisor"

_SIGNATURES = "p2pdiloco.peer.signatures"
_DRIVER_TESTS = "tests/unit/test_peer_driver.py"
_SIGNATURES_TESTS = "tests/unit/protocol/test_signatures.py"
_SAVER_TESTS = "tests/unit/test_peer_checkpoint_writer.py"
_CHECKPOINT_TESTS = "tests/unit/test_peer_checkpoint.py"
_DOWNLOADS_TESTS = "tests/unit/test_peer_state_client.py"
_SUPERVISION_TESTS = "tests/unit/test_peer_learner_supervisor.py"

BUGS = (
    # -- the driver ----------------------------------------------------------------------------------------------------
    Bug(
        name="commit signature not verified",
        module=_SIGNATURES,
        where="check_commit",
        old="not verify(header.owner, messages.signed_commit_bytes(commit_id(header)), signature)",
        new="False",
        harm="anybody commits in anybody's name",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_that_its_owner_did_not_sign_is_dropped",),
    ),
    Bug(
        name="commits' contributions not verified",
        module=_SIGNATURES,
        where="check_commit",
        old="not _is_signed(run, header.shard, header.parent, contributor)",
        new="False",
        harm="an owner speaks in the name of every learner",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_that_names_what_its_learners_did_not_give_is_dropped",),
    ),
    Bug(
        name="own contributions believed whatever a commit says of them",
        module=_SIGNATURES,
        where="all_but",
        old="(header.parent, c) != mine",
        new="mine is None or c.learner != mine[1].learner",
        harm="an owner speaks in the name of the learner of whom it speaks to",
        killed_by=(f"{_SIGNATURES_TESTS}::test_what_a_peer_has_signed_itself_is_known_on_that_head_and_as_it_was",),
    ),
    Bug(
        name="a newcomer checks all signatures of a lineage",
        module=_SIGNATURES,
        where="drawn",
        old="min(DRAWN, len(header.contributors))",
        new="len(header.contributors)",
        harm="joining takes the longer, the larger the swarm",
        killed_by=(f"{_SIGNATURES_TESTS}::test_a_contribution_that_was_not_made_proves_that_the_owner_lied",),
    ),
    Bug(
        name="the commit of a state that is offered is not checked",
        module="p2pdiloco.peer.state_proof",
        where="checked_offer",
        old="none_of if draws is None else all_of",
        new="none_of",
        harm="a newcomer begins with what a liar made up",
        killed_by=(
            "tests/unit/test_peer_state_proof.py"
            "::test_an_offer_is_of_the_shard_that_was_asked_for_and_lists_what_was_signed",
        ),
    ),
    Bug(
        name="a false contribution convicts nobody",
        module="p2pdiloco.peer.message_verifier",
        where="MessageVerifier.report_false",
        old="self._driver.feed(ev.Contradicted(error.proof))",
        new="pass",
        harm="a liar owns shards again and again, and each time all wait for the next owner",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_that_names_what_its_learners_did_not_give_is_dropped",),
    ),
    Bug(
        name="contributions not verified by who merges them",
        module=_CARGO,
        where="PayloadCache.verify_contribution",
        old="check_contributor(self._run, message.shard, message.base.id, message.contributor, self._register)",
        new="pass",
        harm="an honest owner's commit is refused for one bad signature in it",
        killed_by=(f"{_DRIVER_TESTS}::test_a_contribution_that_is_not_what_it_names_is_dropped",),
    ),
    Bug(
        name="tokens of a lineage not added up",
        module="p2pdiloco.peer.state_proof",
        where="_check_tokens",
        old="header.tokens != parent.tokens + tokens or header.counts != counts",
        new="False",
        harm="an owner makes its own chain the heaviest with a number",
        killed_by=("tests/unit/protocol/test_lineage.py::test_a_lineage_weighs_what_was_given",),
    ),
    Bug(
        name="marks of a state not compared with its commit",
        module="p2pdiloco.peer.state_proof",
        where="proven_digest",
        old="header.record != record_of(dict(state.marks), state.trained, state.norm_bound)",
        new="False",
        harm="a newcomer believes what its donor says of tokens and blocks",
        killed_by=("tests/unit/test_peer_state_proof.py::test_what_does_not_prove_its_head_is_refused",),
    ),
    Bug(
        name="commit's gradient not compared with its digest",
        module=_CARGO,
        where="PayloadCache.verify_commit",
        old="digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result",
        new="digest_of(parts.digests) != header.result",
        harm="a payload that was spoilt on its way is applied where the sample does not look",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_with_other_parts_than_it_names_is_dropped",),
    ),
    Bug(
        name="commit's digests not compared with its result",
        module=_CARGO,
        where="PayloadCache.verify_commit",
        old="digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result",
        new="digest_of(parts.gradient) != header.payload",
        harm="whoever relays a commit says what its state is",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_with_other_parts_than_it_names_is_dropped",),
    ),
    Bug(
        name="contribution's payload not compared with its digest",
        module=_CARGO,
        where="PayloadCache.verify_contribution",
        old="digest_of(data) != message.payload",
        new="False",
        harm="a learner's ledger and the swarm's merge hold different things",
        killed_by=(f"{_DRIVER_TESTS}::test_a_contribution_that_is_not_what_it_names_is_dropped",),
    ),
    Bug(
        name="missing own payloads ignored",
        module=_CARGO,
        where="PayloadCache.read_moves.read",
        old="effect.is_reset or not is_whole",
        new="effect.is_reset",
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(f"{_DRIVER_TESTS}::test_a_learner_whose_merged_payload_is_gone_takes_the_global_parameters",),
    ),
    Bug(
        name="merge goes on without a payload that is gone",
        module=_DRIVER,
        where="Driver._merge",
        old="len(given) < len(effect.contributions)",
        new="False",
        harm="the commit names a contribution that is not in it: its tokens are lost",
        killed_by=(f"{_DRIVER_TESTS}::test_a_merge_whose_payload_is_gone_fails",),
    ),
    Bug(
        name="a payload that is gone is offered for ever",
        module="p2pdiloco.protocol.contributions",
        where="Contributions.on_payload_lost",
        old="self.has_given(shard)",
        new="False",
        harm="who has lost one payload merges nothing any more, and where two are needed nobody does",
        killed_by=(
            "tests/unit/protocol/test_merging.py::test_what_this_peer_has_given_and_lost_its_learner_gives_anew",
        ),
    ),
    Bug(
        name="proof of a head without a log is swept",
        module="p2pdiloco.protocol.chain",
        where="Chain.commits",
        old="{*self.ancestry, self.head.id} if self.head is not None else set(self.log_ids)",
        new="set(self.log_ids)",
        harm="checkpoints after a restart hold a head without its signature: unreadable, and offers are lies",
        killed_by=(f"{_DRIVER_TESTS}::test_the_proof_of_a_head_is_kept_without_a_log",),
    ),
    Bug(
        name="the sweep forgets all shards but the first ones",
        module=_CARGO,
        where="PayloadCache.sweep",
        old="(self._next + 1) % len(self.shards)",
        new="(self._next + 1) % min(8, len(self.shards))",
        harm="the memory fills with payloads that nobody needs",
        killed_by=(f"{_DRIVER_TESTS}::test_many_shards_are_swept_a_few_at_a_time",),
    ),
    Bug(
        name="own payloads dropped",
        module="p2pdiloco.protocol.machine",
        where="Machine.payloads",
        old="self.contributions.payloads(shard, size_of, own_bytes)",
        new="set()",
        harm="every commit that merges this learner resets it",
        killed_by=(f"{_DRIVER_TESTS}::test_own_contributions_are_kept_until_it_is_known_what_became_of_them",),
    ),
    # -- coming back ---------------------------------------------------------------------------------------------------
    Bug(
        name="a checkpoint's momentum is not taken",
        module="p2pdiloco.peer.peer",
        where="Peer.begin",
        old="self.state.put(piece.shard, proof.state.head.id, theta[span], momentum[span])",
        new="self.state.put(piece.shard, proof.state.head.id, theta[span], 0 * momentum[span])",
        harm="the next commit gives another state than everybody else's",
        killed_by=(f"{_SAVER_TESTS}::test_who_comes_back_from_a_checkpoint_goes_on_with_the_same_bits",),
    ),
    Bug(
        name="a checkpoint's proofs are not taken",
        module="p2pdiloco.peer.peer",
        where="Peer.begin",
        old="proof.header is not None",
        new="False and proof.header is not None",
        harm="checkpoints after a restart hold a head without its signature: unreadable, and offers are lies",
        killed_by=(f"{_DRIVER_TESTS}::test_the_proof_of_a_head_is_kept_without_a_log",),
    ),
    Bug(
        name="best of several checkpoints loses momentum",
        module=_CHECKPOINT,
        where="best_of",
        old="theta[span], momentum[span] = (other.theta[span], other.momentum[span])",
        new="theta[span] = other.theta[span]",
        harm="a resumed run goes on from a state that nobody signed",
        killed_by=(f"{_CHECKPOINT_TESTS}::test_of_several_peers_each_shards_heaviest_head_is_taken_in_any_order",),
    ),
    Bug(
        name="best of several checkpoints takes the first",
        module=_CHECKPOINT,
        where="best_of",
        old="is_heavier(proof.state.head, shards[piece.shard].state.head)",
        new="False",
        harm="resuming throws merged tokens away",
        killed_by=(f"{_CHECKPOINT_TESTS}::test_of_several_peers_each_shards_heaviest_head_is_taken_in_any_order",),
    ),
    Bug(
        name="a checkpoint is not compared with its digests",
        module=_CHECKPOINT,
        where="_read",
        old="digest_of(form.unpacked(data, theta[span], momentum[span])) != proven_digest(manifest, proof)",
        new="digest_of(form.unpacked(data, theta[span], momentum[span])) == 0",
        harm="a disk's flipped bit becomes the peer's state",
        killed_by=(f"{_CHECKPOINT_TESTS}::test_of_a_torn_checkpoint_the_one_before_is_used",),
    ),
    Bug(
        name="a checkpoint paired with later heads",
        module=_SAVER,
        where="CheckpointWriter._write",
        old=(
            "saved = await self._copied(piece.shard, data)\n"
            "await self._host.work('disk', partial(draft.add, saved, data))"
        ),
        new=(
            "saved = await self._copied(piece.shard, data)\n"
            "await self._host.work('disk', lambda: draft.add(self._saved(piece.shard), data))"
        ),
        harm="what is written while a version comes cannot be read back",
        killed_by=(f"{_SAVER_TESTS}::test_a_shard_is_written_as_it_was_copied_though_the_disk_is_slow",),
    ),
    Bug(
        name="a checkpoint is copied while the worker is in the middle of something",
        module=_SAVER,
        where="CheckpointWriter._copied",
        old="await self._driver.copy_shard(shard, data, prove, is_checked=False)",
        new="prove(*self._state.copy(shard, data, is_checked=False))",
        harm="what is written is torn where a version is being taken on the worker thread",
        killed_by=(f"{_SAVER_TESTS}::test_what_is_written_is_copied_between_two_jobs",),
    ),
    Bug(
        name="a checkpoint that failed counts as written",
        module=_SAVER,
        where="CheckpointWriter._save",
        old="mark = view.heads_mark\n...\nself._metrics.write('checkpoint-failed', reason=reason)",
        new=(
            "mark = view.heads_mark\n"
            "...\n"
            "self._metrics.write('checkpoint-failed', reason=reason)\n"
            "self._saved_mark = mark"
        ),
        harm="after a full disk the last state is never saved",
        killed_by=(f"{_SAVER_TESTS}::test_a_checkpoint_that_a_full_disk_refused_is_written_later",),
    ),
    Bug(
        name="a last checkpoint that failed is only logged",
        module="p2pdiloco.peer.peer",
        where="Peer._with_last_checkpoint",
        old="not problem or ending.status not in (0, APART)",
        new="True",
        harm="a peer ends with status 0, and what it has trained since is not on its disk",
        killed_by=(f"{_SAVER_TESTS}::test_a_peer_that_cannot_save_its_last_state_says_so",),
    ),
    Bug(
        name="a copy that is held up ends all checkpoints",
        module=_SAVER,
        where="CheckpointWriter._save",
        old=(
            "try:\n"
            "    await self._write(draft)\n"
            "except CopyError:\n"
            "    reason = 'a shard kept changing while it was copied'\n"
            "except OSError as error:\n"
            "    reason = os.strerror(error.errno or 0)\n"
            "except MemoryError:\n"
            "    reason = os.strerror(errno.ENOMEM)\n"
            "except ValueError as error:\n"
            "    reason = str(error)\n"
            "    self._driver.submit(self._state.integrity.invalidate, lambda _: None)\n"
            "else:\n"
            "    ..."
        ),
        new=(
            "try:\n"
            "    await self._write(draft)\n"
            "except ZeroDivisionError:\n"
            "    reason = 'a shard kept changing while it was copied'\n"
            "except OSError as error:\n"
            "    reason = os.strerror(error.errno or 0)\n"
            "except MemoryError:\n"
            "    reason = os.strerror(errno.ENOMEM)\n"
            "except ValueError as error:\n"
            "    reason = str(error)\n"
            "    self._driver.submit(self._state.integrity.invalidate, lambda _: None)\n"
            "else:\n"
            "    ..."
        ),
        harm="after one stall of a minute nothing is saved any more, in silence",
        killed_by=(
            f"{_SAVER_TESTS}::test_a_copy_that_is_held_up_for_minutes_costs_one_checkpoint_and_not_all_that_follow",
        ),
    ),
    # -- transfers -----------------------------------------------------------------------------------------------------
    Bug(
        name="a chunk is not compared with what was signed",
        module=_DOWNLOADS,
        where="StateClient._ask",
        old="data is None or len(data) != size or (not await self._is_listed(download.offer, chunk, data))",
        new="data is None or len(data) != size",
        harm="a newcomer takes what a donor's memory has spoilt, and signs nothing that others can follow",
        killed_by=(f"{_DOWNLOADS_TESTS}::test_a_chunk_that_is_not_what_was_signed_is_taken_from_another",),
    ),
    Bug(
        name="who was cancelled ends the question that came after its own",
        module=_DOWNLOADS,
        where="StateClient._is_asking",
        old="self._asking.get(ask) is asyncio.current_task()",
        new="ask in self._asking",
        harm="after the machine slept, what is on its way is given up, or asked for twice",
        killed_by=(f"{_DOWNLOADS_TESTS}::test_what_ends_when_the_same_is_asked_again_is_not_that_ones_end",),
    ),
    Bug(
        name="a liar is asked again",
        module=_DOWNLOADS,
        where="StateClient._blame",
        old="self._blocklist.record_wrong(peer, chunk)",
        new="self._blocklist.lineage_of(peer)",
        harm="a join never ends",
        killed_by=(f"{_DOWNLOADS_TESTS}::test_a_chunk_that_is_not_what_was_signed_is_taken_from_another",),
    ),
    Bug(
        name="a donor is a witness against itself",
        module="p2pdiloco.peer.state_client",
        where="DonorBlocklist.record_right",
        old="key[1] != peer",
        new="True",
        harm="a newcomer whose only donor's answer was spoilt on the way joins for ever",
        killed_by=(
            "tests/unit/test_peer_state_client_distrust.py::test_who_sends_the_right_chunk_after_a_wrong_one_is_no_witness_against_itself",
        ),
    ),
    Bug(
        name="a fetched state's proof is not kept",
        module=_DOWNLOADS,
        where="StateClient.fetch.staged",
        old="offer.proof.header is not None",
        new="False and offer.proof.header is not None",
        harm="who joined cannot help others to join, and its checkpoints cannot be read",
        killed_by=(f"{_DOWNLOADS_TESTS}::test_who_has_fetched_a_state_can_give_it",),
    ),
    Bug(
        name="a dropped donor stays in the plan",
        module="p2pdiloco.peer.chunk_scheduler",
        where="ChunkPlan.drop",
        old="self._donors.pop(peer, None)",
        new="self._donors.get(peer)",
        harm="a shard that nobody has is waited for",
        killed_by=(
            "tests/unit/test_peer_chunk_scheduler.py::test_a_donor_that_is_dropped_costs_what_was_asked_from_it",
        ),
    ),
    Bug(
        name="a chunk is asked of a third donor",
        module="p2pdiloco.peer.chunk_scheduler",
        where="ChunkPlan._next_of",
        old="len(asked[piece]) == 1",
        new="len(asked[piece]) <= 2",
        harm="a slow end of a join costs every donor its bandwidth",
        killed_by=("tests/unit/test_peer_chunk_scheduler.py::test_a_silent_donors_chunk_is_asked_of_one_other_donor",),
    ),
    # -- supervision ---------------------------------------------------------------------------------------------------
    Bug(
        name="shifts that waited are not told",
        module=_SUPERVISION,
        where="LearnerSupervisor._on_message",
        old="self._shifts_to(self.child)",
        new="lambda _: None",
        harm="a learner that is slower than the swarm never hears of a second version",
        killed_by=(f"{_SUPERVISION_TESTS}::test_what_the_learner_could_not_take_at_once_it_takes_later",),
    ),
    Bug(
        name="a learner is given what was its predecessor's",
        module=_SUPERVISION,
        where="LearnerSupervisor._shifts_to",
        old="self.send_shifts(shifts) if self.child is ward else None",
        new="self.send_shifts(shifts)",
        harm="where jobs wait for longer than a life a learner trains before it has been given everything",
        killed_by=(f"{_SUPERVISION_TESTS}::test_what_was_to_be_given_to_a_learner_that_died_is_not_given_to_the_next",),
    ),
    Bug(
        name="a learner that starts during a pause is not told of it",
        module=_SUPERVISION,
        where="LearnerSupervisor._on_loaded",
        old="if self.resting:\n    self.rest(self.resting)",
        new="pass",
        harm="after a crash on battery the learner trains at full speed",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_learner_that_starts_during_a_pause_rests_until_it_is_over",),
    ),
    Bug(
        name="snapshots are never brought up to date",
        module="p2pdiloco.peer.learner_supervisor",
        where="Snapshots.on_taken",
        old="self._shifts.complete_snapshot(event.fragment)",
        new="None",
        harm="nothing that a learner trains is ever contributed",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_snapshot_counts_when_it_was_taken_in_full",),
    ),
    Bug(
        name="a learner's death is not told",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="ward.is_loaded",
        new="False",
        harm="its unmerged tokens are waited for, and counted as the next learner's",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_learner_that_dies_is_started_again_from_the_global_parameters",),
    ),
    Bug(
        name="a learner that cannot be started ends its peer",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="await self._cannot_start(error, starts.next_s())\ncontinue",
        new="raise",
        harm="a machine that has no process or descriptor left for a moment loses its peer",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_learner_that_cannot_be_started_is_tried_again",),
    ),
    Bug(
        name="how long the peer lives proves its learner sound",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="self._host.now() - began",
        new="self._host.now()",
        harm="after ten minutes a learner that always crashes is started again for ever, each second",
        killed_by=(f"{_SUPERVISION_TESTS}::test_too_many_lives_lost_in_a_row_end_the_peer",),
    ),
    Bug(
        name="a task that has recovered is punished for all its failures",
        module="p2pdiloco.util.tasks",
        where="Tasks._run_again",
        old="backoff.reset()",
        new="pass",
        harm="after some failures in months each further one stops the task for a minute",
        killed_by=(
            "tests/unit/test_runtime_basics.py"
            "::test_a_task_that_has_run_well_for_long_is_started_again_as_soon_as_after_its_first_failure",
        ),
    ),
    Bug(
        name="a task that goes on is cancelled once",
        module="p2pdiloco.util.tasks",
        where="Tasks.__aexit__",
        old="asyncio.wait(set(self._running), timeout=UNWILLING_S)",
        new="asyncio.wait(set(self._running))",
        harm="a peer whose task swallows its cancellation never ends",
        killed_by=(
            "tests/unit/test_runtime_basics.py::test_a_task_that_swallows_its_cancellation_is_named_and_cancelled_again",
        ),
    ),
    Bug(
        name="a learner is started again for ever",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="status == MISUSED or self._losses.failures > RESTARTS",
        new="status == MISUSED",
        harm="a learner that always crashes burns its machine in silence",
        killed_by=(f"{_SUPERVISION_TESTS}::test_too_many_lives_lost_in_a_row_end_the_peer",),
    ),
    Bug(
        name="crashes are never forgotten",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="self._host.now() - began >= STABLE_S",
        new="False",
        harm="the fourth crash in a month ends a peer",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_long_life_proves_the_learner_sound",),
    ),
    Bug(
        name="a learner that must be repaired is started again",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="status == MISUSED or self._losses.failures > RESTARTS",
        new="self._losses.failures > RESTARTS",
        harm="the user hears of the mistake in the configuration half a minute later, four times",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_learner_that_the_user_must_repair_is_not_started_again",),
    ),
    Bug(
        name="who merged last is not told",
        module=_SUPERVISION,
        where="LearnerSupervisor._set_trouble",
        old="self._last_merge()",
        new="''",
        harm="a poisoned end has no name, and the user's learning rate is blamed",
        killed_by=(
            f"{_SUPERVISION_TESTS}::test_a_learner_that_stops_to_be_finite_says_what_was_merged_last_and_from_whom",
        ),
    ),
    *MEMORY_BUGS,
    *PAYLOADS_BUGS,
    *STATE_BUGS,
    *VALUES_BUGS,
    *LEARNER_BUGS,
    *NET_BUGS,
    *STRANGERS_BUGS,
    *MEMBERS_BUGS,
    *WATCH_BUGS,
    *RESULTS_BUGS,
)
