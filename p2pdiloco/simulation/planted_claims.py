"""Bugs of what the others may claim: steps, tokens, blocks, records, signatures and what led to a state.

Each names the tests of its rule.
"""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol"


def _bug(name: str, module: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", old, new, harm, (f"{_TESTS}/{killed_by}",))


BUGS = (
    _bug(
        "steps claimed are believed",
        "core",
        "return step if step <= allowed else",
        "return step if True else",
        "one message ends a run",
        "test_plausibility.py::test_a_claim_moves_the_step_by_two_turns_at_most",
    ),
    _bug(
        "allowance for claims grows with patience",
        "pace",
        "min(filled, self._burst)",
        "filled",
        "after a calm hour one message ends a run",
        "test_plausibility.py::test_a_claim_counts_for_eight_times_the_median_learners_steps_meanwhile",
    ),
    _bug(
        "claims do not use up the allowance",
        "pace",
        "self._held = max(0.0, self._held - steps)",
        "self._held = max(0.0, self._held)",
        "claims that are repeated take the step anywhere",
        "test_plausibility.py::test_a_claim_moves_the_step_by_two_turns_at_most",
    ),
    _bug(
        "the furthest claim counts as the majority's",
        "membership",
        "return steps[(len(steps) - 1) // 2]",
        "return steps[-1]",
        "one heartbeat ends a run",
        "test_plausibility.py::test_what_more_than_half_of_all_say_is_believed",
    ),
    _bug(
        "a commit of any step is taken",
        "chain",
        "if header.step > self.latest_step():",
        "if False:",
        "one commit takes a shard to the end of the run",
        "test_plausibility.py::test_a_commit_is_of_no_step_far_beyond_its_parents",
    ),
    _bug(
        "an owner names a step that nobody takes",
        "merges",
        "step=min(collection.step, core.chains[event.shard].latest_step())",
        "step=collection.step",
        "after a long standstill a shard never moves again",
        "test_plausibility.py::test_an_owner_keeps_to_the_step_that_others_take",
    ),
    _bug(
        "any number of tokens is merged",
        "limits",
        "if tokens > self.most_tokens(steps):",
        "if False:",
        "one contribution outweighs all others and overflows the count",
        "test_plausibility.py::test_a_contribution_that_no_learner_can_make_is_refused",
    ),
    _bug(
        "blocks are trained that were not",
        "limits",
        "if blocks > self.most_blocks(tokens):",
        "if False:",
        "an epoch is over that nobody trained",
        "test_plausibility.py::test_a_commit_that_holds_what_no_learner_can_make_is_not_taken",
    ),
    _bug(
        "a full chain counts on",
        "chain",
        "self.head.tokens > self._most_tokens:",
        "False:",
        "a commit that no message can hold",
        "test_plausibility.py::test_no_chain_counts_beyond_what_a_message_can_hold",
    ),
    _bug(
        "a learner is spoken for",
        "carry",
        "if to_tokens <= max(learner.marks[shard].tokens, self.contributions.ledgers[shard].last):",
        "if True:",
        "a forged state costs a learner its progress",
        "test_plausibility.py::test_a_state_that_holds_what_a_learner_never_gave_is_not_taken_by_its_peer",
    ),
    _bug(
        "many learners of a peer",
        "chain",
        "if c.learner <= previous or giver in givers:",
        "if c.learner <= previous:",
        "one peer fills a commit with learners of its own, and outweighs everybody",
        "test_signatures.py::test_a_commit_names_one_learner_of_a_peer",
    ),
    _bug(
        "any record is taken",
        "chain",
        "if header.record != self.record_after(header.version, header.contributors):",
        "if False:",
        "an owner signs for counts that the chain does not have, and newcomers believe them",
        "test_signatures.py::test_a_commit_is_signed_for_what_the_chain_counts_with_it",
    ),
    _bug(
        "a newcomer believes the first",
        "lineage",
        "if 2 * stand <= len(donors) and not self._is_divided(shard, stand, theirs, donors):",
        "if not stand:",
        "whoever answers first gives a newcomer its model",
        "test_lineage.py::test_a_newcomer_takes_what_more_than_half_stand_by",
    ),
    _bug(
        "a newcomer does not wait for others' words",
        "lineage",
        "return 2 * sum(shard in self._told.get(peer, ()) for peer in donors) > len(donors)",
        "return True",
        "a newcomer asks for states that it may not take",
        "test_lineage.py::test_a_newcomer_fetches_nothing_before_more_than_half_have_told_of_their_heads",
    ),
    _bug(
        "the heaviest claim replaces the model",
        "lineage",
        "if 2 * stand > len(donors) + 1:",
        "if False:",
        "one peer replaces everybody's model with a chain that it made up",
        "test_lineage.py::test_a_state_that_leads_to_nothing_we_know_is_not_taken_while_more_than_half_stand_by_ours",
    ),
    _bug(
        "silence stands by nothing",
        "lineage",
        "if 2 * sum(self._is_fresh(donor, shard) for donor in donors) <= len(donors):",
        "if False:",
        "one peer replaces the models of those who have not heard of each other lately",
        "test_lineage.py::test_who_has_told_nothing_of_late_is_asked_before",
    ),
    _bug(
        "forks within the log need a majority",
        "lineage",
        "elif chain.head.id not in theirs and theirs.isdisjoint(chain.ancestry):",
        "elif True:",
        "a fork never heals while most are on its lighter side",
        "test_lineage.py::test_a_state_whose_lineage_meets_our_log_is_taken_if_it_is_heavier",
    ),
    _bug(
        "a restart forgets what led to its states",
        "lineage",
        "self._judged[head.shard] = Judged(head.id, tuple(lineage), None)",
        "pass",
        "a fork whose maker restarts is refused by the majority for good, and a quorum that needs all never comes",
        "test_lineage.py::test_what_led_to_a_state_outlives_a_restart",
    ),
    _bug(
        "a statement without its base",
        "signatures",
        "return _encoder.encode((_CONTRIBUTION, run, shard, base, given))",
        "return _encoder.encode((_CONTRIBUTION, run, shard, given))",
        "what was given once is merged on any head, with values that belong to another",
        "test_signatures.py::test_a_contribution_is_signed_for_its_run_its_shard_and_its_base",
    ),
    _bug(
        "a statement without its tokens",
        "signatures",
        "given = (c.learner, c.tokens_from, c.tokens_to, c.steps_from",
        "given = (c.learner, c.tokens_from, c.steps_from",
        "an owner makes heavy what its friends gave",
        "test_signatures.py::test_a_contribution_is_signed_for_all_that_it_says",
    ),
    _bug(
        "weights without a cap",
        "membership",
        "return tuple((peer, min(weight, most)) for peer, weight in willing)",
        "return tuple(willing)",
        "who asks for all ownership gets it",
        "test_plausibility.py::test_a_weight_counts_for_at_most_twice_the_median",
    ),
)
