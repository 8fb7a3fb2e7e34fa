"""What travels with a commit, and bodies that nobody can mean well."""

from collections.abc import Callable

import pytest

from p2pdiloco.net.frames import CONTROL_LIMIT
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Contributor, Equivocation
from p2pdiloco.wire.control_messages import (
    COMMIT_BYTES,
    SIGNATURE_BYTES,
    CommitParts,
    PeerStatus,
    decode_as,
    decode_message,
    decode_request,
    encode,
    join_commit,
    split_commit,
)


def test_parts_of_a_commit_come_apart_again() -> None:
    parts = CommitParts(b"s" * SIGNATURE_BYTES, b"d" * 40, b"gradient")
    assert split_commit(memoryview(join_commit(parts)), 40) == parts


def test_a_commit_without_all_its_digests_is_refused() -> None:
    whole = join_commit(CommitParts(b"s" * SIGNATURE_BYTES, b"d" * 40, b""))
    assert split_commit(memoryview(whole), 40).gradient == b""
    with pytest.raises(ValueError, match="103 bytes"):
        split_commit(memoryview(whole[:-1]), 40)


def test_two_of_the_largest_commits_fit_into_a_proof() -> None:
    """A longer proof could be sent to nobody, and each newcomer's connection ended in an error."""
    payload, signature = b"p" * DIGEST_BYTES, b"s" * SIGNATURE_BYTES

    def commit(contributors: int) -> Commit:
        given = tuple(
            Contributor(LearnerId(f"{'k' * 52}{i:05}/1"), 0, 2**40, 0, 2**30, (), payload, signature)
            for i in range(contributors)
        )
        known = Digest("ab" * DIGEST_BYTES)
        return Commit(CommitHeader(ShardId(0), 1, known, 4, PeerId("owner"), given, 2**50, known, known, known))

    most = COMMIT_BYTES // 200
    assert decode_message(encode(commit(most))) == commit(most)
    proof = Equivocation(commit(most).header, commit(most).header, signature, signature)
    assert len(encode(proof)) < CONTROL_LIMIT
    with pytest.raises(ValueError, match="the maximum is 491520"):
        decode_message(encode(commit(4000)))


DEEP = b"\x91" * 3000 + b"\xc0"
"""Lists in lists, deeper than Python's stack."""


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_message, b"\x92\xa6heads?" + DEEP),
        (decode_request, b"\x92\xa9manifest?" + DEEP),
        (lambda body: decode_as(body, PeerStatus), b"\x81\xa1x" + DEEP),
    ],
)
def test_what_is_nested_too_deep_is_malformed_and_no_defect(decode: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(ValueError, match="deep"):
        decode(body)
