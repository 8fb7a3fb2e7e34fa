"""What a peer gave and what that cost its user. Pure."""

from __future__ import annotations

from p2pdiloco.watch.picture import Bill, Picture
from p2pdiloco.watch.words import duration, percent, volume

HOUR_S = 3600.0


def account(picture: Picture, lasts_s: float, price_per_hour: float | None) -> Bill:
    """Of the peer whose picture that is, after ``lasts_s`` of its node's life."""
    mine = next((row for row in picture.peers if row.is_me), None)
    tokens = picture.course.tokens_trained
    cost = None if price_per_hour is None else price_per_hour * lasts_s / HOUR_S
    return Bill(
        share=0.0 if mine is None else mine.share,
        commits=0 if mine is None else mine.commits,
        lasts_s=lasts_s,
        tokens=tokens,
        up_bytes=picture.link.up_bytes,
        down_bytes=picture.link.down_bytes,
        price_per_hour=price_per_hour,
        cost=cost,
        cost_per_million=cost / tokens * 1e6 if cost is not None and tokens else None,
    )


def closing(told: Bill | None) -> str:
    """For the user, at the end; empty for who has trained nothing."""
    if told is None or not told.tokens:
        return ""
    text = (
        f"this machine gave {told.tokens:,} tokens in {duration(told.lasts_s)}: {told.commits:,} versions merged, "
        f"{volume(told.up_bytes)} sent, {volume(told.down_bytes)} received; of what was merged since it first took "
        f"part {percent(told.share)} is its own"
    )
    if told.cost is not None and told.cost_per_million is not None:
        text += f"; it cost {told.cost:.2f}, {told.cost_per_million:.2f} for a million tokens"
    return text
