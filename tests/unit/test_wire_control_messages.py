"""What travels with a commit, and bodies that nobody can mean well."""

from collections.abc import Callable

import pytest

from p2pdiloco.wire.control_messages import (
    SIGNATURE_BYTES,
    CommitParts,
    PeerStatus,
    decode_as,
    decode_message,
    decode_request,
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
