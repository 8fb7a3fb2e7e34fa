"""Bugs of runs in which not every pair of peers is connected, and of the way of commits from peer to peer."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol/test_connectedness.py"
_DIVIDED = "test_where_for_long_most_stand_by_nothing_a_newcomer_takes_what_as_many_stand_by_as_by_any_other"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, *killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, tuple(f"{_TESTS}::{test}" for test in killed_by))


def _relay_bug(name: str, module: str, where: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, (f"tests/unit/protocol/{killed_by}",))


BUGS = (
    _bug(
        "names that nobody bears counted",
        "connectivity",
        "Connectivity._find_best",
        "(self.givers, self.admitted)",
        "(self.admitted,)",
        "who says that it hears a thousand owns all",
        "test_who_is_heard_by_others_only_counts_if_it_gave_of_late",
    ),
    _bug(
        "who gave once counts for ever",
        "connectivity",
        "Connectivity.update_givers",
        "mark.version > version - LATELY",
        "mark.version",
        "who says that it hears the dead owns all",
        "test_who_is_heard_by_others_only_counts_if_it_gave_of_late",
    ),
    _bug(
        "an old list against a live peer",
        "connectivity",
        "Connectivity._find_best",
        "y != me and (lists := self._lacking(y))",
        "(lists := self._lacking(y))",
        "after each cut two that hear each other again both take themselves for the best",
        "test_who_is_live_hears_this_peer",
    ),
    _bug(
        "one side's word that it hears another suffices",
        "connectivity",
        "_apart",
        "apart.setdefault(y, set()).add(x)",
        "pass",
        "a peer that nobody hears is among the best because it says that it hears all",
        "test_nobodys_word_for_itself_counts",
    ),
    Bug(
        "a majority against what one says not looked at",
        f"{_P}.state_acceptance",
        "StateAcceptance._newcomers_problem",
        "0 if founder in donors else reports.most_elsewhere(shard, theirs, donors)",
        "0",
        "a liar waits until a newcomer is tired of honest peers that go on too fast",
        (f"tests/unit/protocol/test_lineage.py::{_DIVIDED}",),
    ),
    Bug(
        name="strangers who connect keep a peer from looking",
        module="p2pdiloco.swarm.lookup_policy",
        where="LookupPolicy.stretch",
        old="min(MAX_STRETCH, max(1.0, len(self._connected) / FEW))",
        new="max(1.0, len(self._connected) / FEW)",
        harm="in an open run five hundred identities of one stranger keep two halves of a swarm apart for hours",
        killed_by=("tests/unit/test_swarm_lookup_policy.py::test_what_looks_cost_does_not_grow_with_the_swarm",),
    ),
    _relay_bug(
        "nobody else is asked for commits",
        "replication",
        "Replication.ask_another",
        "(other := self._reporter(shard)) is None",
        "(other := self._reporter(shard)) is not None",
        "a member that tells of commits and does not send them holds others up for ten seconds each time",
        "test_adoption.py::test_another_peer_is_asked_for_what_does_not_come",
    ),
    _relay_bug(
        "slow lines pass commits on",
        "commit_relay",
        "tree_order",
        "3 * len(peers) // 4",
        "len(peers) // 2",
        "where most lines are slow, commits take a minute, and half of the learners are left out",
        "test_commit_relay.py::test_slow_lines_come_last_even_where_most_are_slow",
    ),
    _relay_bug(
        "others are not told of a slow line",
        "state",
        "Core.weight",
        "LINE_WEIGHTS[self.line_speed]",
        "1.0",
        "peers behind slow lines own and relay as much as others, and all wait for them",
        "test_commit_relay.py::test_a_peer_asks_for_weight_by_its_line",
    ),
    _relay_bug(
        "who reports first is asked first",
        "replication",
        "Replication._reporter",
        "(view.ignored_s, told.moved_at, peer)",
        "(told.moved_at, peer)",
        "a liar whose heads lead nowhere is asked each time, before those that deliver",
        "test_adoption.py::test_who_has_not_delivered_is_asked_last",
    ),
    _relay_bug(
        "who has applied a commit keeps it",
        "replication",
        "Replication.on_applied",
        "not is_followed",
        "is_followed",
        "all but five peers wait for each commit until they ask for it",
        "test_commit_relay.py::test_who_has_applied_a_commit_passes_it_on",
    ),
    _relay_bug(
        "what was missed is passed on",
        "replication",
        "Replication.on_applied",
        "isinstance(target, CommitHeader) and target.owner != core.config.peer and not is_followed",
        "isinstance(target, CommitHeader) and target.owner != core.config.peer",
        "who comes back sends everybody what they have",
        "test_commit_relay.py::test_what_was_missed_is_not_passed_on_but_for_the_last",
    ),
    _relay_bug(
        "one tree for all commits",
        "commit_relay",
        "tree_order",
        'f"{commit}/{peer}"',
        'f"{peer}"',
        "the same few peers pass on everything, and a liar among them delays all commits",
        "test_commit_relay.py::test_two_commits_have_two_trees_and_strong_peers_come_first",
    ),
    _relay_bug(
        "a commit is announced to nobody",
        "commit_relay",
        "relay_commit",
        "len(order) > FAN_OUT + 1",
        "False",
        "whoever is below a peer that keeps commits learns of them at the next round",
        "test_commit_relay.py::test_who_has_applied_a_commit_passes_it_on",
    ),
    _relay_bug(
        "a commit goes to who has it",
        "commit_relay",
        "relay_commit",
        "{peer for peer, report in told.items() if report is not None and report.head == head.id}",
        "set()",
        "lines carry payloads twice",
        "test_commit_relay.py::test_who_reports_a_commit_does_not_get_it_again",
    ),
    _relay_bug(
        "newcomers pass commits on",
        "commit_relay",
        "relay_commit",
        "not core.is_current",
        "False",
        "commits come twice to peers in whose trees the newcomer has no place",
        "test_commit_relay.py::test_who_lacks_a_state_passes_nothing_on",
    ),
    _relay_bug(
        "what was asked for counts as arrived",
        "replication",
        "Replication.on_commit",
        "announced == new_id and self.asked.get(shard) != sender",
        "announced == new_id",
        "each commit that has to be asked for makes all peers wait longer before they ask",
        "test_timers.py::test_commit_patience_covers_what_commits_took_to_come_by_themselves",
    ),
    _relay_bug(
        "who is heard by others only is not waited for",
        "shutdown",
        "Shutdown._are_others_done",
        "not core.membership.connectivity.indirect",
        "True",
        "who leaves first lacks the last versions, and its peer says that the run is complete",
        "test_coming_and_going.py::test_while_a_peer_is_heard_by_others_only_all_stay_until_those_say_that_it_is_there_too",
    ),
    _relay_bug(
        "who sent what waits for its turn is not believed",
        "replication",
        "Replication.ask_another",
        '("turn", shard) in self.core.alarms',
        "False",
        "a peer that catches up leaves with tokens unmerged, since it asks those that deliver no more",
        "test_adoption.py::test_while_a_commit_waits_for_its_turn_another_peer_is_asked_and_who_sent_it_believed",
    ),
)
