"""Which dials may be made on others' word: whoever publishes an address has every reader dial it, so nobody's records
may buy many.

Rules of this file:
1. A machine at which dials come to nothing is dialled A_MINUTE times in one; all machines together ALL_A_MINUTE times.
   What is under way counts as in vain until somebody has proved himself there.
2. Where a peer has proved itself, it is dialled as often as its caller likes: it is no victim of somebody's records.
3. Times in, answers out; bounded whatever is published.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from p2pdiloco.net.admission import machine_of
from p2pdiloco.protocol.ids import PeerId

A_MINUTE = 32
ALL_A_MINUTE = 1024
MINUTE_S = 60.0
KNOWN_PLACES = 4096


class Dials:
    """See the module's rules. A place is a host and its port."""

    def __init__(self) -> None:
        self._vain: deque[tuple[float, str]] = deque()
        """Begun when, at which machine; oldest first."""
        self._of_machine: Counter[str] = Counter()
        self._proved: OrderedDict[tuple[PeerId, str, int], None] = OrderedDict()

    def begin(self, peer: PeerId, host: str, port: int, now: float) -> bool:
        """Whether ``peer`` may be dialled there."""
        while self._vain and self._vain[0][0] <= now - MINUTE_S:
            self._forget(self._vain.popleft()[1])
        machine = machine_of(host)
        if (peer, host, port) in self._proved:
            return True
        if self._of_machine[machine] >= A_MINUTE or len(self._vain) >= ALL_A_MINUTE:
            return False
        self._vain.append((now, machine))
        self._of_machine[machine] += 1
        return True

    def proved(self, peer: PeerId, host: str, port: int) -> None:
        """It is there: the dial was not in vain."""
        place = (peer, host, port)
        if place not in self._proved:
            machine = machine_of(host)
            mine = next((one for one in reversed(self._vain) if one[1] == machine), None)
            if mine is not None:
                self._vain.remove(mine)
                self._forget(machine)
        self._proved[place] = None
        self._proved.move_to_end(place)
        if len(self._proved) > KNOWN_PLACES:
            self._proved.popitem(last=False)

    def _forget(self, machine: str) -> None:
        self._of_machine[machine] -= 1
        if not self._of_machine[machine]:
            del self._of_machine[machine]
