"""Bugs in what a peer does to its global state: shifts for the learner, commits, and states that memory has altered."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_STATE = "p2pdiloco.peer.model_state"
_SHIFTS = "p2pdiloco.peer.learner_updates"
_STATE_TESTS = "tests/unit/test_peer_model_state.py"
_CONSERVATION = "tests/property/test_conservation.py::test_every_token_trained_stands_in_the_parameters_once"
_SHIFT_TESTS = "tests/unit/test_peer_learner_updates.py"
_OWN_TESTS = "tests/unit/test_peer_durable_commits.py"

BUGS = (
    Bug(
        name="a proof is told before the commit in it",
        module="p2pdiloco.peer.message_verifier",
        old="""            self._driver.feed(ev.Received(peer, message))  # first: else what was kept may be swept
            self.tell_contradictions()
""",
        new="""            self.tell_contradictions()
            self._driver.feed(ev.Received(peer, message))
""",
        harm="its payload is swept, and the state is fetched instead",
        killed_by=(f"{_OWN_TESTS}::test_a_commit_that_proves_something_is_taken_before_anything_is_swept",),
    ),
    Bug(
        name="a commit is sent before it is on the disk",
        module="p2pdiloco.peer.driver",
        old="case msg.Commit() if self.own.is_writing(commit := msg.commit_id(message.header)):",
        new="case msg.Commit() if self.own.is_writing(commit := msg.commit_id(message.header)) and False:",
        harm="who is killed in between makes another one, and is convicted",
        killed_by=(f"{_OWN_TESTS}::test_a_commit_is_sent_and_counts_when_it_is_on_the_disk",),
    ),
    Bug(
        name="own commits are removed with the first checkpoint",
        module="p2pdiloco.peer.checkpoint_writer",
        old="if len(self._heads) == self._keep:",
        new="if self._heads:",
        harm="with the newest checkpoint torn a peer makes other commits in their place",
        killed_by=(f"{_OWN_TESTS}::test_what_checkpoints_hold_is_removed",),
    ),
    Bug(
        name="signed commits are not compared",
        module="p2pdiloco.peer.payload_cache",
        old="self.contradictions += [proof] if proof.is_one else []",
        new="pass",
        harm="an owner splits the swarm as often as it likes",
        killed_by=(f"{_OWN_TESTS}::test_a_peer_that_makes_two_commits_of_a_version_owns_no_more",),
    ),
    Bug(
        name="a proof's signatures are not verified",
        module="p2pdiloco.peer.payload_cache",
        old="check_equivocation(proof, self._register)",
        new="pass",
        harm="anybody convicts anybody",
        killed_by=(f"{_OWN_TESTS}::test_a_proof_that_is_none_is_its_senders_fault",),
    ),
    # -- the shift queue -----------------------------------------------------------------------------------------------
    Bug(
        name="snapshot without queued shifts",
        module=_SHIFTS,
        old="waiting = ((self._in_flight[shard], self.shift), (self._in_queue[shard], self.queued))",
        new="waiting = ((self._in_flight[shard], self.shift),)",
        harm="the contribution takes the swarm's queued progress back",
        killed_by=(
            f"{_STATE_TESTS}::test_a_snapshot_is_brought_up_to_date_with_what_is_in_flight_and_queued",
            _CONSERVATION,
        ),
    ),
    Bug(
        name="only the first of several settled",
        module=_SHIFTS,
        old="[bodies(payload) for payload in moves.settled] if is_mine else (),",
        new="[bodies(payload) for payload in moves.settled[:1]] if is_mine else (),",
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(f"{_STATE_TESTS}::test_several_contributions_are_settled_and_restored_at_once", _CONSERVATION),
    ),
    Bug(
        name="only the first of several restored",
        module=_SHIFTS,
        old="[bodies(payload) for payload in moves.restored] if is_mine else (),",
        new="[bodies(payload) for payload in moves.restored[:1]] if is_mine else (),",
        harm="tokens that a fork takes back are lost",
        killed_by=(f"{_STATE_TESTS}::test_several_contributions_are_settled_and_restored_at_once", _CONSERVATION),
    ),
    Bug(
        name="prepared merge reused for another payload",
        module="p2pdiloco.peer.model_state",
        old="if ready is None or ready.base != parent or ready.payload != payload:",
        new="if ready is None or ready.base != parent:",
        harm="an owner that was forestalled takes its own gradient for the other's: a fork under one head",
        killed_by=(f"{_STATE_TESTS}::test_an_owner_that_was_forestalled_takes_the_other_commit", _CONSERVATION),
    ),
    Bug(
        name="reset that does not void the snapshot",
        module=_SHIFTS,
        old="self._has_snapshot[shard] = False  # what was copied there, the learner has lost",
        new="pass",
        harm="progress that the learner has lost is contributed, and settled from what it has not",
        killed_by=(f"{_STATE_TESTS}::test_a_reset_voids_a_snapshot_that_waits_to_be_encoded", _CONSERVATION),
    ),
    Bug(
        name="snapshot taken before a replacement counts",
        module=_SHIFTS,
        old="self._has_snapshot[shard] = all(kind is not ShiftKind.REPLACE for kind, _ in waiting)",
        new="self._has_snapshot[shard] = True",
        harm="progress that the learner is about to lose is contributed",
        killed_by=(f"{_STATE_TESTS}::test_a_snapshot_from_before_a_replacement_is_void", _CONSERVATION),
    ),
    Bug(
        name="snapshot not kept up to date by a commit",
        module=_SHIFTS,
        old="self.snapshot if self._has_snapshot[shard] else None,",
        new="None,",
        harm="the contribution takes the commit back that came before it was encoded",
        killed_by=(f"{_STATE_TESTS}::test_the_learner_keeps_what_was_not_merged", _CONSERVATION),
    ),
    Bug(
        name="queued shift overwritten by the next",
        module=_SHIFTS,
        old="is_added = not is_first and not moves.is_reset",
        new="is_added = False",
        harm="of several commits during one learner step all but the last are lost to the learner",
        killed_by=(f"{_STATE_TESTS}::test_the_learner_keeps_what_was_not_merged", _CONSERVATION),
    ),
    Bug(
        name="queued shifts outlive their learner",
        module=_SHIFTS,
        old="self._in_flight[shard] = self._in_queue[shard] = ShiftKind.NONE",
        new="self._in_flight[shard] = ShiftKind.NONE",
        harm="a new learner takes a commit that its parameters hold already",
        killed_by=(f"{_STATE_TESTS}::test_a_new_learner_takes_nothing_of_what_waited_for_the_last", _CONSERVATION),
    ),
    Bug(
        name="a learner is moved by what it has not been given",
        module=_SHIFTS,
        old="if self.learner is None or shard in self._unloaded:",
        new="if self.learner is None:",
        harm="a commit that comes while a learner is given the parameters is in some of them twice",
        killed_by=(f"{_SHIFT_TESTS}::test_a_new_learner_is_given_the_parameters_piece_by_piece", _CONSERVATION),
    ),
    Bug(
        name="a learner begins with its first piece",
        module=_SHIFTS,
        old="return Shifts((), self._next_piece(), not self._unloaded)",
        new="return Shifts((), self._next_piece(), True)",
        harm="it trains parameters that are replaced a moment later, and what it trained is lost",
        killed_by=(f"{_SHIFT_TESTS}::test_a_new_learner_is_given_the_parameters_piece_by_piece", _CONSERVATION),
    ),
    Bug(
        name="a learner is given the next piece before it has taken the last",
        module=_SHIFTS,
        old="if self._piece or not self._unloaded:",
        new="if not self._unloaded:",
        harm="a start needs memory for a second model",
        killed_by=(f"{_SHIFT_TESTS}::test_a_new_learner_is_given_the_parameters_piece_by_piece",),
    ),
    Bug(
        name="a piece that was taken keeps its memory",
        module=_SHIFTS,
        old="is_kept=shard not in taken)",
        new="is_kept=True)",
        harm="a start needs memory for a second model",
        killed_by=(f"{_SHIFT_TESTS}::test_a_new_learner_is_given_the_parameters_piece_by_piece",),
    ),
    Bug(
        name="a dead learner's contributions settled for the next",
        module=_SHIFTS,
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
        old="            self.momentum[span].copy_(momentum)\n            handover.take(",
        new="            momentum.copy_(momentum)\n            handover.take(",
        harm="the next commit gives another state than everybody else's",
        killed_by=(f"{_STATE_TESTS}::test_a_fetched_state_gives_back_what_a_fork_had_merged", _CONSERVATION),
    ),
    Bug(
        name="momentum's age counted from where a state was fetched",
        module=_STATE,
        old=("self._chunks(header.shard)\n        factors = outer_optimizer.factors_of(self._outer, header.version)"),
        new=(
            "self._chunks(header.shard)\n"
            "        factors = outer_optimizer.factors_of(self._outer, getattr(self, '_age', 1))\n"
            "        self._age = getattr(self, '_age', 1) + 1"
        ),
        harm="who has come late takes longer steps than the others, and refuses every commit",
        killed_by=(f"{_STATE_TESTS}::test_a_turn_goes_as_far_as_any_where_the_bias_is_corrected",),
    ),
    Bug(
        name="a contribution counts as long as it is",
        module="p2pdiloco.codec.merge",
        old="return [min(n, LONGEST * max(typical, reach)) for n, typical, reach in found]",
        new="return list(norms)",
        harm="one of four that sends noise a hundred times as long makes the merged step 25 times as long",
        killed_by=(
            "tests/unit/test_codec_merge.py::test_one_of_four_that_sends_noise_does_not_lengthen_the_step",
            "tests/unit/test_codec_merge.py::test_a_contribution_counts_as_twice_the_others_median_at_most",
        ),
    ),
    Bug(
        name="a contribution is compared with itself",
        module="p2pdiloco.codec.merge",
        old="(length * length - squares) / pairs",
        new="length * length / (pairs + squares)",
        harm="learners seem to agree, the fewer the more, and nobody sees that one pulls away",
        killed_by=("tests/unit/test_codec_merge.py::test_the_mean_cosine_of_contributions_is_told",),
    ),
    Bug(
        name="declared steps lengthen a contribution without a bound",
        module="p2pdiloco.codec.merge",
        old="pace * min(s, turn_steps) if s else 0.0",
        new="pace * s if s else 0.0",
        harm="whoever declares the steps of 64 turns goes 64 times as far as the others",
        killed_by=("tests/unit/test_codec_merge.py::test_declared_steps_lengthen_a_contribution_to_a_turns_at_most",),
    ),
    Bug(
        name="short contributions are a measure",
        module="p2pdiloco.codec.merge",
        old="LONGEST * max(typical, reach)",
        new="LONGEST * typical",
        harm="beside a newcomer's first steps, or a machine that is much slower, the other's turn is cut short",
        killed_by=("tests/unit/test_codec_merge.py::test_declared_steps_lengthen_a_contribution_to_a_turns_at_most",),
    ),
    Bug(
        name="a declared weight is believed",
        module="p2pdiloco.codec.merge",
        old="return [min(w, MOST_WEIGHT * typical) for w, typical in zip(weights, _typical(weights), strict=True)]",
        new="return list(weights)",
        harm="one member declares many tokens, and every merge is what it gave",
        killed_by=(
            "tests/unit/test_codec_merge.py::test_a_weight_counts_for_the_median_of_the_others_at_most",
            "tests/unit/test_codec_merge.py::"
            "test_a_minority_that_declares_most_tokens_and_turns_round_does_not_turn_the_merge",
        ),
    ),
    Bug(
        name="a short run's outer settings are not its founder's",
        module="p2pdiloco.protocol.manifest_defaults",
        old="if max(wanted, sync_every) < USUAL_TURN and not said_outer:",
        new="if max(wanted, sync_every) < USUAL_TURN:",
        harm="what a founder wrote of the outer optimizer is not what the run has",
        killed_by=(
            "tests/unit/test_protocol_manifest_defaults.py::"
            "test_a_short_run_whose_file_says_nothing_of_merging_takes_the_mean_often",
        ),
    ),
    Bug(
        name="an inner rate that was written is not the run's",
        module="p2pdiloco.protocol.manifest_defaults",
        old='if "learning_rate" in said or inner.optimizer',
        new="if inner.optimizer",
        harm="a founder's rate is another than the file says",
        killed_by=(
            "tests/unit/test_protocol_manifest_defaults.py::"
            "test_an_inner_rate_that_is_left_out_follows_the_width_of_a_small_model_with_muon",
        ),
    ),
    Bug(
        name="momentum's bias corrected however long the run",
        module="p2pdiloco.protocol.manifest_defaults",
        old="return turns < ENOUGH_TURNS and ",
        new="return ",
        harm="long runs end a little further behind",
        killed_by=(
            "tests/unit/test_protocol_manifest_defaults.py::"
            "test_the_bias_of_momentum_is_corrected_in_short_runs_where_a_turn_does_not_go_too_far",
        ),
    ),
    Bug(
        name="momentum's bias not corrected",
        module="p2pdiloco.codec.outer_optimizer",
        old="return learning_rate / (1.0 - power)",
        new="return learning_rate",
        harm="the first turns go less far than the later ones, and short runs end further behind",
        killed_by=(
            "tests/unit/test_codec_outer_optimizer.py::test_a_corrected_rate_makes_up_for_what_momentum_does_not_hold_yet",
        ),
    ),
    Bug(
        name="a state that nobody signed is handed on",
        module="p2pdiloco.peer.integrity",
        old="        self._unsigned.add(shard)\n",
        new="",
        harm="newcomers take the only donor for a liar, and leave it alone",
        killed_by=(f"{_STATE_TESTS}::test_a_spoilt_state_that_is_accepted_is_handed_on_with_its_next_version",),
    ),
    Bug(
        name="a state that was accepted is never handed on",
        module="p2pdiloco.peer.integrity",
        old="        self._unsigned.discard(shard)\n",
        new="",
        harm="nobody can join any more",
        killed_by=(f"{_STATE_TESTS}::test_a_spoilt_state_that_is_accepted_is_handed_on_with_its_next_version",),
    ),
    Bug(
        name="an own commit is whatever its file says",
        module="p2pdiloco.peer.durable_commits",
        old="if not isinstance(message, Commit) or self._path(message.header).name != name:",
        new="if not isinstance(message, Commit):",
        harm="a flipped bit in an old commit ends the peer at its next checkpoint",
        killed_by=(f"{_OWN_TESTS}::test_a_commit_that_the_disk_has_altered_is_none",),
    ),
    Bug(
        name="an altered state is gone on with as soon as nobody is here",
        module="p2pdiloco.peer.scrubber",
        old="elif view.live or not view.missing or now -",
        new="elif True or now -",
        harm="a bit that flips while a line is away is in what is signed, and the others take the fault for their own",
        killed_by=(
            "tests/unit/test_peer_scrubber.py"
            "::test_who_has_just_lost_the_others_gets_its_state_from_them_when_they_are_back",
        ),
    ),
    Bug(
        name="what coarse rounding takes off is lost",
        module="p2pdiloco.peer.model_state",
        old="            merged += owed\n",
        new="            pass\n",
        harm="small values that are rounded to 0 each time never move",
        killed_by=(f"{_STATE_TESTS}::test_what_coarse_rounding_takes_off_is_in_the_owners_next_merge",),
    ),
    Bug(
        name="what is owed outlives another owner's commit",
        module="p2pdiloco.peer.model_state",
        old="        self._owed.pop(shard, None)\n        if ready is None",
        new="        if ready is None",
        harm="what learners have made up for since is added once more",
        killed_by=(f"{_STATE_TESTS}::test_nothing_is_owed_after_another_owners_commit_nor_by_a_fine_codec",),
    ),
    Bug(
        name="a line of which nothing is known is fast",
        module="p2pdiloco.peer.codec_selection",
        old="return line is None or line / others < FAST_BYTES_PER_S",
        new="return line is not None and line / others < FAST_BYTES_PER_S",
        harm="a fifth more bytes leave a home",
        killed_by=(
            "tests/unit/test_peer_codec_selection.py::test_huffman_codes_are_left_out_where_the_line_is_known_to_be_fast",
        ),
    ),
    # -- own contributions while the disk takes no more ----------------------------------------------------------------
    Bug(
        name="own contributions pile up while the disk takes no more",
        module="p2pdiloco.peer.payload_cache",
        old="own_bytes = OWN_WINDOWS * most_bytes",
        new="own_bytes = OWN_WINDOWS * 1e12",
        harm="a run of a billion parameters takes half a gigabyte more with every turn",
        killed_by=("tests/unit/test_peer_payload_store.py::test_no_more_is_written_than_a_day_allows",),
    ),
    Bug(
        name="an own contribution that had no room is ignored",
        module="p2pdiloco.peer.payload_cache",
        old="if effect.is_reset or not is_whole:",
        new="if effect.is_reset:",
        harm="what was merged stays in the learner's delta and is merged again",
        killed_by=(
            "tests/unit/test_peer_payload_store.py"
            "::test_a_learner_whose_contribution_is_lost_takes_the_global_parameters",
        ),
    ),
    Bug(
        name="what is on offer goes with the rest",
        module="p2pdiloco.protocol.contributions",
        old="found, total = {pending.contribution.payload} if pending is not None else set[Digest](), 0",
        new="found, total = set[Digest](), 0",
        harm="an owner that asks again gets nothing",
        killed_by=("tests/unit/protocol/test_bounds.py::test_of_own_contributions_the_youngest_that_fit_are_kept",),
    ),
)
