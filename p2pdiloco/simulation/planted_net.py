"""Bugs of connections and of who is found: net/ and the directory's roster."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_PEERS = "p2pdiloco.net.peers"
_ENDPOINTS = "tests/property/test_net_endpoint.py"
_POINTS = "tests/unit/test_net_introducer.py"
_MEETING = "tests/integration/test_meeting.py"
_ROSTER = "tests/unit/test_node_roster.py"

_CURIOSITY = "p2pdiloco.node.curiosity"
_LOOKS = "tests/unit/test_node_curiosity.py"

BUGS = (
    Bug(
        name="the goodbye stays behind the last payload",
        module="p2pdiloco.net.endpoint",
        old="if not connection.conversation.outbox.has_bulk:",
        new="if connection.conversation.outbox.is_empty:",
        harm="who leaves after a payload waits for five seconds, and is taken for dead",
        killed_by=(f"{_ENDPOINTS}::test_who_leaves_says_so_as_soon_as_its_last_payload_is_out",),
    ),
    Bug(
        name="who is alone waits for its next look",
        module=_CURIOSITY,
        old="if self._look_at is None or not connected:",
        new="if self._look_at is None:",
        harm="a peer whose swarm comes back is alone for five minutes more",
        killed_by=(f"{_LOOKS}::test_who_is_alone_looks_each_time",),
    ),
    Bug(
        name="whom others hear is nobody's business",
        module=_CURIOSITY,
        old="if came or unmet - self._unmet:",
        new="if came:",
        harm="two peers that did not find each other at first go on without each other",
        killed_by=(f"{_LOOKS}::test_whom_others_hear_and_we_do_not_is_looked_for",),
    ),
    Bug(
        name="who cannot be met is looked for for ever",
        module=_CURIOSITY,
        old="if came or unmet - self._unmet:",
        new="if came or unmet:",
        harm="where some pairs cannot connect all read the directory every two seconds",
        killed_by=(f"{_LOOKS}::test_whom_others_hear_and_we_do_not_is_looked_for",),
    ),
    Bug(
        name="a lost meeting point is not looked for",
        module=_CURIOSITY,
        old="if self._attended.difference(attended):",
        new="if not self._pause:",
        harm="a peer behind a router cannot be met for five minutes",
        killed_by=(f"{_LOOKS}::test_meeting_points_are_looked_for_where_none_is_attended_or_one_is_lost",),
    ),
    Bug(
        name="a silent node of the directory is pinged as seldom as others",
        module="p2pdiloco.runtime.pings",
        old="        if is_answered != known.has_answered:",
        new="        if not known:",
        harm="a directory that was cut stays so for minutes",
        killed_by=(f"{_LOOKS}::test_who_answers_is_pinged_ever_more_seldom_and_who_does_not_any_more_at_once",),
    ),
    Bug(
        name="a router's answer to somebody else is taken",
        module="p2pdiloco.wire.mappings",
        old="if (told, protocol, inner) != (nonce, TCP, port):",
        new="if (protocol, inner) != (TCP, port):",
        harm="whoever is in the same network names the port that a peer publishes",
        killed_by=("tests/unit/test_wire_mappings.py::test_an_answer_to_somebody_else_is_none",),
    ),
    Bug(
        name="a relayed connection is as good as a direct one",
        module=_PEERS,
        old="            not greeting.is_relayed,\n",
        new="            True,\n",
        harm="a pair whose larger id finds a direct way goes on over the relay",
        killed_by=(f"{_ENDPOINTS}::test_a_direct_connection_takes_the_place_of_a_relayed_one_whoever_dialled_it",),
    ),
    Bug(
        name="a ticket opens as many lines as one likes",
        module="p2pdiloco.net.introducer",
        old="self._waiting.pop(ticket, None)",
        new="self._waiting.get(ticket)",
        harm="who has seen a ticket takes the place of whom it was given to",
        killed_by=(f"{_POINTS}::test_a_ticket_serves_once_and_not_for_ever",),
    ),
    Bug(
        name="who is called is called without end",
        module="p2pdiloco.net.introducer",
        old=" or self._lately[to] >= CALLED_A_MINUTE",
        new="",
        harm="many strangers have one peer open lines and dial for ever",
        killed_by=(f"{_POINTS}::test_nobody_is_called_more_often_than_so_often_a_minute_by_however_many",),
    ),
    Bug(
        name="one who asks for the relay has it",
        module="p2pdiloco.net.introducer",
        old="        if all(pair.wants_relay):",
        new="        if True:",
        harm="a pair of which one connects directly is joined under its feet",
        killed_by=(f"{_POINTS}::test_who_cannot_be_reached_directly_is_relayed_when_both_say_so",),
    ),
    Bug(
        name="records buy as many dials as they like",
        module="p2pdiloco.net.dials",
        old="self._of_machine[machine] >= A_MINUTE or ",
        new="",
        harm="two hundred forged records have every peer of an open run flood a machine",
        killed_by=("tests/unit/test_node_ladder.py::test_two_hundred_forged_records_have_a_machine_dialled_few_times",),
    ),
    Bug(
        name="how we can be reached is told once",
        module="p2pdiloco.node.roster",
        old="if peer in self._known and self._told.get(peer) != (lives[peer], record)]",
        new="if peer in self._known and peer not in self._told]",
        harm="a relayed pair whose bootstrap dies waits for the directory to learn where it can meet",
        killed_by=(
            f"{_ROSTER}::test_who_is_connected_is_told_how_we_can_be_reached_and_again_when_that_changes",
            "tests/integration/test_whereabouts.py::test_a_relayed_pair_meets_at_a_member_when_the_bootstrap_dies"
            "_though_the_directory_says_nothing",
        ),
    ),
    Bug(
        name="the directory knows better than the peer itself",
        module="p2pdiloco.node.roster",
        old="            if not (peer in self._known and self._known[peer].is_first_hand):\n",
        new="            if True:\n",
        harm="what a peer has said of itself is replaced by an older record of it, until the next look",
        killed_by=(f"{_ROSTER}::test_what_a_connected_peer_says_of_itself_is_newer_than_the_directory",),
    ),
    Bug(
        name="a peer is asked for only where its record says",
        module="p2pdiloco.runtime.rendezvous",
        old="        for point in named + ours:\n",
        new="        for point in named:\n",
        harm="two that attend one meeting point do not meet until the directory tells one that the other does",
        killed_by=(f"{_MEETING}::test_who_is_at_a_point_that_we_attend_is_met_there_whatever_its_record_says",),
    ),
    Bug(
        name="whose record names no meeting point is not met",
        module="p2pdiloco.node.ladder",
        old="        if record.points or self._rendezvous.attended:\n",
        new="        if record.points:\n",
        harm="two homes that come at once meet for minutes nobody",
        killed_by=(
            "tests/unit/test_node_ladder.py::test_whose_meeting_points_are_not_known_is_asked_for_where_we_attend",
        ),
    ),
    Bug(
        name="who is asked by nobody how it is seen knows nothing any more",
        module="p2pdiloco.runtime.rendezvous",
        old="in (self.attended or self._left).values()]",
        new="in self.attended.values()]",
        harm="with the bootstrap each member that it dialled ceases to be a meeting point, and newcomers meet nobody",
        killed_by=(f"{_MEETING}::test_what_a_point_told_of_us_stands_when_it_is_gone",),
    ),
    Bug(
        name="a meeting point that was asked once stays connected",
        module="p2pdiloco.runtime.rendezvous",
        old='                    links.disconnect(point.peer, "that was all")\n',
        new="                    pass\n",
        harm="records that name ever new meeting points fill a peer's places",
        killed_by=(f"{_MEETING}::test_a_point_outside_the_run_that_a_record_names_costs_no_place",),
    ),
    Bug(
        name="a meeting point may name any address",
        module="p2pdiloco.runtime.lines",
        old="    return ip.is_global or not teller.is_global\n",
        new="    return True\n",
        harm="a liar on the internet has peers dial into each other's private networks",
        killed_by=(f"{_MEETING}::test_what_a_meeting_point_may_have_dialled",),
    ),
    Bug(
        name="a relay knows no budget",
        module="p2pdiloco.runtime.relay",
        old="                    await self._budget.take(count)\n",
        new="                    pass\n",
        harm="whoever offers to relay 50 Mbit/s gives all that it has",
        killed_by=(f"{_MEETING}::test_a_relay_keeps_to_its_budget_and_uses_it",),
    ),
    Bug(
        name="a punched way stays as narrow as it was",
        module="p2pdiloco.runtime.lines",
        old="    if is_narrow:\n        sockets.shorten(raw)\n    return raw\n",
        new="    return raw\n",
        harm="two homes whose tunnel loses long packets lose each connection after 20 s, for ever",
        killed_by=(f"{_MEETING}::test_a_punched_way_that_is_narrow_is_punched_anew_with_short_segments",),
    ),
    Bug(
        name="whoever calls is followed",
        module="p2pdiloco.runtime.rendezvous",
        old="or self._coming >= CALLS_AT_ONCE:",
        new="or self._coming < 0:",
        harm="a meeting point has its guests open lines without end",
        killed_by=(f"{_MEETING}::test_a_flood_of_calls_by_a_liar_opens_few_lines",),
    ),
    Bug(
        name="small pieces are for nothing",
        module="p2pdiloco.runtime.relay",
        old="        self._owe(count, now)\n        return True\n",
        new="        return True\n",
        harm="a pair that sends nothing but small pieces has more than the budget",
        killed_by=(
            "tests/unit/test_runtime_relay.py::test_what_is_small_goes_ahead_and_is_paid_for_until_too_much_is_owed",
        ),
    ),
    Bug(
        name="no way is found to be narrow",
        module="p2pdiloco.runtime.strangers",
        old="        self.narrow[connection.host] = None\n",
        new="",
        harm="where long packets vanish a peer connects, waits for 20 s, and connects again, for ever",
        killed_by=(
            "tests/integration/test_meeting.py::test_what_times_out_shortly_after_a_good_handshake_is_a_narrow_way",
        ),
    ),
    Bug(
        name="a private address of another home is dialled",
        module="p2pdiloco.node.ladder",
        old="    return 1 if ours.intersection(theirs) else None\n",
        new="    return 1\n",
        harm="who is in 192.168.1.0/24 dials machines of its own home for those of others",
        killed_by=(
            "tests/unit/test_node_ladder.py::test_a_private_address_is_dialled_by_who_may_share_its_network_and_loopback_last",
        ),
    ),
    Bug(
        name="a meeting waits for every dial to fail",
        module="p2pdiloco.node.ladder",
        old="delay_s = len(where) * STAGGER_S + MEETING_S if where else 0.0",
        new="delay_s = len(where) * DIAL_S if where else 0.0",
        harm="a home is met 8 s after each address that says nothing",
        killed_by=(
            "tests/unit/test_node_ladder.py::"
            "test_where_no_address_answers_a_meeting_begins_soon_and_where_there_is_none_at_once",
        ),
    ),
    Bug(
        name="any port that answers is our own",
        module="p2pdiloco.runtime.meeting_point",
        old="return await loop.sock_recv(raw, intro.TICKET_BYTES) == intro.echo(token)",
        new="return bool(await loop.sock_recv(raw, intro.TICKET_BYTES))",
        harm="a peer behind a router with another's forwarded port believes that it can be dialled",
        killed_by=(f"{_MEETING}::test_who_attends_learns_whether_it_can_be_dialled",),
    ),
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
        name="what the directory did not take counts as told",
        module="p2pdiloco.node.roster",
        old="            await self._directory.publish_peer(",
        new='            self._announced = msgspec.structs.replace(told, chain=b"")\n'
        "            await self._directory.publish_peer(",
        harm="two peers that come at once behind routers do not learn for minutes where the other can be met",
        killed_by=("tests/unit/test_node_roster.py::test_news_that_the_directory_did_not_take_is_told_again_soon",),
    ),
    Bug(
        name="a record that is not ours stays in our place",
        module="p2pdiloco.node.roster",
        old="                self._announced_at = now - ANNOUNCE_MOST_S\n",
        new="",
        harm="of two processes that start at once the later one always overwrites what it should see, and stays",
        killed_by=("tests/unit/test_node_roster.py::test_two_that_started_at_once_see_each_other",),
    ),
)
