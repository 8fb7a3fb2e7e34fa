"""Bugs in going back (rules K): peers that vote for nothing, never, or again and again, and runs that stay divided."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_TESTS = "tests/unit/protocol/test_going_back.py"
_WHOLE = "tests/unit/test_peer_going_back.py"
_BACK = "p2pdiloco.protocol.going_back"
_EVALUATION = "p2pdiloco.protocol.evaluation"
_OWN = "p2pdiloco.protocol.own_commits"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, killed_by: str, path: str = _TESTS) -> Bug:
    return Bug(name, module, where, old, new, harm, (f"{path}::{killed_by}",))


BUGS = (
    _bug(
        "a commit that waits is applied to an abandoned head",
        "p2pdiloco.protocol.replication",
        "Replication._next",
        "header is not None and not self.refusals.is_refused(header, commit_id(header))",
        "header is not None",
        "peers that have voted to go back keep the ruined model, and those that went back give in",
        "test_a_commit_that_waits_for_its_turn_is_not_applied_to_an_abandoned_head",
    ),
    _bug(
        "a commit that a vote names several times has several votes",
        _BACK,
        "named_by_most",
        "dict.fromkeys(commits)",
        "commits",
        "one member sends the whole run back",
        "test_who_names_a_commit_several_times_has_one_vote",
    ),
    _bug(
        "one member's jump keeps all checkpoints from being good",
        _EVALUATION,
        "Evaluations.is_doubtful",
        "self.core.config.peer in self._jumps or Support(len(self._jumps), len(self._latest)).is_most",
        "bool(self._jumps)",
        "a liar that says for ever that the loss has jumped leaves nobody a state to go back to",
        "test_one_member_alone_keeps_no_checkpoint_from_being_known_as_good",
    ),
    _bug(
        "a peer votes on others' word",
        _EVALUATION,
        "Evaluations.has_jumped",
        "self.core.config.peer in found",
        "True",
        "liars send a run back",
        "test_fewer_or_others_alone_make_no_vote",
    ),
    _bug(
        "the good version itself is voted against",
        _BACK,
        "GoingBack._commits_since_good",
        "heads.index(good) + 1",
        "heads.index(good)",
        "no known-good checkpoint may be installed",
        "test_a_peer_votes_against_what_followed_its_good_checkpoint_when_the_loss_has_jumped",
    ),
    _bug(
        "votes follow each other",
        _BACK,
        "GoingBack.vote_if_due",
        "self._version() < self._rests_until",
        "False",
        "a run that diverges by itself never gets anywhere",
        "test_a_peer_votes_again_only_much_later",
    ),
    _bug(
        "two voters are enough",
        _BACK,
        "named_by_most",
        "Support(count, able).is_most",
        "True",
        "two liars of many send a run back",
        "test_commits_are_abandoned_that_most_vote_against",
    ),
    _bug(
        "those that have not voted do not count",
        _BACK,
        "named_by_most",
        "total - (len(votes) - len(named))",
        "len(named)",
        "peers that hear votes in another order go on from other versions",
        "test_the_order_of_votes_changes_nothing",
    ),
    _bug(
        "votes count for ever",
        _BACK,
        "GoingBack._expire",
        "version <= told.counts_until",
        "True",
        "votes of two different days send a run back",
        "test_a_vote_is_forgotten_after_some_evaluations",
    ),
    _bug(
        "an abandoned state is taken",
        "p2pdiloco.protocol.rejected_commits",
        "RejectedCommits.holds",
        "(self.ids, self.core.abandoned)",
        "(self.ids,)",
        "the heavier chain, which is ruined, brings everybody back",
        "test_what_follows_an_abandoned_commit_is_refused_and_nobody_barred",
    ),
    _bug(
        "an abandoned head is merged on",
        "p2pdiloco.protocol.gathering",
        "Gatherer.may_merge",
        "core.head(shard).id not in core.abandoned",
        "True",
        "the ruined chain goes on",
        "test_a_peer_returns_to_its_good_checkpoint",
    ),
    _bug(
        "a learner keeps what it learned from the ruined model",
        "p2pdiloco.protocol.replication",
        "Replication.install",
        "if is_back:\n    moves = (None if learner is None else learner.id, (), (), True)",
        "pass",
        "the next versions are ruined, too",
        "test_a_peer_returns_to_its_good_checkpoint",
    ),
    _bug(
        "what was discarded is contributed",
        "p2pdiloco.protocol.contributions",
        "DeltaReconciliation.on_head_changed",
        "learner.floors[shard] = Mark(learner.tokens, learner.steps, own.version)",
        "pass",
        "tokens count that nobody trained",
        "test_a_peer_returns_to_its_good_checkpoint",
    ),
    _bug(
        "earlier lives made no commits",
        _OWN,
        "OwnCommitLog.is_dropped",
        "head.version < self.starts[head.shard] or head.id in self._dropped[head.shard]",
        "head.id in self._dropped[head.shard]",
        "an honest owner signs two commits on one parent, and is barred",
        "test_a_life_that_began_later_merges_nothing_at_older_versions",
    ),
    _bug(
        "a restart forgets what the run went back from",
        _BACK,
        "GoingBack.restore",
        "self.aggregation.own_commits.restore_made(self.made, starts)",
        "pass",
        "an honest owner signs two commits on one parent, and is barred",
        "test_no_second_commit_is_made_on_a_parent_after_going_back",
    ),
    _bug(
        "a peer that nobody follows stays alone",
        _BACK,
        "GoingBack.check",
        "ancestry.is_deserted(chain.shard)",
        "False",
        "the run stays divided",
        "test_a_peer_that_nobody_follows_gives_in",
    ),
    _bug(
        "who counts too few votes stays behind",
        _BACK,
        "GoingBack._follow",
        "not Support(len(left), total, total - len(left)).is_leading",
        "True",
        "the run stays divided where not all peers hear each other",
        "test_who_counts_too_few_votes_follows_those_that_left",
    ),
    _bug(
        "a few returned peers have no say",
        "p2pdiloco.protocol.state_acceptance",
        "StateAcceptance._problem_after_going_back(self, peer, chain, theirs, donors)",
        "len(back)",
        "len(donors)",
        "peers without a good checkpoint believe nobody, and stay where they are",
        "test_the_word_of_those_that_returned_counts",
    ),
    _bug(
        "what is newer stays on disk",
        "p2pdiloco.peer.checkpoint_writer",
        "CheckpointWriter._set_aside",
        "number = go_back(self._folder, self._host.disk)",
        "number = min((number for number, _ in __import__('p2pdiloco.peer.checkpoint', fromlist=['indices'])"
        ".indices(self._folder, self._host.disk)), default=None)",
        "a restart brings the ruined model back",
        "test_peers_go_back_to_their_known_good_checkpoints_and_go_on",
        _WHOLE,
    ),
)
