"""Bugs of the protocol that seeds of honest peers cannot find, or find too rarely: each names the tests of its rule.

What seeds do find stands in ``mutants``.
"""

from __future__ import annotations

from tests.seeded_bugs.audits import BUGS as AUDIT_BUGS
from tests.seeded_bugs.claims import BUGS as CLAIM_BUGS
from tests.seeded_bugs.going_back import BUGS as BACK_BUGS
from tests.seeded_bugs.inject import Bug
from tests.seeded_bugs.topologies import BUGS as MESH_BUGS

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, (f"{_TESTS}/{killed_by}",))


BUGS = (
    *AUDIT_BUGS,
    *BACK_BUGS,
    *CLAIM_BUGS,
    *MESH_BUGS,
    _bug(
        "what is under way is not counted in a budget",
        "contributions",
        "TokenBudget.is_spent",
        "self.merged + self._under_way // (2 * len(self._merged))",
        "self.merged",
        "a run with a budget goes on for half a turn more",
        "test_coming_and_going.py::test_with_a_budget_of_tokens_a_learner_stops_when_merged_and_under_way_make_it_up",
    ),
    _bug(
        "a spent budget is forgotten with the learner",
        "contributions",
        "TokenBudget.stop_if_spent",
        "self.is_spent",
        "self.is_spent and self.record_head",
        "a learner that comes back at the end trains on, and the run goes beyond its budget",
        "test_coming_and_going.py::test_a_learner_that_comes_when_the_budget_is_spent_makes_no_steps",
    ),
    _bug(
        "heartbeats do not slow down",
        "membership",
        "Membership.beat_s",
        "self.interval_s if peers <= BEAT_PEERS else self.interval_s * (peers / BEAT_PEERS)",
        "self.interval_s",
        "what heartbeats cost a peer grows with the swarm",
        "test_timers.py::test_beyond_16_peers_it_beats_more_slowly",
    ),
    _bug(
        "any interval believed",
        "membership",
        "PeerView.interval_s",
        "min(self.beat.interval_s, SLOWER * own_s)",
        "self.beat.interval_s",
        "who is dead, or says nothing on purpose, stays live for as long as it likes",
        "test_timers.py::test_who_beats_more_slowly_may_be_silent_for_longer",
    ),
    _bug(
        "one old echo ends a connection",
        "membership",
        "Membership.record_heartbeat",
        "min(view.deaf_since, now)",
        "now - 60.0",
        "whoever goes on after a stop loses all its connections, and what waits on them",
        "test_membership.py::test_who_is_silent_or_goes_on_after_a_stop_is_not_hung_up_on",
    ),
    _bug(
        "owners wait for some steps, however long round trips are",
        "aggregation",
        "Aggregation._limit_s",
        "steps * core.fastest_step_time_s() + 2 * core.membership.usual_round_trip_s",
        "steps * core.fastest_step_time_s()",
        "where steps are shorter than a round trip, each version has the progress of one learner",
        "test_answers.py::test_where_round_trips_are_long_the_owner_waits_for_two_of_them_longer",
    ),
    _bug(
        "owners wait for half of a turn, however short it is",
        "aggregation",
        "Aggregation._limit_s",
        "max(core.config.sync_every / 2, LEAST_WAIT_STEPS)",
        "core.config.sync_every / 2",
        "with a turn every three steps, most versions have the progress of one learner, and a run of adapters ends "
        "20 % worse",
        "test_answers.py::test_the_owner_waits_for_three_steps_however_short_a_turn_is",
    ),
    _bug(
        "the slowest round trip makes owners wait",
        "aggregation",
        "Aggregation._limit_s",
        "steps * core.fastest_step_time_s() + 2 * core.membership.usual_round_trip_s",
        "steps * core.fastest_step_time_s() + 2 * core.membership.slowest_round_trip_s",
        "a member that answers heartbeats late delays every version of a small model by seconds",
        "test_answers.py::test_who_answers_heartbeats_late_is_not_waited_for_longer",
    ),
    _bug(
        "a sibling of the head is waited for",
        "replication",
        "Replication.on_commit",
        (
            "self.on_head(sender, Head(shard, header.version, new_id, header.tokens))\n"
            "if shard in self.wanted and header.version <= chain.head.version:\n"
            "    core.alarms.set(('want', shard), core.now)"
        ),
        "self.on_head(sender, Head(shard, header.version, new_id, header.tokens))",
        "a fork is healed a patience later than it could be, and on slow lines after a deadline",
        "test_timers.py::test_a_heavier_sibling_of_the_head_is_asked_for_at_once",
    ),
    _bug(
        "a later commit that waits is taken for the answer",
        "replication",
        "Replication._forget_request(self, shard)",
        "self.orphans.is_followed(head)",
        "self.orphans.of(shard)",
        "who is more than 32 commits behind catches up so many in each deadline, and blames the donor",
        "test_adoption.py::test_who_is_farther_behind_than_an_answer_reaches_asks_again",
    ),
    _bug(
        "newcomers get commits",
        "machine",
        "Machine._send_commit",
        "view.beat.phase == 'joining'",
        "view.beat.phase == 'nothing'",
        "over a thin line commits without end hold up the states that newcomers wait for: nobody ever joins",
        "test_merging.py::test_a_newcomer_is_told_of_the_head_and_gets_no_commit",
    ),
    _bug(
        "what was committed during a join is not asked for",
        "replication",
        "Replication.become_current",
        "self._want_what_was_offered",
        "self.offers.clear",
        "a newcomer trains on an old version, whose fork gives way a deadline later",
        "test_coming_and_going.py::test_a_newcomer_asks_for_what_was_committed_meanwhile_when_it_has_all_states",
    ),
    _bug(
        "who takes part is known too late",
        "machine",
        "Machine.handle",
        (
            "if core.alarms.pop_if_due(NEWS, core.now):\n"
            "    self.heartbeats.refresh('silent')\n"
            "if isinstance(event, ev.Received):\n"
            "    ...\n"
            "else:\n"
            "    ..."
        ),
        "if isinstance(event, ev.Received):\n    ...\nelse:\n    ...",
        "a peer that stood still merges less than the quorum",
        "test_timers.py::test_what_heartbeats_changed_is_looked_at_before_what_happens_next",
    ),
    _bug(
        "mark-life check removed",
        "contributions",
        "DeltaReconciliation.mark_in",
        "own if is_forgotten else NO_MARK",
        "NO_MARK",
        "what a chain forgot for its age is taken back and merged again",
        "test_adoption.py::test_what_a_chain_forgot_for_its_age_stays_merged",
    ),
    _bug(
        "marks never forgotten",
        "contributions",
        "DeltaReconciliation.mark_in",
        "own if is_forgotten else NO_MARK",
        "own",
        "what only the losing side of a fork had merged is never given again",
        "test_adoption.py::test_what_a_chain_forgot_for_its_age_stays_merged",
    ),
    _bug(
        "lighter of two waiting rivals kept",
        "replication",
        "Orphans.add",
        "(header.tokens, commit_id(header)) > (other.tokens, commit_id(other))",
        "(header.tokens, commit_id(header)) < (other.tokens, commit_id(other))",
        "a detour over the lighter fork",
        "test_adoption.py::test_of_two_children_that_wait_the_heavier_is_kept",
    ),
    _bug(
        "who leaves merges beside the owners",
        "ownership",
        "Owners.may_own",
        "not self.is_leaving or any((peer == self._me for peer, _ in self.candidates))",
        "True",
        "a fork with everybody who leaves, and its line is full when it is in haste",
        "test_ownership.py::test_who_leaves_merges_nothing_while_others_may",
    ),
    _bug(
        "second lap never begins",
        "contributions",
        "Contributions._offer",
        "pending.asked.clear()",
        "raise AssertionError",
        "after every owner was asked once nobody is",
        "test_timers.py::test_takeover_is_longer_with_each_lap",
    ),
    _bug(
        "early contributions without a budget",
        "aggregation",
        "Aggregation.wants",
        "waiting <= self.core.config.early_bytes // max(1, len(self.core.membership.peers))",
        "True or waiting <= self.core.config.early_bytes // max(1, len(self.core.membership.peers))",
        "memory fills with what waits for heads that never come",
        "test_plausibility.py::test_what_waits_for_a_later_head_has_few_bytes",
    ),
    _bug(
        "one late answer makes all wait",
        "membership",
        "Membership.refresh",
        "min(slowest_s, interval_s + SLOW_TRIPS * self.usual_round_trip_s)",
        "slowest_s",
        "a peer that echoes late keeps all from taking over and from catching up",
        "test_plausibility.py::test_one_peer_that_answers_late_does_not_make_all_wait",
    ),
    _bug(
        "what can be encoded hides a shard that cannot",
        "health",
        "HealthWarnings.on_encoded",
        "self._failed_turns.pop(shard, None)",
        "self._failed_turns.clear()",
        "a shard waits for ever for a learner that is poisoned there alone, with K = 2",
        "test_trouble.py::test_a_learner_of_which_one_shard_cannot_be_encoded_does_not_participate",
    ),
    _bug(
        "stuck in silence",
        "health",
        "HealthWarnings.check_progress",
        "core.note('warning', 'stuck', self.stuck)",
        "pass",
        "nobody is told that nothing goes on",
        "test_trouble.py::test_without_versions_for_long_a_peer_says_that_it_is_stuck",
    ),
    _bug(
        "the newest evaluation is shown, whoever made it",
        "evaluation",
        "Evaluations._show",
        "[one for one in self._latest.values() if one.version >= oldest]",
        "[max(self._latest.values(), key=lambda one: one.step)]",
        "one member's lie is the loss that all peers show",
        "test_messages.py::test_one_lying_evaluation_among_several_changes_nothing",
    ),
    _bug(
        "an evaluation counts for as long as its maker is connected",
        "evaluation",
        "Evaluations._show",
        "[one for one in self._latest.values() if one.version >= oldest]",
        "[one for one in self._latest.values()]",
        "peers whose learners rest hold the loss at what it was when they trained",
        "test_messages.py::test_an_evaluation_counts_until_16_more_were_due",
    ),
    _bug(
        "of two evaluations the other's is shown",
        "evaluation",
        "median_near",
        "abs(high - near) < abs(low - near)",
        "abs(high - near) > abs(low - near)",
        "where two evaluate, one lie is the loss that the other shows",
        "test_messages.py::test_of_two_evaluations_ones_own_is_shown",
    ),
    _bug(
        "a loss that is no number is told",
        "evaluation",
        "is_loss",
        "math.isfinite(value) and 0.0 <= value <= MOST_LOSS",
        "True",
        "others take an honest peer whose model has diverged for one that sends nonsense",
        "test_messages.py::test_a_loss_that_is_none_is_refused_and_not_told",
    ),
    _bug(
        "a peer that has finished stays finished",
        "machine",
        "Machine._on_end_moved",
        'not is_over and core.departure == "finished"',
        "False",
        "whoever was at the earlier end leaves, though the run is prolonged",
        "test_coming_and_going.py::test_a_peer_that_has_finished_trains_on_when_the_run_is_prolonged",
    ),
    _bug(
        "a pause at the earlier end counts",
        "machine",
        "Machine._on_learner_paused",
        "not is_asked and event.step < core.end.steps",
        "False",
        "a peer whose learner stops while the news is on its way takes the prolonged run for complete",
        "test_coming_and_going.py::test_a_learner_that_stops_at_the_earlier_end_goes_on",
    ),
    _bug(
        "a chain's steps end with the run",
        "chain",
        "Chain.latest_step",
        "min(self.step, LONGEST_RUN)",
        "min(self.step, 4)",
        "who has not heard that the run is prolonged refuses the others' commits",
        "test_coming_and_going.py"
        "::test_who_does_not_know_that_the_run_is_prolonged_merges_what_others_train_beyond_its_end",
    ),
    _bug(
        "what an earlier life made and left behind is forgotten",
        "aggregation",
        "OwnCommitLog.restore",
        "self._dropped[header.shard].append(header.parent)",
        "pass",
        "a restarted peer that is led back to that parent makes a second commit on it, and is barred",
        "test_equivocations.py::test_who_comes_back_to_a_parent_whose_commit_it_dropped_merges_nothing_there",
    ),
    _bug(
        "of two weights the larger is the median",
        "ownership",
        "capped",
        "weights[(len(weights) - 1) // 2]",
        "weights[len(weights) // 2]",
        "of two peers one owns everything by asking for it",
        "test_plausibility.py::test_a_weight_counts_for_at_most_twice_the_median",
    ),
    _bug(
        "misses while a peer owns last count",
        "ownership",
        "Owners.on_takeover_missed",
        "now >= until",
        "True",
        "one slow turn of several shards lets an owner come last for 256 takeover times",
        "../test_protocol_membership.py::test_misses_while_a_peer_already_owns_last_do_not_prolong_that",
    ),
    _bug(
        "what was sent before a stall is a sample",
        "membership",
        "Membership._measure",
        "at < self.stall[0]",
        "False",
        "whoever stood still notices deaths late, since all its deadlines have grown by the stall",
        "../test_protocol_membership.py::test_what_was_queued_while_this_peer_stood_still_is_no_sample",
    ),
)
