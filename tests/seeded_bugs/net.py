"""Bugs of connections and of who is found: net/ and the directory's peer_manager."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_PEERS = "p2pdiloco.net.endpoint"
_ENDPOINTS = "tests/property/test_net_endpoint.py"
_POINTS = "tests/unit/test_nat_introducer.py"
_MEETING = "tests/integration/test_meeting.py"


BUGS = (
    Bug(
        name="a router's answer to somebody else is taken",
        module="p2pdiloco.nat.port_mapping_codec",
        where="decode_pcp",
        old="(told, protocol, inner) != (nonce, TCP, port)",
        new="(protocol, inner) != (TCP, port)",
        harm="whoever is in the same network names the port that a peer publishes",
        killed_by=("tests/unit/test_nat_port_mapping_codec.py::test_an_answer_to_somebody_else_is_none",),
    ),
    Bug(
        name="a ticket opens as many lines as one likes",
        module="p2pdiloco.nat.introducer",
        where="Introducer.handle_opened",
        old="self._waiting.pop(ticket, None)",
        new="self._waiting.get(ticket)",
        harm="who has seen a ticket takes the place of whom it was given to",
        killed_by=(f"{_POINTS}::test_a_ticket_serves_once_and_not_for_ever",),
    ),
    Bug(
        name="a meeting point that was asked once stays connected",
        module="p2pdiloco.nat.rendezvous_client",
        where="RendezvousClient._connect_to_point",
        old="links.disconnect(point.peer, 'no further requests')",
        new="pass",
        harm="records that name ever new meeting points fill a peer's places",
        killed_by=(f"{_MEETING}::test_a_point_outside_the_run_that_a_record_names_costs_no_place",),
    ),
    Bug(
        name="a meeting point may name any address",
        module="p2pdiloco.nat.hole_punching",
        where="is_dialable",
        old="ip.is_global or not teller.is_global",
        new="True",
        harm="a liar on the internet has peers dial into each other's private networks",
        killed_by=(f"{_MEETING}::test_what_a_meeting_point_may_have_dialled",),
    ),
    Bug(
        name="a relay knows no budget",
        module="p2pdiloco.nat.rendezvous_server",
        where="Relay._pump",
        old="await self.budget.take(count)",
        new="pass",
        harm="whoever offers to relay 50 Mbit/s gives all that it has",
        killed_by=(f"{_MEETING}::test_a_relay_keeps_to_its_budget_and_uses_it",),
    ),
    Bug(
        name="points are drawn without their room",
        module="p2pdiloco.swarm.reachability",
        where="drawn_points",
        old="1.0 + room",
        new="1.0",
        harm="relays behind slow lines are full while fast ones carry little",
        killed_by=("tests/integration/test_whereabouts.py::test_points_are_drawn_by_their_room",),
    ),
    Bug(
        name="a record changes with each pair",
        module="p2pdiloco.swarm.reachability",
        where="Reachability.keep",
        old="not self._told_room < 2 * self.server.room < 4 * self._told_room",
        new="True",
        harm="a peer announces itself anew every few seconds, and tells all that it is connected to",
        killed_by=("tests/integration/test_whereabouts.py::test_a_member_relays_what_its_line_leaves",),
    ),
    Bug(
        name="a peer keeps the points that it had first",
        module="p2pdiloco.swarm.reachability",
        where="Reachability.keep",
        old="self.client.leave(peer)",
        new="pass",
        harm="a peer is registered with ever more servers",
        killed_by=(
            "tests/integration/test_whereabouts.py::"
            "test_a_peer_moves_to_the_points_that_it_draws_and_stays_where_none_answers",
        ),
    ),
    Bug(
        name="a state is sent in one go",
        module="p2pdiloco.net.send_queue",
        where="SendQueue._next_chunk",
        old="not stream.bytes_left or stream.priority > URGENT",
        new="not stream.bytes_left",
        harm="commits wait for seconds while a newcomer gets a state over the same slow line",
        killed_by=("tests/unit/test_net_boxes.py::test_a_turn_ends_with_a_payload_or_a_slice_of_a_state",),
    ),
    Bug(
        name="payloads to several peers go side by side",
        module="p2pdiloco.net.traffic_shaping",
        where="FairScheduler.next",
        old="turn.served >= self._turn_ends",
        new="True",
        harm="no child of a commit's tree has it before all have: at 256 peers it takes half as long again",
        killed_by=("tests/unit/test_net_budget.py::test_payloads_to_several_peers_go_one_after_the_other",),
    ),
    Bug(
        name="whoever calls is followed",
        module="p2pdiloco.nat.rendezvous_client",
        where="RendezvousClient._answer_call",
        old="self._coming >= CALLS_AT_ONCE",
        new="self._coming < 0",
        harm="a meeting point has its guests open lines without end",
        killed_by=(f"{_MEETING}::test_a_flood_of_calls_by_a_liar_opens_few_lines",),
    ),
    Bug(
        name="a private address of another home is dialled",
        module="p2pdiloco.swarm.connect",
        where="_rank",
        old="1 if ours.intersection(theirs) else None",
        new="1",
        harm="who is in 192.168.1.0/24 dials machines of its own home for those of others",
        killed_by=(
            "tests/unit/test_swarm_connect.py::test_a_private_address_is_dialled_by_who_may_share_its_network_and_loopback_last",
        ),
    ),
    Bug(
        name="any port that answers is our own",
        module="p2pdiloco.nat.rendezvous_server",
        where="RendezvousServer._dial_back",
        old="await loop.sock_recv(raw, intro.TICKET_BYTES) == intro.echo(token)",
        new="bool(await loop.sock_recv(raw, intro.TICKET_BYTES))",
        harm="a peer behind a router with another's forwarded port believes that it can be dialled",
        killed_by=(f"{_MEETING}::test_who_attends_learns_whether_it_can_be_dialled",),
    ),
    Bug(
        name="payloads wait beyond the limit",
        module="p2pdiloco.net.send_queue",
        where="SendQueue.put_payload",
        old="payload_bytes > self._payload_limit or control_bytes > self._control_limit",
        new="control_bytes > self._control_limit",
        harm="payloads that wait take all memory",
        killed_by=("tests/unit/test_net_boxes.py::test_what_finds_no_room_replaces_nothing",),
    ),
    Bug(
        name="connections of a life that gave way go on",
        module=_PEERS,
        where="Peers._serve",
        old="_life_of(other) != _life_of(connection)",
        new="False",
        harm="two processes with one identity are heard in turns, and neither is live",
        killed_by=(f"{_ENDPOINTS}::test_of_two_processes_with_one_identity_only_the_one_that_serves_is_heard",),
    ),
    Bug(
        name="a life that gave way takes the place again",
        module=_PEERS,
        where="Peers.handle_proved",
        old="not (old.is_open and self._past.has_ended(peer, _life_of(connection)))",
        new="True",
        harm="two processes with one identity replace each other for ever",
        killed_by=(f"{_ENDPOINTS}::test_what_comes_with_a_proof_that_is_turned_away_is_not_heard",),
    ),
    Bug(
        name="who is turned away is heard",
        module="p2pdiloco.net.connection",
        where="Connection.turn_away",
        old="self._stop_listening()\nself.close(parting, reason)",
        new="self.close(parting, reason)",
        harm="heartbeats of a twin that is refused make the standing one look dead, every time it tries",
        killed_by=(f"{_ENDPOINTS}::test_what_comes_with_a_proof_that_is_turned_away_is_not_heard",),
    ),
)
