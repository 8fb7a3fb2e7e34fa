"""What travels with a commit."""

import pytest

from p2pdiloco.wire.bodies import SIGNATURE_BYTES, CommitParts, join_commit, split_commit


def test_parts_of_a_commit_come_apart_again() -> None:
    parts = CommitParts(b"s" * SIGNATURE_BYTES, b"d" * 40, b"gradient")
    assert split_commit(memoryview(join_commit(parts)), 40) == parts


def test_a_commit_without_all_its_digests_is_refused() -> None:
    whole = join_commit(CommitParts(b"s" * SIGNATURE_BYTES, b"d" * 40, b""))
    assert split_commit(memoryview(whole), 40).gradient == b""
    with pytest.raises(ValueError, match="103 bytes"):
        split_commit(memoryview(whole[:-1]), 40)
