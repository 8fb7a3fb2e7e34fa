"""Bugs of the protocol that seeds of honest peers cannot find, or find too rarely: each names the tests of its rule.

What seeds do find stands in ``mutants``.
"""

from __future__ import annotations

from tests.seeded_bugs.audits import BUGS as AUDIT_BUGS
from tests.seeded_bugs.bridges import BUGS as BRIDGE_BUGS
from tests.seeded_bugs.claims import BUGS as CLAIM_BUGS
from tests.seeded_bugs.going_back import BUGS as BACK_BUGS
from tests.seeded_bugs.groups import BUGS as GROUP_BUGS
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
    *GROUP_BUGS,
    *BRIDGE_BUGS,
    *MESH_BUGS,
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
        "the slowest round trip makes owners wait",
        "waiting",
        "waits",
        "steps * times.step_s + 2 * times.usual_round_trip_s",
        "steps * times.step_s + 2 * times.slowest_round_trip_s",
        "a member that answers heartbeats late delays every version of a small model by seconds",
        "test_answers.py::test_who_answers_heartbeats_late_is_not_waited_for_longer",
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
        "early contributions without a budget",
        "aggregation",
        "Aggregation.wants",
        "waiting <= max(contribution.payload_bytes, share)",
        "True",
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
        "the newest evaluation is shown, whoever made it",
        "evaluation",
        "Evaluations._show",
        "low <= one.loss <= high",
        "True",
        "one member's lie is the loss that all peers show",
        "test_messages.py::test_one_lying_evaluation_among_several_changes_nothing",
    ),
    _bug(
        "of two evaluations any newer one is shown",
        "evaluation",
        "Evaluations._show",
        "len(recent) == 2",
        "False",
        "where two evaluate, one lie is the loss that the other shows",
        "test_messages.py::test_of_two_evaluations_a_newer_one_that_cannot_be_is_not_shown",
    ),
    _bug(
        "of two evaluations one's own is shown",
        "evaluation",
        "Evaluations._show",
        "before.loss / FALL",
        "before.loss",
        "a peer whose turn to measure does not come shows an old loss",
        "test_messages.py::test_of_two_evaluations_the_newer_is_shown",
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
        "what an earlier life made and left behind is forgotten",
        "own_commits",
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
        "Owners.on_turn_missed",
        "now >= until",
        "True",
        "one slow round of several shards lets an owner come last for 256 takeover times",
        "../test_protocol_membership.py::test_misses_while_a_peer_already_owns_last_do_not_prolong_that",
    ),
    _bug(
        "rounds wait beside somebody",
        "contributions",
        "Contributions._can_wait",
        "not core.config.takes_mean or core.membership.peers or core.departure or core.end.tokens",
        "not core.config.takes_mean or core.departure or core.end.tokens",
        "followers, and those who publish, get every eighth version",
        "test_rounds.py::test_rounds_do_not_wait_where_somebody_is_or_was",
    ),
    _bug(
        "rounds wait where others' work is in the chain",
        "contributions",
        "Contributions._can_wait",
        "peer_of(learner) == core.config.peer",
        "True",
        "a peer that was cut off counts for an eighth of what it trained, and its fork loses",
        "test_rounds.py::test_rounds_do_not_wait_where_somebody_is_or_was",
    ),
    _bug(
        "rounds of a budget wait",
        "contributions",
        "Contributions._can_wait",
        "not core.config.takes_mean or core.membership.peers or core.departure or core.end.tokens",
        "not core.config.takes_mean or core.membership.peers or core.departure",
        "a run with a token budget trains far more than it",
        "test_rounds.py::test_a_peer_alone_lets_rounds_wait_that_would_serve_nobody",
    ),
)
