"""Bugs outside the protocol: driver, shift queue, retention, transfers, checkpoints, supervision, the learner's link.

Each names tests that must fail with it (``python -m tests.mutation planted``, and tests/mutation/test_planted.py), and
can be planted in any process that has not imported its module yet (``planting.plant``). Bugs of the protocol itself are
in ``mutants``, and found by seeds.
"""

from __future__ import annotations

from p2pdiloco.simulation.planting import Bug

_DRIVER = "p2pdiloco.node.driver"
_STATE = "p2pdiloco.node.global_state"
_CHECKPOINT = "p2pdiloco.node.checkpoint"
_SAVING = "p2pdiloco.node.saving"
_FETCHING = "p2pdiloco.node.fetching"
_SUPERVISION = "p2pdiloco.node.supervision"
_LINK = "p2pdiloco.training.outer_link"

_DRIVER_TESTS = "tests/unit/test_node_driver.py"
_STATE_TESTS = "tests/unit/test_node_global_state.py"
_CONSERVATION = "tests/property/test_conservation.py"

BUGS = (
    # -- the driver ----------------------------------------------------------------------------------------------------
    Bug(
        name="commit signature not verified",
        module=_DRIVER,
        old="if not verify(header.owner, COMMIT_CONTEXT + commit.encode(), parts.signature):",
        new="if False:",
        harm="anybody commits in anybody's name",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_that_its_owner_did_not_sign_is_dropped",),
    ),
    Bug(
        name="commit's gradient not compared with its digest",
        module=_DRIVER,
        old="if digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result:",
        new="if digest_of(parts.digests) != header.result:",
        harm="a payload that was spoilt on its way is applied where the sample does not look",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_with_other_parts_than_it_names_is_dropped",),
    ),
    Bug(
        name="commit's digests not compared with its result",
        module=_DRIVER,
        old="if digest_of(parts.gradient) != header.payload or digest_of(parts.digests) != header.result:",
        new="if digest_of(parts.gradient) != header.payload:",
        harm="whoever relays a commit says what its state is",
        killed_by=(f"{_DRIVER_TESTS}::test_a_commit_with_other_parts_than_it_names_is_dropped",),
    ),
    Bug(
        name="contribution's payload not compared with its digest",
        module=_DRIVER,
        old="if digest_of(data) != digest:",
        new="if False:",
        harm="a learner's ledger and the swarm's merge hold different things",
        killed_by=(f"{_DRIVER_TESTS}::test_a_contribution_that_is_not_what_it_names_is_dropped",),
    ),
    Bug(
        name="missing own payloads ignored",
        module=_DRIVER,
        old="return Moves(effect.learner, settled, restored, effect.is_reset or not is_whole)",
        new="return Moves(effect.learner, settled, restored, effect.is_reset)",
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(f"{_DRIVER_TESTS}::test_a_learner_whose_merged_payload_is_gone_takes_the_global_parameters",),
    ),
    Bug(
        name="merge goes on without a payload that is gone",
        module=_DRIVER,
        old="if len(given) < len(effect.contributions):",
        new="if False:",
        harm="the commit names a contribution that is not in it: its tokens are lost",
        killed_by=(f"{_DRIVER_TESTS}::test_a_merge_whose_payload_is_gone_fails",),
    ),
    Bug(
        name="proof of a head without a log is swept",
        module=_DRIVER,
        old="commits.update(chain.head.id for chain in self.machine.core.chains if chain.head is not None)",
        new="commits.update(())",
        harm="checkpoints after a restart hold a head without its signature: unreadable, and offers are lies",
        killed_by=(f"{_DRIVER_TESTS}::test_the_proof_of_a_head_is_kept_without_a_log",),
    ),
    Bug(
        name="own payloads dropped",
        module="p2pdiloco.node.retention",
        old="kept.update(edge.payload for edge in ledger.edges)",
        new="kept.update(())",
        harm="every commit that merges this learner resets it",
        killed_by=("tests/unit/test_node_retention.py::test_own_contributions_are_kept_whatever_they_weigh",),
    ),
    # -- the shift queue -----------------------------------------------------------------------------------------------
    Bug(
        name="snapshot without queued shifts",
        module=_STATE,
        old="waiting = ((self._in_flight[shard], self.shift), (self._in_queue[shard], self.queued))",
        new="waiting = ((self._in_flight[shard], self.shift),)",
        harm="the contribution takes the swarm's queued progress back",
        killed_by=(f"{_STATE_TESTS}::test_a_snapshot_is_brought_up_to_date_with_what_is_in_flight_and_queued", _CONSERVATION),
    ),
    Bug(
        name="only the first of several settled",
        module=_STATE,
        old="[self._bodies(shard, payload) for payload in moves.settled] if is_mine else (),",
        new="[self._bodies(shard, payload) for payload in moves.settled[:1]] if is_mine else (),",
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(f"{_STATE_TESTS}::test_several_contributions_are_settled_and_restored_at_once", _CONSERVATION),
    ),
    Bug(
        name="only the first of several restored",
        module=_STATE,
        old="[self._bodies(shard, payload) for payload in moves.restored] if is_mine else (),",
        new="[self._bodies(shard, payload) for payload in moves.restored[:1]] if is_mine else (),",
        harm="tokens that a fork takes back are lost",
        killed_by=(f"{_STATE_TESTS}::test_several_contributions_are_settled_and_restored_at_once", _CONSERVATION),
    ),
    Bug(
        name="prepared merge reused for another payload",
        module=_STATE,
        old="if prepared is not None and prepared.base == parent and prepared.payload == header.payload:",
        new="if prepared is not None and prepared.base == parent:",
        harm="an owner that was forestalled takes its own gradient for the other's: a fork under one head",
        killed_by=(f"{_STATE_TESTS}::test_an_owner_that_was_forestalled_takes_the_other_commit", _CONSERVATION),
    ),
    Bug(
        name="reset that does not void the snapshot",
        module=_STATE,
        old="self._has_snapshot[shard] = False  # what was copied there, the learner has lost",
        new="pass",
        harm="progress that the learner has lost is contributed, and settled from what it has not",
        killed_by=(f"{_STATE_TESTS}::test_a_reset_voids_a_snapshot_that_waits_to_be_encoded", _CONSERVATION),
    ),
    Bug(
        name="snapshot taken before a replacement counts",
        module=_STATE,
        old="self._has_snapshot[shard] = all(kind is not Kind.REPLACE for kind, _ in waiting)",
        new="self._has_snapshot[shard] = True",
        harm="progress that the learner is about to lose is contributed",
        killed_by=(f"{_STATE_TESTS}::test_a_snapshot_from_before_a_replacement_is_void", _CONSERVATION),
    ),
    Bug(
        name="snapshot not kept up to date by a commit",
        module=_STATE,
        old="self.snapshot if self._has_snapshot[shard] else None,",
        new="None,",
        harm="the contribution takes the commit back that came before it was encoded",
        killed_by=(f"{_STATE_TESTS}::test_the_learner_keeps_what_was_not_merged", _CONSERVATION),
    ),
    Bug(
        name="queued shift overwritten by the next",
        module=_STATE,
        old="is_added = not is_first and not moves.is_reset",
        new="is_added = False",
        harm="of several commits during one learner step all but the last are lost to the learner",
        killed_by=(f"{_STATE_TESTS}::test_the_learner_keeps_what_was_not_merged", _CONSERVATION),
    ),
    Bug(
        name="queued shifts outlive their learner",
        module=_STATE,
        old="self._in_queue[shard] = Kind.NONE\n            self._has_snapshot[shard] = False",
        new="self._has_snapshot[shard] = self._has_snapshot[shard]\n            self._has_snapshot[shard] = False",
        harm="a new learner takes a commit that its parameters hold already",
        killed_by=(f"{_STATE_TESTS}::test_a_new_learner_takes_nothing_of_what_waited_for_the_last", _CONSERVATION),
    ),
    Bug(
        name="a dead learner's contributions settled for the next",
        module=_STATE,
        old="is_mine = moves.learner == self.learner and not moves.is_reset",
        new="is_mine = not moves.is_reset",
        harm="the new learner is moved by what it never trained",
        killed_by=(f"{_STATE_TESTS}::test_another_learners_contributions_do_not_move_this_one",),
    ),
    Bug(
        name="momentum zeroed on restart",
        module=_STATE,
        old="self._range(self.momentum, shard).copy_(momentum)\n        self.heads[shard] = head",
        new="self._range(self.momentum, shard).zero_()\n        self.heads[shard] = head",
        harm="the next commit gives another state than everybody else's",
        killed_by=(f"{_STATE_TESTS}::test_what_is_put_is_what_is_there",),
    ),
    Bug(
        name="momentum of a fetched state dropped",
        module=_STATE,
        old="            self.momentum[span].copy_(momentum)\n            self._hand_over(handover, span, change)",
        new="            self.momentum[span].copy_(self.momentum[span])\n            self._hand_over(handover, span, change)",
        harm="the next commit gives another state than everybody else's",
        killed_by=(f"{_STATE_TESTS}::test_a_fetched_state_gives_back_what_a_fork_had_merged", _CONSERVATION),
    ),
)
