"""Bugs of what an owner may put into a commit, and of commits that nobody takes. Each names the tests of its rule."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_TESTS = "tests/unit/protocol/test_values.py"


def _bug(name: str, module: str, where: str, old: str, new: str, harm: str, killed_by: str) -> Bug:
    return Bug(name, f"p2pdiloco.{module}", where, old, new, harm, (f"{_TESTS}::{killed_by}",))


BUGS = (
    Bug(
        name="a stored body may be of any size",
        module="p2pdiloco.codec.compression",
        where="_opened",
        old="is_stored and max(sizes, default=0) > max_bytes",
        new="False",
        harm="what is bounded elsewhere by its size is not",
        killed_by=("tests/property/test_compression.py::test_stored_bodies_are_no_larger_than_they_may_be",),
    ),
    Bug(
        name="what led to a state goes while it is installed",
        module="p2pdiloco.protocol.replication",
        where="Replication.commits",
        old="found.update((state.head.id, *self.acceptance.lineage_of(state.head)))",
        new="found.add(state.head.id)",
        harm="a checkpoint cannot show what its state comes from, and its fork meets nobody's",
        killed_by=("tests/unit/protocol/test_lineage.py::test_what_led_to_a_state_is_kept_while_it_is_on_its_way_in",),
    ),
    _bug(
        "a length that is no number fits",
        "protocol.chain",
        "Chain.problem",
        "not 0.0 <= header.length <= longest",
        "header.length < 0.0 or header.length > longest",
        "one owner makes the chain's mean no number",
        "test_a_merged_step_is_at_most_a_leap_longer_than_those_before",
    ),
    _bug(
        "a payload is not measured",
        "peer.model_state",
        "ModelState._check_commit",
        "length > header.length * ROUNDED_LENGTH",
        "False",
        "an owner declares a short step and sends values of 1e34",
        "test_a_commit_is_no_longer_than_it_declares_and_gives_what_was_signed",
    ),
    _bug(
        "the stride is not in the record",
        "protocol.chain",
        "Chain.successor",
        "record_of(marks, trained, norm_bound)",
        "record_of(marks, trained)",
        "a newcomer is told another mean than the others have, and refuses what they take",
        "test_the_mean_of_lengths_is_the_same_everywhere",
    ),
    _bug(
        "an owner does not shorten",
        "codec.merge",
        "encode",
        "length <= longest",
        "True",
        "an honest owner's long step is refused, and it with it",
        "test_an_owner_shortens_what_would_be_too_long",
    ),
    _bug(
        "what most go on from is refused for ever",
        "protocol.state_acceptance",
        "StateAcceptance.is_outvoted",
        "support.of + 1",
        "10 ** 9",
        "a peer with another arithmetic than the others is alone for good",
        "test_what_most_go_on_from_is_taken_in_the_end",
    ),
    _bug(
        "what follows a rejected commit unseen is unknown",
        "protocol.state_acceptance",
        "StateAcceptance.judge",
        "self._rejected.follow(lineage, head.id)",
        "pass",
        "a peer that barred an owner stays alone when the others went on from its commit",
        "test_what_followed_unseen_counts_as_what_most_go_on_from",
    ),
    _bug(
        "a state's distance is not looked at",
        "peer.model_state",
        "ModelState.install",
        "self.heads[shard] is not None and staged.distance(self.form, *here) > farthest * self._reach",
        "False",
        "a refused commit's values come back as a state, to whoever did not see it made",
        "test_a_state_that_is_too_far_away_is_not_taken",
    ),
    _bug(
        "a few places may be anything",
        "peer.model_state",
        "Staged.distance",
        "max(beyond, merge.norm(theirs[~is_near]) - ORDINARY * merge.norm(mine[is_near]))",
        "min(0.0, merge.norm(theirs[~is_near]) - ORDINARY * merge.norm(mine[is_near]))",
        "an owner signs another result for chunks that nobody looks at, and the others fetch 1e34 from it as a repair",
        "test_a_repair_brings_no_other_values",
    ),
    _bug(
        "a head whose repair was refused is refused itself",
        "protocol.replication",
        "Replication.reject",
        "if shard not in self.repairing:\n    self.refusals.remember(new_id)\n    ...",
        "self.refusals.remember(new_id)",
        "a peer is alone with an honest head, since a liar offered it a spoilt copy",
        "test_a_repair_brings_no_other_values",
    ),
    _bug(
        "states may be infinite",
        "peer.state_proof",
        "is_listed",
        "bytes.fromhex(digest_of(memoryview(data))) == listed and form.is_finite(memoryview(data))",
        "bytes.fromhex(digest_of(memoryview(data))) == listed",
        "a newcomer trains on what is no number",
        "test_a_state_that_is_not_finite_is_not_taken",
    ),
    Bug(
        name="whatever is not zero has a direction",
        module="p2pdiloco.codec.merge",
        where="_length",
        old="found if found >= SHORTEST else 0.0",
        new="found",
        harm="a liar gives one value of 1e-40, each merge fails, nobody is named, and what the others gave is dropped",
        killed_by=(
            "tests/unit/protocol/test_values.py::test_what_is_too_short_to_have_a_direction_spoils_nothing",
            "tests/property/test_merge.py::test_what_is_merged_of_finite_contributions_can_be_encoded",
        ),
    ),
    Bug(
        name="what cancels out is made as long as its parts by one factor",
        module="p2pdiloco.codec.merge",
        where="radial_directional",
        old="factor > LARGEST",
        new="math.isnan(factor)",
        harm="two liars that give a long vector and its opposite let each merge fail, and nobody is named",
        killed_by=(
            "tests/unit/protocol/test_values.py::test_what_is_too_short_to_have_a_direction_spoils_nothing",
            "tests/property/test_merge.py::test_what_is_merged_of_finite_contributions_can_be_encoded",
        ),
    ),
    Bug(
        name="contributions may be as long as what can be encoded",
        module="p2pdiloco.codec.merge",
        where="",
        old="MOST: Final = LARGEST / 2",
        new="MOST: Final = LARGEST",
        harm="ten liars give the longest vector that there is, and their sum is longer by its rounding",
        killed_by=("tests/unit/test_codec_merge.py::test_as_many_as_like_may_be_as_long_as_is_allowed",),
    ),
)
