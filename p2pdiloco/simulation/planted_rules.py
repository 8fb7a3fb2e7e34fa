"""Bugs of the protocol that seeds of honest peers cannot find, or find too rarely: each names the tests of its rule.

What seeds do find stands in ``mutants``.
"""

from __future__ import annotations

from p2pdiloco.simulation.planted_claims import BUGS as CLAIM_BUGS
from p2pdiloco.simulation.planted_meshes import BUGS as MESH_BUGS
from p2pdiloco.simulation.planter import Bug

_P = "p2pdiloco.protocol"
_TESTS = "tests/unit/protocol"


def _bug(name: str, module: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"{_P}.{module}", old, new, harm, (f"{_TESTS}/{killed_by}",))


BUGS = (
    *CLAIM_BUGS,
    *MESH_BUGS,
    _bug(
        "heartbeats do not slow down",
        "membership",
        "return self.interval_s * max(1.0, len(self.peers) / BEAT_PEERS)",
        "return self.interval_s",
        "what heartbeats cost a peer grows with the swarm",
        "test_timers.py::test_beyond_16_peers_it_beats_more_slowly",
    ),
    _bug(
        "a slow heartbeat taken for silence",
        "membership",
        "return own_s if self.beat is None else max(own_s, min(self.beat.interval_s, SLOWER * own_s))",
        "return own_s",
        "peers that know of more peers are lost again and again by those that know of few",
        "test_timers.py::test_who_beats_more_slowly_may_be_silent_for_longer",
    ),
    _bug(
        "any interval believed",
        "membership",
        "max(own_s, min(self.beat.interval_s, SLOWER * own_s))",
        "max(own_s, self.beat.interval_s)",
        "who is dead, or says nothing on purpose, stays live for as long as it likes",
        "test_timers.py::test_who_beats_more_slowly_may_be_silent_for_longer",
    ),
    _bug(
        "a connection that carries one way only stays",
        "presence",
        "if view.unheard >= DEAF_BEATS:",
        "if False:",
        "two peers that are there lose each other for as long as TCP lives, and what each owns is merged twice",
        "test_membership.py::test_who_is_heard_and_does_not_hear_is_hung_up_on",
    ),
    _bug(
        "one old echo ends a connection",
        "membership",
        "view.unheard = view.unheard + 1 if now",
        "view.unheard = 3 if now",
        "whoever goes on after a stop loses all its connections, and what waits on them",
        "test_membership.py::test_who_is_silent_or_goes_on_after_a_stop_is_not_hung_up_on",
    ),
    _bug(
        "a sibling of the head is waited for",
        "adoption",
        """            if shard in self.wanted and header.version <= chain.head.version:
                core.alarms.set(("want", shard), core.now)  # of a sibling fork: nothing that follows ours is on its way
""",
        "",
        "a fork is healed a patience later than it could be, and on slow lines after a deadline",
        "test_timers.py::test_a_heavier_sibling_of_the_head_is_asked_for_at_once",
    ),
    _bug(
        "who is asked while it applies answers from before",
        "log_requests",
        "if request.shard in self._applying:",
        "if False:",
        "who asked is led nowhere, and waits for a deadline",
        "test_adoption.py::test_who_is_asked_while_it_applies_answers_when_it_has",
    ),
    _bug(
        "who asked meanwhile is forgotten",
        "adoption",
        "        self.log_requests.answer(shard)\n        staged",
        "        staged",
        "it waits for a deadline",
        "test_adoption.py::test_who_is_asked_while_it_applies_answers_when_it_has",
    ),
    _bug(
        "a newcomer learns nothing from commits",
        "adoption",
        "                self.lineage.committed(sender, head, header.parent)\n",
        "",
        "among peers that were forks it waits long for a state by which they stand",
        "test_lineage.py::test_what_a_peer_commits_itself_tells_of_its_head",
    ),
    _bug(
        "who takes part is known too late",
        "machine",
        """        if core.alarms.pop_if_due(NEWS, core.now):
            self.presence.refresh("silent")  # who takes part is known before what they gave is judged
""",
        "",
        "a peer that stood still merges less than the quorum",
        "test_timers.py::test_what_heartbeats_changed_is_looked_at_before_what_happens_next",
    ),
    _bug(
        "a failed merge drops everybody",
        "merges",
        "if culprit is None or peer_of(x) == culprit]",
        "if True]",
        "one learner's bad values cost all others their turn",
        "test_merging.py::test_a_merge_that_fails_drops_whom_it_blames_and_merges_the_rest",
    ),
    _bug(
        "mark-life check removed",
        "carry",
        "own if is_forgotten else NO_MARK",
        "NO_MARK",
        "what a chain forgot for its age is taken back and merged again",
        "test_adoption.py::test_what_a_chain_forgot_for_its_age_stays_merged",
    ),
    _bug(
        "marks never forgotten",
        "carry",
        "own if is_forgotten else NO_MARK",
        "own",
        "what only the losing side of a fork had merged is never given again",
        "test_adoption.py::test_what_a_chain_forgot_for_its_age_stays_merged",
    ),
    _bug(
        "lighter of two waiting rivals kept",
        "adoption",
        "if other is None or (header.tokens, commit_id(header)) > (other.tokens, commit_id(other)):",
        "if other is None or (header.tokens, commit_id(header)) < (other.tokens, commit_id(other)):",
        "a detour over the lighter fork",
        "test_adoption.py::test_of_two_children_that_wait_the_heavier_is_kept",
    ),
    _bug(
        "owner that departs is not replaced",
        "contributions",
        "if p.target not in able]:",
        "if False]:",
        "a contribution waits for the takeover time of a peer that is gone",
        "test_ownership.py::test_if_its_target_is_lost_a_contribution_goes_to_the_new_rank_0_at_once",
    ),
    _bug(
        "who leaves merges beside the owners",
        "membership",
        "return not self.is_leaving or any(peer == self.me for peer, _ in self.candidates)",
        "return True",
        "a fork with everybody who leaves, and its line is full when it is in haste",
        "test_ownership.py::test_who_leaves_merges_nothing_while_others_may",
    ),
    _bug(
        "what was refused for good is offered again",
        "contributions",
        "if is_heavier(head, pending.contribution.base):",
        "if False:",
        "a slow line carries what nobody can merge",
        "test_ownership.py::test_what_an_owner_with_a_heavier_head_refused_is_not_offered_to_it_again",
    ),
    _bug(
        "who refused once is never asked again",
        "contributions",
        "pending.beyond &= able",
        "pass",
        "a contribution waits for ever for an owner that came back with an older state",
        "test_ownership.py::test_an_owner_that_refused_and_comes_back_is_offered_it_again",
    ),
    _bug(
        "second lap never begins",
        "contributions",
        "            pending.asked.clear()\n        pending.target",
        "            raise AssertionError\n        pending.target",
        "after every owner was asked once nobody is",
        "test_timers.py::test_takeover_is_longer_with_each_lap",
    ),
    _bug(
        "idle owners are waited for each time",
        "contributions",
        "self.core.membership.missed(pending.target, self.core.now, self.merges.takeover_s())",
        "pass",
        "owners that never merge stop the run",
        "test_plausibility.py::test_forty_heavy_owners_that_never_merge_do_not_stop_turns",
    ),
    _bug(
        "early contributions without a budget",
        "merges",
        "return waiting <= ",
        "return True or waiting <= ",
        "memory fills with what waits for heads that never come",
        "test_plausibility.py::test_what_waits_for_a_later_head_has_few_bytes",
    ),
    _bug(
        "waiting commits of all shards without a bound",
        "adoption",
        "elif sum(map(len, self.waiting.values())) >= self.core.config.waiting_most:",
        "elif False:",
        "memory fills with commits whose parents never come",
        "test_plausibility.py::test_commits_that_wait_are_bounded_over_all_shards",
    ),
    _bug(
        "who was asked in vain is asked again",
        "adoption",
        "if core.now < core.membership.peers[peer].vain_until:",
        "if False:",
        "heads that nobody delivers keep a peer from catching up",
        "test_plausibility.py::test_who_was_asked_in_vain_is_not_asked_again_at_once",
    ),
    _bug(
        "one late answer makes all wait",
        "membership",
        "slowest_s = min(slowest_s, interval_s + SLOW_TRIPS * trips[(len(trips) - 1) // 2])",
        "slowest_s = trips[-1]",
        "a peer that echoes late keeps all from taking over and from catching up",
        "test_plausibility.py::test_one_peer_that_answers_late_does_not_make_all_wait",
    ),
    _bug(
        "any state is installed",
        "chain",
        "if min(counts) < 0 or max(counts) > MAX_COUNT or mark.version > head.version:",
        "if False:",
        "a newcomer believes marks that no chain has",
        "test_plausibility.py::test_a_state_that_no_chain_has_is_not_taken",
    ),
    _bug(
        "own stalls are measured",
        "core",
        "self.stalled_s += seconds",
        "pass",
        "one stop poisons every deadline for a minute",
        "test_stalls.py::test_a_peer_that_stood_still_measures_nothing_and_loses_nobody",
    ),
    _bug(
        "what is echoed after a stall looks fresh",
        "membership",
        "            view.is_behind = True",
        "            view.is_behind = False",
        "one peer's stop poisons the others' round trips",
        "test_stalls.py::test_what_is_echoed_after_a_stall_tells_how_long_it_may_have_been_held",
    ),
    _bug(
        "a poisoned learner participates",
        "trouble",
        "not (self.poisoned or self.silent)",
        "not self.silent",
        "one learner whose loss is NaN stops a swarm with K = 2",
        "test_trouble.py::test_the_others_go_on_without_a_poisoned_learner",
    ),
    _bug(
        "a recovered learner stays out",
        "trouble",
        '            self.poisoned = ""\n            self._participate()\n',
        '            self.poisoned = ""\n',
        "one bad turn and a learner is never waited for again",
        "test_trouble.py::test_a_poisoned_learner_participates_again_when_something_can_be_encoded",
    ),
    _bug(
        "a learner that hangs participates",
        "trouble",
        "not (self.poisoned or self.silent)",
        "not self.poisoned",
        "one GPU that hangs stops a swarm with K = 2, and at a run's end costs others their progress",
        "test_trouble.py::test_a_learner_that_does_not_answer_does_not_participate",
    ),
    _bug(
        "a learner that answers again stays out",
        "trouble",
        '            self.silent = ""\n            self._participate()\n',
        '            self.silent = ""\n',
        "one long pause and a learner is never waited for again",
        "test_trouble.py::test_a_learner_that_answers_again_participates",
    ),
    _bug(
        "stuck in silence",
        "trouble",
        'core.note("warning", "stuck", self.stuck)',
        "pass",
        "nobody is told that nothing goes on",
        "test_trouble.py::test_without_versions_for_long_a_peer_says_that_it_is_stuck",
    ),
    _bug(
        "followers never hear of the end",
        "machine",
        "self.contributions.adopt_step(membership.furthest_step())",
        "pass",
        "who trains nothing stays for ever when the others have gone",
        "test_plausibility.py::test_a_follower_is_where_the_others_say_they_are",
    ),
)
