"""Bugs of runs in which not every pair of peers is connected (``planted_rules`` tells how they are used)."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol/test_connectedness.py"
_DIVIDED = "test_where_for_long_most_stand_by_nothing_a_newcomer_takes_what_as_many_stand_by_as_by_any_other"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, *killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, tuple(f"{_TESTS}::{test}" for test in killed_by))


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
        "if y != me and not",
        "if not",
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
)
