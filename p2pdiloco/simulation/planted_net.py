"""Bugs of connections and of who is found: net/ and the directory's roster."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_PEERS = "p2pdiloco.net.peers"
_ENDPOINTS = "tests/property/test_net_endpoint.py"

BUGS = (
    Bug(
        name="frames that fill the staging buffer leave no room",
        module="p2pdiloco.net.inbox",
        old="        if self._position == self._end:\n            self._position = self._end = 0",
        new="        if False:\n            pass",
        harm="uvloop reads no more of a connection whose frames once ended where the buffer ends, and says nothing",
        killed_by=("tests/unit/test_net_boxes.py::test_there_is_always_room_to_read_into",),
    ),
    Bug(
        name="who is turned away is heard",
        module="p2pdiloco.net.connection",
        old='"""It never served, and will not: say why, and listen no longer."""\n        self._deafen()\n',
        new="",
        harm="heartbeats of a twin that is refused make the standing one look dead, every time it tries",
        killed_by=(f"{_ENDPOINTS}::test_what_comes_with_a_proof_that_is_turned_away_is_not_heard",),
    ),
    Bug(
        name="connections of a life that gave way go on",
        module=_PEERS,
        old="            if _life_of(other) != _life_of(connection):\n",
        new="            if False:\n",
        harm="two processes with one identity are heard in turns, and neither is live",
        killed_by=(f"{_ENDPOINTS}::test_of_two_processes_with_one_identity_only_the_one_that_serves_is_heard",),
    ),
    Bug(
        name="a life that gave way takes the place again",
        module=_PEERS,
        old="if not (old.is_open and self._past.has(peer, _life_of(connection))):",
        new="if True:",
        harm="two processes with one identity replace each other for ever",
        killed_by=(f"{_ENDPOINTS}::test_what_comes_with_a_proof_that_is_turned_away_is_not_heard",),
    ),
    Bug(
        name="a record that is not ours stays in our place",
        module="p2pdiloco.node.roster",
        old="                self._announced_at = now - ANNOUNCE_S\n",
        new="",
        harm="of two processes that start at once the later one always overwrites what it should see, and stays",
        killed_by=("tests/unit/test_node_roster.py::test_two_that_started_at_once_see_each_other",),
    ),
)
