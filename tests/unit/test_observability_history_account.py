"""What a peer gave."""

from __future__ import annotations

import msgspec
from test_observability_history import ANN, BOB, chronicle, commit, progress

from p2pdiloco.observability.history import account, closing
from p2pdiloco.observability.snapshot import LinkUse, RunSnapshot


def picture() -> RunSnapshot:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=100, bob=300))
    told.take(commit(2.0, 2, BOB, ann=100, bob=300))
    told.take(progress(2.0, 500_000))
    return msgspec.structs.replace(told.picture(3.0), link=LinkUse(up_bytes=34_500_000, down_bytes=1_000))


def test_the_closing_line_tells_share_time_and_bytes() -> None:
    told = account(picture(), 1800.0)
    assert (told.share, told.commits, told.tokens) == (0.25, 1, 500_000)
    assert closing(told) == (
        "this machine gave 500,000 tokens in 30 min 00 s: 1 shard version merged, 34.5 MB sent, "
        "1.0 kB received; 25.0 % of all tokens merged since it first joined are its own"
    )


def test_without_tokens_there_is_no_line() -> None:
    assert closing(account(chronicle(1).picture(3.0), 10.0)) == ""
