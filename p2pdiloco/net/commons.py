"""What all connections of one endpoint share."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from p2pdiloco.net.agenda import Agenda
from p2pdiloco.net.credit import Granter
from p2pdiloco.net.grants import Grants
from p2pdiloco.net.handshake import Greeter
from p2pdiloco.net.limits import ConnectionLimits, TransportLimits
from p2pdiloco.net.scores import Scores
from p2pdiloco.net.shaper import Shaper
from p2pdiloco.wire.buffer_pool import Blocks

if TYPE_CHECKING:
    from p2pdiloco.net.connection import Connection


class Due(Enum):
    """What a deadline is for."""

    LIFE = "life"
    QUESTION = "question"
    ASKING = "asking"
    LOOK = "look"


class Commons(Struct, frozen=True):
    limits: ConnectionLimits
    agenda: Agenda
    blocks: Blocks
    shaper: Shaper[Connection]
    grants: Grants
    greeter: Greeter
    scores: Scores

    @classmethod
    def of(cls, greeter: Greeter, limits: TransportLimits) -> Self:
        """Of a new endpoint."""
        granter = Granter(
            window_bytes=limits.connection.window_bytes,
            total_bytes=limits.window_bytes,
            bytes_per_s=limits.down_bytes_per_s,
        )
        return cls(
            limits=limits.connection,
            agenda=Agenda(),
            blocks=Blocks(limit_bytes=limits.reused_bytes),
            shaper=Shaper(None if limits.up_bytes_per_s == "auto" else limits.up_bytes_per_s),
            grants=Grants(granter),
            greeter=greeter,
            scores=Scores(),
        )
