"""Bugs outside the protocol: driver, shift queue, retention, transfers, checkpoints, supervision, connections, the
learner's link.

Each names tests that must fail with it (``python -m tests.seeded_bugs``), and can be planted in any process that has
not imported its module yet (``inject.plant``). Bugs that seeds of the protocol's simulator find are in ``mutants``.
"""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug
from tests.seeded_bugs.learner import BUGS as LEARNER_BUGS
from tests.seeded_bugs.members import BUGS as MEMBERS_BUGS
from tests.seeded_bugs.memory import BUGS as MEMORY_BUGS
from tests.seeded_bugs.net import BUGS as NET_BUGS
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
        old="check_contributor(*where, message.contributor, self._register)",
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
        old="self._payload_cache.keep_proofs(proof, lineage)",
        new="self._payload_cache.keep_proofs(msgspec.structs.replace(proof, header=None), lineage)",
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
        old="self._payload_cache.keep_proofs(offer.proof, offer.lineage)",
        new="pass",
        harm="who joined cannot help others to join, and its checkpoints cannot be read",
        killed_by=(f"{_DOWNLOADS_TESTS}::test_who_has_fetched_a_state_can_give_it",),
    ),
    # -- supervision ---------------------------------------------------------------------------------------------------
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
        name="a learner's death is not told",
        module=_SUPERVISION,
        where="LearnerSupervisor.live",
        old="ward.is_loaded",
        new="False",
        harm="its unmerged tokens are waited for, and counted as the next learner's",
        killed_by=(f"{_SUPERVISION_TESTS}::test_a_learner_that_dies_is_started_again_from_the_global_parameters",),
    ),
    *MEMORY_BUGS,
    *STATE_BUGS,
    *VALUES_BUGS,
    *LEARNER_BUGS,
    *NET_BUGS,
    *STRANGERS_BUGS,
    *MEMBERS_BUGS,
    *WATCH_BUGS,
    *RESULTS_BUGS,
)
