"""Bugs of what the others may claim: steps, tokens, blocks, records, signatures and what led to a state.

Each names the tests of its rule.
"""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", where, old, new, harm, (f"{_TESTS}/{killed_by}",))


BUGS = (
    _bug(
        "a commit's maker vouches for it",
        "commit_validation",
        "AncestryCheck._doubt",
        (
            "if not words:\n"
            "    return 'only its maker has it'\n"
            "is_beaten = 1 + len(words) < self._rivals(head.shard, itself, [d for d in donors if d not in "
            "words])"
        ),
        ("is_beaten = 1 + len(words) < self._rivals(head.shard, itself, [d for d in donors if d not in words])"),
        "a liar gives newcomers a commit that all others have refused",
        "test_lineage.py::test_a_commit_is_not_taken_at_its_makers_word_alone",
    ),
    _bug(
        "beside the founder two vouch for each other after a while",
        "commit_validation",
        "AncestryCheck._doubt(self, peer, owner, head)",
        "founder in donors",
        "founder in donors and (not self._is_long(head.shard, 1))",
        "two liars wait until a newcomer is tired of honest peers that go on too fast",
        "test_lineage.py::test_where_the_founder_is_there_a_newcomer_takes_what_it_or_most_have",
    ),
    _bug(
        "those whom others hear are not waited for",
        "commit_validation",
        "AncestryCheck._doubt",
        "FAR_REQUESTS if self.core.membership.connectedness.afar else 1",
        "1",
        "who meets two liars first has their model, while the founder's connection is on its way",
        "test_lineage.py::test_a_young_runs_newcomer_waits_longer_while_others_hear_somebody",
    ),
    _bug(
        "who goes on takes back its word",
        "commit_validation",
        "AncestryCheck._doubt",
        "self._was_at",
        "self._is_at",
        "in a fast run a newcomer never finds that most have a head",
        "test_lineage.py::test_what_few_have_is_taken_after_a_while_if_no_more_have_another",
    ),
    _bug(
        "the makers of a divided run's heads are not believed",
        "commit_validation",
        "AncestryCheck._unbacked",
        "is_half or 2 * stand > len(donors)",
        "True",
        "who comes where a run has fallen into peers that are alone never gets a state, and they never meet",
        "test_lineage.py::"
        "test_where_for_long_most_stand_by_nothing_a_newcomer_takes_what_as_many_stand_by_as_by_any_other",
    ),
    _bug(
        "the founder is asked in its turn",
        "replication",
        "Replication.fetch_missing",
        "founder in donors and self.lineage.is_doubted(shard)",
        "False",
        "where a run has fallen apart a newcomer asks all parts in turns, and takes nobody's state for a minute",
        "test_lineage.py::test_where_a_run_has_fallen_apart_the_founders_part_is_asked_for",
    ),
    _bug(
        "a run that has fallen apart waits for its founder's part for ever",
        "commit_validation",
        "AncestryCheck._is_divided",
        "is_founders or 0 < stand >= self._rivals(shard, theirs, donors)",
        "not is_founders and 0 < stand >= self._rivals(shard, theirs, donors)",
        "who comes where a run has fallen into three, one of them its founder's, never gets a state",
        "test_lineage.py::test_where_a_run_has_fallen_apart_the_founders_part_is_asked_for",
    ),
    _bug(
        "who begins from a disk commits at once",
        "aggregation",
        "Aggregation.consider",
        "core.now < (until := self._unsure.get(shard, 0.0))",
        "(until := 0.0)",
        "an owner whose disk was put back to an older copy makes a commit again that others have, and is convicted",
        "test_equivocations.py::test_who_begins_from_a_disk_hears_others_before_it_commits",
    ),
    _bug(
        "of a proved liar in a young run one's word is enough",
        "commit_validation",
        "AncestryCheck._doubt(self, peer, owner)",
        "is_young and len(words) < 2 and (not self._is_long(head.shard, requests))",
        (
            "is_young and owner not in self.core.membership.owners.barred and (len(words) < 2) and (not "
            "self._is_long(head.shard, requests))"
        ),
        "a newcomer that hears nobody but the friend of a liar has its model, since it knows that it lies",
        "test_lineage.py::test_what_a_proved_liar_made_waits_for_the_founder_as_others_do",
    ),
    _bug(
        "an owner merges on a parent again and signs another commit",
        "aggregation",
        "OwnCommitLog.once",
        "self._made[header.shard].setdefault(header.parent, header)",
        "header",
        "honest owners are convicted of what liars do",
        "test_equivocations.py::test_an_owner_makes_one_commit_of_a_parent",
    ),
    _bug(
        "what an earlier life has made is forgotten",
        "machine",
        "Machine._started",
        "for header in event.own:\n    ...",
        "for header in ():\n    ...",
        "who is killed between sending and saving is convicted",
        "test_equivocations.py::test_what_an_earlier_life_has_made_is_applied_again",
    ),
    _bug(
        "two commits of different parents taken for a proof",
        "messages",
        "Equivocation.is_one",
        "(a.owner, a.shard, a.parent) == (b.owner, b.shard, b.parent)",
        "(a.owner, a.shard) == (b.owner, b.shard)",
        "every owner of two versions can be convicted by anybody",
        "test_equivocations.py::test_two_commits_of_one_owner_on_one_parent_are_a_proof",
    ),
    _bug(
        "who contradicts itself owns on",
        "ownership",
        "Owners.ask",
        "candidates = others or candidates",
        "pass",
        "an owner splits the swarm as often as it likes",
        "test_equivocations.py::test_who_is_proved_to_have_done_it_owns_nothing_for_a_term",
    ),
    _bug(
        "a barred owner's commits are refused from everybody",
        "replication",
        "Replication.receive",
        "sender == header.owner and core.membership.owners.is_excluded(sender)",
        "core.membership.owners.is_excluded(header.owner)",
        "who knew of the proof and who did not are split for good",
        "test_equivocations.py::test_what_it_makes_is_taken_from_others_alone",
    ),
    _bug(
        "a barred owner is barred for ever",
        "commit_validation",
        "Equivocations._is_over",
        "head is not None and head.version >= version + TERM",
        "False",
        "a machine whose disk was put back never owns again",
        "test_equivocations.py::test_who_is_proved_to_have_done_it_owns_nothing_for_a_term",
    ),
    Bug(
        name="allowance for claims grows with patience",
        module="p2pdiloco.timing",
        where="TokenBucket._refill",
        old="min(self.burst, self._tokens + count)",
        new="self._tokens + count",
        harm="after a calm hour one message ends a run",
        killed_by=(
            f"{_TESTS}/test_plausibility.py::test_a_claim_counts_for_eight_times_the_median_learners_steps_meanwhile",
        ),
    ),
    _bug(
        "claims do not use up the allowance",
        "contributions",
        "Contributions.adopt_step",
        "core.pace.use(step - core.step, core.now)",
        "pass",
        "claims that are repeated take the step anywhere",
        "test_plausibility.py::test_a_claim_moves_the_step_by_two_turns_at_most",
    ),
    _bug(
        "the furthest claim counts as the majority's",
        "membership",
        "Membership.majority_step",
        "(len(steps) - 1) // 2",
        "-1",
        "one heartbeat ends a run",
        "test_plausibility.py::test_what_more_than_half_of_all_say_is_believed",
    ),
    _bug(
        "an owner names a step that nobody takes",
        "aggregation",
        "Aggregation.commit",
        "min(collection.step, core.chains[event.shard].latest_step())",
        "collection.step",
        "after a long standstill a shard never moves again",
        "test_plausibility.py::test_an_owner_keeps_to_the_step_that_others_take",
    ),
    _bug(
        "a full chain counts on",
        "chain",
        "Chain.range_problem",
        "self.head.tokens > self._most_tokens",
        "False",
        "a commit that no message can hold",
        "test_plausibility.py::test_no_chain_counts_beyond_what_a_message_can_hold",
    ),
    _bug(
        "a newcomer believes the first",
        "commit_validation",
        "AncestryCheck._unbacked",
        "not is_backed and (not self._is_divided(shard, stand, theirs, donors))",
        "not stand",
        "whoever answers first gives a newcomer its model",
        "test_lineage.py::test_a_newcomer_takes_what_more_than_half_stand_by",
    ),
    _bug(
        "a newcomer does not wait for others' words",
        "commit_validation",
        "AncestryCheck.is_told",
        "2 * sum((shard in self._told.get(peer, ()) for peer in donors)) > len(donors)",
        "True",
        "a newcomer asks for states that it may not take",
        "test_lineage.py::test_a_newcomer_fetches_nothing_before_more_than_half_have_told_of_their_heads",
    ),
    _bug(
        "a statement without its base",
        "messages",
        "signed_contribution_bytes",
        "(_CONTRIBUTION, run, shard, base, given)",
        "(_CONTRIBUTION, run, shard, given)",
        "what was given once is merged on any head, with values that belong to another",
        "test_signatures.py::test_a_contribution_is_signed_for_its_run_its_shard_and_its_base",
    ),
    _bug(
        "a statement without its tokens",
        "messages",
        "signed_contribution_bytes",
        "(c.learner, c.tokens_from, c.tokens_to, c.steps_from, c.steps_to, c.blocks, c.payload)",
        "(c.learner, c.tokens_from, c.steps_from, c.steps_to, c.blocks, c.payload)",
        "an owner makes heavy what its friends gave",
        "test_signatures.py::test_a_contribution_is_signed_for_all_that_it_says",
    ),
    _bug(
        "weights without a cap",
        "ownership",
        "capped",
        "((peer, min(weight, most)) for peer, weight in willing)",
        "willing",
        "who asks for all ownership gets it",
        "test_plausibility.py::test_a_weight_counts_for_at_most_twice_the_median",
    ),
    _bug(
        "tokens count as they are declared",
        "counted_tokens",
        "TokenCounts.counted",
        "[min(t, MOST_TIMES * reference) for t, reference in zip(tokens, references, strict=True)]",
        "list(tokens)",
        "one member ends the run, or makes its chain the heaviest, with a number",
        "test_plausibility.py::test_a_contribution_counts_for_at_most_four_times_what_the_others_do",
    ),
    _bug(
        "a lone contribution counts as it is declared",
        "counted_tokens",
        "TokenCounts.counted(self, tokens)",
        "usual or first",
        "tokens[0]",
        "an owner that merges its own contribution alone ends the run with a number",
        "test_plausibility.py::test_a_contribution_that_is_merged_alone_counts_for_four_usual_ones_at_most",
    ),
    _bug(
        "the usual follows one version at once",
        "counted_tokens",
        "TokenCounts.after",
        "median_low",
        "max",
        "whoever declares most decides what is usual",
        "test_plausibility.py::test_what_is_usual_is_the_median_of_each_version_and_moves_slowly",
    ),
)
