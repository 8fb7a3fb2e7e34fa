"""Which connection serves which peer.

Rules of this file:
1. One connection per pair of peers serves. A direct one takes the place of a relayed one; if both dial at once, the one
   dialled by the smaller peer id stays. The other finishes what it has begun. A peer that was started anew
   (``Hello.life``) replaces its old connection, and its old life does not come back while the new one is here
   (net/lives.py).
2. What is heard of a peer is of the life that serves: another life's connections end when this one's comes, and one
   that is turned away is not listened to. (Heartbeats of two processes in turns would make both look dead.)
3. Connected and Disconnected are told in turns for each peer, whatever happens to connections below.
4. Places are bounded; who takes one when all are taken is net/admission.py's.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.net.admission import displaced, machine_of
from p2pdiloco.net.commons import Commons
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.events import Connected, Disconnected, TwinRefused
from p2pdiloco.net.frames import Parting
from p2pdiloco.net.lane_keeper import bind
from p2pdiloco.net.lives import PastLives
from p2pdiloco.protocol.ids import PeerId

LEAVING = "the peer is leaving"
TWIN = "another process with this identity is connected: a copy of the state folder?"


class Peers:
    """See the module's rules. ``places``: peers at once. ``connections``: all that there are, as they come and go."""

    def __init__(self, commons: Commons, places: int, connections: Iterable[Connection]) -> None:
        self.serving: dict[PeerId, Connection] = {}
        self.is_leaving = False
        self._past = PastLives()
        self._commons = commons
        self._places = places
        self._connections = connections

    def proved(self, connection: Connection) -> bool:
        """A connection is there. Whether it serves now."""
        peer, old = connection.peer, self.serving.get(connection.peer)
        if self.is_leaving:
            connection.turn_away(Parting.LEAVING, LEAVING)
        elif self._commons.scores.is_shut_out(peer, self._commons.agenda.now):
            connection.turn_away(Parting.BROKEN, "you sent too much that could not be read; try again in a minute")
        elif connection.greeting.lane:
            bind(connection, [old] if old is not None else [])
        elif old is None:
            return self._install(connection)
        elif _life_of(old) != _life_of(connection):
            if not (old.is_open and self._past.has(peer, _life_of(connection))):
                self._past.end(peer, _life_of(old))
                return self._replace(old, connection)
            if self._past.is_news(peer):
                self._commons.agenda.tell(TwinRefused(connection, old))
            connection.turn_away(Parting.LEAVING, TWIN)
        elif not old.is_open:
            return self._replace(old, connection)
        elif self._rank(connection) > self._rank(old):
            self.serving[peer] = connection
            old.retire()
            return True
        else:
            connection.retire()
        return False

    def _replace(self, old: Connection, connection: Connection) -> bool:
        reason = "the peer came back with a new connection"
        self.gone(old, reason)
        old.abort(reason)
        return self._install(connection)

    def gone(self, connection: Connection, reason: str) -> None:
        """A connection serves no longer."""
        if connection.is_proved and self.serving.get(connection.peer) is connection:
            del self.serving[connection.peer]
            self._commons.agenda.tell(Disconnected(connection, reason))

    def _install(self, connection: Connection) -> bool:
        if len(self.serving) >= self._places:
            places = {other: (machine_of(other.host), other.heard_at) for other in self.serving.values()}
            out = displaced(places, machine_of(connection.host))
            if out is None:
                connection.turn_away(Parting.LEAVING, f"{len(self.serving)} peers are connected already")
                return False
            reason = "it made room: too many peers of its address are connected"
            self.gone(out, reason)
            out.part(Parting.LEAVING, reason)
        for other in [c for c in self._connections if c.is_open and c.peer == connection.peer]:
            if _life_of(other) != _life_of(connection):
                other.abort("another life of the peer is here")
        self.serving[connection.peer] = connection
        self._commons.agenda.tell(Connected(connection))
        return True

    def _rank(self, connection: Connection) -> tuple[bool, bool, int]:
        """Both ends compute the same: direct wins; then dialled by the smaller id; of one dialler's the latest."""
        greeting = connection.greeting
        return (
            not greeting.is_relayed,
            greeting.peer == min(self._commons.greeter.peer, connection.peer),
            greeting.attempt,
        )


def _life_of(connection: Connection) -> bytes:
    assert connection.remote is not None
    return connection.remote.life
