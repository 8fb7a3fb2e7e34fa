"""What a peer gave, and what that cost."""

from __future__ import annotations

import msgspec
from test_observability_history import ANN, BOB, chronicle, commit, progress

from p2pdiloco.observability.history import account, closing
from p2pdiloco.observability.prometheus import expose
from p2pdiloco.observability.snapshot import LinkUse, RunSnapshot


def picture() -> RunSnapshot:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=100, bob=300))
    told.take(commit(2.0, 2, BOB, ann=100, bob=300))
    told.take(progress(2.0, 500_000))
    return msgspec.structs.replace(told.picture(3.0), link=LinkUse(up_bytes=34_500_000, down_bytes=1_000))


def test_the_closing_line_tells_share_time_bytes_and_cost() -> None:
    told = account(picture(), 1800.0, 0.4)
    assert (told.share, told.commits, told.tokens, told.cost, told.cost_per_million) == (0.25, 1, 500_000, 0.2, 0.4)
    assert closing(told) == (
        "this machine gave 500,000 tokens in 30 min 00 s: 1 shard version merged, 34.5 MB sent, "
        "1.0 kB received; 25.0 % of all tokens merged since it first joined are its own; cost 0.20, "
        "0.40 per million tokens"
    )


def test_without_a_price_there_is_no_cost_and_without_tokens_no_line() -> None:
    told = account(picture(), 1800.0, None)
    assert (told.cost, told.cost_per_million) == (None, None)
    assert "cost" not in closing(told)
    assert closing(account(chronicle(1).picture(3.0), 10.0, 0.4)) == ""
    assert account(chronicle(1).picture(3.0), 3600.0, 0.4).cost == 0.4


def test_what_it_cost_is_a_metric_where_there_is_a_price() -> None:
    seen = picture()
    priced = msgspec.structs.replace(seen, account=account(seen, 1800.0, 0.4))
    assert b"p2pdiloco_spent_total 0.2" in expose(priced)[0]
    assert b"spent_total" not in expose(seen)[0]
