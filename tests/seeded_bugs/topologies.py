"""Bugs of runs in which not every pair of peers is connected (``planted_rules`` tells how they are used)."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol/test_connectedness.py"
_COMPANY = "tests/unit/protocol/test_company.py"
_DIVIDED = "test_where_for_long_most_stand_by_nothing_a_newcomer_takes_what_as_many_stand_by_as_by_any_other"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, *killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, tuple(f"{_TESTS}::{test}" for test in killed_by))


BUGS = (
    _bug(
        "connectedness does not matter",
        "ownership",
        "Owners.rank",
        "late = dict(tiers)",
        "late: dict[PeerId, int] = {}",
        "behind routers each peer merges for itself, and most versions are forks",
        "test_who_reaches_all_owns_before_those_who_do_not",
    ),
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
        "those afar not looked at",
        "connectivity",
        "Connectivity._find_best",
        "frozenset().union(*lists) - here.keys()",
        "frozenset[int]()",
        "behind a router the public peer is no better than this one",
        "test_who_reaches_all_owns_before_those_who_do_not",
    ),
    _bug(
        "an old list against a live peer",
        "connectivity",
        "Connectivity._find_best",
        "prints if prints is None or me in prints else prints | {me}",
        "prints",
        "after each cut two that hear each other again both take themselves for the best",
        "test_who_is_live_hears_this_peer",
    ),
    _bug(
        "only the very best own",
        "connectivity",
        "Connectivity._find_best",
        "fewest + (len(here) + len(afar) - 1 - fewest) // TOLERANCE",
        "fewest",
        "in a large swarm the few that hear a shy peer do all the work",
        "test_in_a_large_swarm_a_sixteenth_fewer_are_as_good",
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
    _bug(
        "ownership flaps",
        "connectivity",
        "Connectivity.judge",
        "now > self._fit_until.get(peer, -1.0)",
        "peer not in self._fit",
        "whenever somebody comes or goes, peers disagree on all owners for a moment",
        "test_who_was_among_the_best_stays_it_for_a_while",
    ),
    _bug(
        "who hears none of the best ranked like who does",
        "connectivity",
        "Connectivity.judge",
        "1 if prints is None or prints & self.best else 2",
        "1",
        "what a peer that hears no owner has goes to one that hears none either",
        "test_after_the_best_come_those_who_hear_one_of_them",
    ),
    _bug(
        "lists told once",
        "connectivity",
        "Connectivity.update_own_list",
        "sequence + 1",
        "1",
        "others go by whom a peer heard when it came",
        "test_heartbeats_tell_whom_their_sender_hears_until_that_is_seen",
    ),
    _bug(
        "lists told always",
        "connectivity",
        "Connectivity.list_for",
        "None if echoed >= self.told_from else self._own_list",
        "self._own_list",
        "what heartbeats cost grows with the square of the swarm",
        "test_heartbeats_tell_whom_their_sender_hears_until_that_is_seen",
    ),
    Bug(
        "each death taken for a cut",
        f"{_P}.membership",
        "PartitionDetector._compare",
        "len(self.missing) <= len(self._here)",
        "not self.missing",
        "one of many that dies makes all others wait at the end",
        (f"{_COMPANY}::test_who_is_lost_with_as_many_as_stay_may_be_cut_off",),
    ),
    Bug(
        "deaths of days added up",
        f"{_P}.membership",
        "PartitionDetector.update",
        "(one for one, at in self._lost.items() if now - at <= window_s)",
        "(one for one, at in self._lost.items())",
        "a swarm whose machines come and go takes itself for cut off",
        (f"{_COMPANY}::test_those_who_are_lost_one_after_the_other_are_dead",),
    ),
    Bug(
        "those afar no company",
        f"{_P}.membership",
        "Membership.detect_partition",
        "self.connectivity.lists[self.me] | self.connectivity.afar",
        "self.connectivity.lists[self.me]",
        "when the public peer dies nobody thinks of those behind other routers",
        (f"{_COMPANY}::test_whom_only_the_lost_heard_is_lost_with_them",),
    ),
    Bug(
        "the fewer merge though a majority is needed",
        f"{_P}.aggregation",
        "Aggregation._is_majority",
        "2 * len(answered) > able",
        "True",
        "a run that wanted one model has two",
        (f"{_COMPANY}::test_where_a_majority_is_needed_the_fewer_merge_nothing",),
    ),
    Bug(
        "who has just been cut off takes over",
        f"{_P}.aggregation",
        "Aggregation._is_majority",
        (
            "able = len(membership.participating) + core.is_participating() + "
            "len(membership.partition_detector.missing)\n"
            "return 2 * len(answered) > able"
        ),
        (
            "able = len(membership.participating) + core.is_participating() + "
            "len(membership.partition_detector.missing)\n"
            "return not membership.partition_detector.is_apart"
        ),
        "until a cut is noticed both sides go on, and have two models for good",
        (f"{_COMPANY}::test_where_a_majority_is_needed_no_version_is_made_without_it",),
    ),
    Bug(
        "a majority against what one says not looked at",
        f"{_P}.commit_validation",
        "AncestryCheck._is_divided",
        "is_founders or 0 < stand >= self._rivals(shard, theirs, donors)",
        "True",
        "a liar waits until a newcomer is tired of honest peers that go on too fast",
        (f"tests/unit/protocol/test_lineage.py::{_DIVIDED}",),
    ),
    Bug(
        name="a large swarm looks into the directory as often as a small one",
        module="p2pdiloco.swarm.lookup_policy",
        where="LookupPolicy.stretch",
        old="min(MAX_STRETCH, max(1.0, len(self._connected) / FEW))",
        new="1.0",
        harm="what idle peers say grows with the swarm",
        killed_by=("tests/unit/test_swarm_lookup_policy.py::test_what_looks_cost_does_not_grow_with_the_swarm",),
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
)
