"""Bugs in what strangers meet first: who waits, whose turn it is, who is shut out, what others take over; and in how
much whoever was let in may ask for. As in ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_RECEPTION = "tests/unit/test_net_abuse_limits_reception.py"
_ANTEROOM = "tests/integration/test_anteroom.py"
_MEETING = "tests/integration/test_meeting.py"
_FELLOWSHIP = "tests/unit/test_swarm_membership_sync.py"
_WHEREABOUTS = "tests/integration/test_whereabouts.py"
_LISTENERS = "tests/unit/test_transport_sockets.py"

BUGS = (
    Bug(
        name="a flood goes first",
        module="p2pdiloco.net.abuse_limits",
        where="HandshakeQueue.next",
        old="min(waiting, key=lambda visitor: self._failures.count(waiting[visitor], now))",
        new="next(iter(waiting))",
        harm="while strangers flood a peer, no newcomer gets in",
        killed_by=(f"{_RECEPTION}::test_who_floods_from_many_machines_goes_behind_who_comes_for_the_first_time",),
    ),
    Bug(
        name="who is turned away comes again as often as it likes",
        module="p2pdiloco.transport.connection_setup",
        where="HandshakePool._count_failure",
        old="self._exclusion.failed(machine, loop.time())",
        new="False",
        harm="a flood from few machines takes a quarter of a processor",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="who was shut out once is out for ever",
        module="p2pdiloco.transport.connection_setup",
        where="HandshakePool._update_blocklist",
        old="None if ends is None else loop.call_at(ends, self._update_blocklist)",
        new="None",
        harm="who had a bad minute, or shares an address with who had, never connects again",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="what came to nothing is never forgotten",
        module="p2pdiloco.timing",
        where="DecayingCounter.count",
        old="count * math.exp2((at - now) / self._half_life_s)",
        new="count",
        harm="who is looked after by a program that connects once a minute is shut out in two hours",
        killed_by=(
            "tests/unit/test_net_abuse_limits_failures.py::test_a_machine_that_fails_once_a_minute_is_never_shut_out",
        ),
    ),
    Bug(
        name="a line's second half is not looked at",
        module="p2pdiloco.transport.connection_setup",
        where="filter_program",
        old="NETWORK_HEADER + IPV6_SENDER + 4",
        new="NETWORK_HEADER + IPV6_SENDER",
        harm="a flood over IPv6 is not shut out, or a neighbour is",
        killed_by=("tests/unit/test_transport_connection_setup.py::test_a_machine_is_an_address_or_a_line_of_them",),
    ),
    Bug(
        name="what others take costs nothing, whatever it is",
        module="p2pdiloco.transport.connection_setup",
        where="HandshakePool._hand_over",
        old="if not await taker(pending.raw):\n    self._count_failure(pending)",
        new="await taker(pending.raw)\nif False:\n    self._count_failure(pending)",
        harm="a flood that begins as the directory does is never shut out",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="a line that shows no ticket was worth it",
        module="p2pdiloco.nat.rendezvous_server",
        where="RendezvousServer.serve_line",
        old="is_good = self.introducer.handle_opened(key, ticket, host, port, local_port, loop.time())",
        new="is_good = True\nself.introducer.handle_opened(key, ticket, host, port, local_port, loop.time())",
        harm="a flood of lines is never shut out",
        killed_by=(f"{_MEETING}::test_a_line_that_says_nothing_is_hung_up_on",),
    ),
    Bug(
        name="silent lines keep their places",
        module="p2pdiloco.nat.rendezvous_server",
        where="RendezvousServer.serve_line",
        old="sockets.hang_up(out.raw)",
        new="pass",
        harm="sockets that say nothing grow without a bound at a meeting point",
        killed_by=(f"{_MEETING}::test_lines_that_show_no_ticket_make_room_for_each_other",),
    ),
    Bug(
        name="any end of a connection to the directory was worth it",
        module="p2pdiloco.discovery.port_multiplexer",
        where="SharedPort.carry",
        old="carried[1] >= ANSWERED_BYTES",
        new="True",
        harm="a flood of connections to the directory is never shut out",
        killed_by=(f"{_LISTENERS}::test_what_begins_as_the_directory_does_is_handed_to_it",),
    ),
    Bug(
        name="where a liar sends us we knock as often as it likes",
        module="p2pdiloco.nat.rendezvous_client",
        where="RendezvousClient._meet.may_dial",
        old="self._dialler.may_dial(peer, other)",
        new="True",
        harm="a meeting point has everybody who attends it flood a third machine, which then shuts them out",
        killed_by=(f"{_MEETING}::test_who_is_called_knocks_few_times_where_a_liar_says_that_others_are",),
    ),
    Bug(
        name="a point is wherever it says it is",
        module="p2pdiloco.nat.rendezvous_client",
        where="RendezvousClient._meet",
        old="not self._dialler.may_dial(point, place)",
        new="False",
        harm="a meeting point has lines opened at a third machine, which then shuts out those who opened them",
        killed_by=(f"{_MEETING}::test_a_point_that_says_it_is_elsewhere_has_few_lines_opened_there",),
    ),
    Bug(
        name="a name is a machine of its own",
        module="p2pdiloco.transport.dialer",
        where="Dialler.dial",
        old="await machines(place, timeout_s)",
        new="(place,)",
        harm="records that name one machine in a thousand ways have everybody dial it a thousand times a minute",
        killed_by=("tests/unit/test_swarm_connect.py::test_however_many_names_a_machine_has_it_is_one",),
    ),
    Bug(
        name="a name may end in a line break",
        module="p2pdiloco.protocol.manifest",
        where="",
        old=(
            "Name = Annotated[str, Meta(min_length=1, max_length=64, "
            "pattern='^(?!\\\\.{1,2}\\\\Z)[A-Za-z0-9._-]+\\\\Z')]"
        ),
        new=(
            "Name = Annotated[str, Meta(min_length=1, max_length=64, pattern='^(?!\\\\.{1,2}\\\\Z)[A-Za-z0-9._-]+$')]"
        ),
        harm="two runs are shown with the same name, and a line of a log may be a stranger's",
        killed_by=(
            "tests/unit/test_protocol_manifest_validation.py::test_what_is_impossible_or_too_much_is_refused_at_once",
        ),
    ),
    Bug(
        name="a run may be called as the folder above is",
        module="p2pdiloco.protocol.manifest",
        where="",
        old=(
            "Name = Annotated[str, Meta(min_length=1, max_length=64, "
            "pattern='^(?!\\\\.{1,2}\\\\Z)[A-Za-z0-9._-]+\\\\Z')]"
        ),
        new="Name = Annotated[str, Meta(min_length=1, max_length=64, pattern='^[A-Za-z0-9._-]+\\\\Z')]",
        harm="a script's state, or an export by somebody else's manifest, lies in the folder above",
        killed_by=(
            "tests/unit/test_protocol_manifest_validation.py::test_what_is_impossible_or_too_much_is_refused_at_once",
        ),
    ),
    Bug(
        name="signatures are looked at that bring nobody",
        module="p2pdiloco.swarm.membership_sync",
        where="MembershipSync._may_tell",
        old="self._vain.take(came_with, self._now_s())",
        new="True",
        harm="one member with a thin line takes everybody's processor with chains of its own",
        killed_by=(f"{_FELLOWSHIP}::test_who_tells_what_brings_nobody_new_is_soon_not_looked_at",),
    ),
    Bug(
        name="one meeting point's word is enough",
        module="p2pdiloco.swarm.reachability",
        where="Reachability._is_port_dialable",
        old="2 * sum(answers) >= len(answers)",
        new="any(answers)",
        harm="a stranger's meeting point says that a home can be dialled, and invites name it",
        killed_by=(f"{_WHEREABOUTS}::test_one_meeting_point_of_three_cannot_say_that_a_home_can_be_dialled",),
    ),
)
