"""Bugs in what strangers meet first: who waits, whose turn it is, who is shut out, what others take over; and in how
much whoever was let in may ask for. As in ``planted``."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_RECEPTION = "tests/unit/test_net_reception.py"
_ANTEROOM = "tests/integration/test_anteroom.py"
_MEETING = "tests/integration/test_meeting.py"
_RESPONDENT = "tests/unit/test_peer_respondent.py"
_FELLOWSHIP = "tests/unit/test_node_fellowship.py"
_LISTENERS = "tests/unit/test_runtime_listeners.py"

BUGS = (
    Bug(
        name="handshakes that fail have no budget",
        module="p2pdiloco.net.reception",
        old="        self._tokens -= 1.0\n",
        new="",
        harm="a flood of strangers' handshakes takes the processor from the training",
        killed_by=(f"{_RECEPTION}::test_who_comes_to_nothing_has_a_budget_and_who_proves_itself_costs_none",),
    ),
    Bug(
        name="a flood goes first",
        module="p2pdiloco.net.reception",
        old="first = min(waiting, key=lambda visitor: self._failures.of(waiting[visitor], now))",
        new="first = next(iter(waiting))",
        harm="while strangers flood a peer, no newcomer gets in",
        killed_by=(f"{_RECEPTION}::test_who_floods_from_many_machines_goes_behind_who_comes_for_the_first_time",),
    ),
    Bug(
        name="who is turned away comes again as often as it likes",
        module="p2pdiloco.runtime.anteroom",
        old="if self._exclusion.failed(machine, loop.time()):",
        new="if False:",
        harm="a flood from few machines takes a quarter of a processor",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="who was shut out once is out for ever",
        module="p2pdiloco.runtime.anteroom",
        old="self._sieving = None if ends is None else loop.call_at(ends, self._sieve)",
        new="self._sieving = None",
        harm="who had a bad minute, or shares an address with who had, never connects again",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="what came to nothing is never forgotten",
        module="p2pdiloco.net.failures",
        old="return failures * math.exp2((at - now) / FORGOTTEN_S)",
        new="return failures",
        harm="who is looked after by a program that connects once a minute is shut out in two hours",
        killed_by=("tests/unit/test_net_failures.py::test_failures_are_forgotten_in_time_and_are_no_growing_table",),
    ),
    Bug(
        name="a line's second half is not looked at",
        module="p2pdiloco.runtime.sieve",
        old="NETWORK_HEADER + IPV6_SENDER + 4),",
        new="NETWORK_HEADER + IPV6_SENDER),",
        harm="a flood over IPv6 is not shut out, or a neighbour is",
        killed_by=("tests/unit/test_runtime_sieve.py::test_a_machine_is_an_address_or_a_line_of_them",),
    ),
    Bug(
        name="who says nothing keeps its place",
        module="p2pdiloco.net.admission",
        old="            self.leave(out)\n",
        new="",
        harm="sockets that say nothing grow without a bound",
        killed_by=(
            "tests/unit/test_net_admission.py::test_in_a_room_somebody_always_goes_and_first_of_the_machine_that_would_hold_most",
        ),
    ),
    Bug(
        name="what others take costs nothing, whatever it is",
        module="p2pdiloco.runtime.anteroom",
        old="if not await taker(visitor.raw):",
        new="await taker(visitor.raw)\n        if False:",
        harm="a flood that begins as the directory does is never shut out",
        killed_by=(f"{_ANTEROOM}::test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while",),
    ),
    Bug(
        name="a line that shows no ticket was worth it",
        module="p2pdiloco.runtime.meeting_point",
        old="is_good = self.introducer.opened(",
        new="is_good = True\n            self.introducer.opened(",
        harm="a flood of lines is never shut out",
        killed_by=(f"{_MEETING}::test_a_line_that_says_nothing_is_hung_up_on",),
    ),
    Bug(
        name="silent lines keep their places",
        module="p2pdiloco.runtime.meeting_point",
        old="                sockets.hang_up(out.raw)",
        new="                pass",
        harm="sockets that say nothing grow without a bound at a meeting point",
        killed_by=(f"{_MEETING}::test_lines_that_show_no_ticket_make_room_for_each_other",),
    ),
    Bug(
        name="the directory's connections keep their places",
        module="p2pdiloco.runtime.shared_port",
        old="                    sockets.hang_up(out)",
        new="                    pass",
        harm="connections that say nothing grow without a bound at a bootstrap",
        killed_by=(f"{_LISTENERS}::test_of_the_directorys_connections_the_largest_holders_first_makes_room",),
    ),
    Bug(
        name="any end of a connection to the directory was worth it",
        module="p2pdiloco.runtime.shared_port",
        old="return answered_bytes >= ANSWERED_BYTES",
        new="return True",
        harm="a flood of connections to the directory is never shut out",
        killed_by=(f"{_LISTENERS}::test_what_begins_as_the_directory_does_is_handed_to_it",),
    ),
    Bug(
        name="where a liar sends us we knock as often as it likes",
        module="p2pdiloco.runtime.rendezvous",
        old="            return self._dialler.may_dial(peer, other)",
        new="            return True",
        harm="a meeting point has everybody who attends it flood a third machine, which then shuts them out",
        killed_by=(f"{_MEETING}::test_who_is_called_knocks_few_times_where_a_liar_says_that_others_are",),
    ),
    Bug(
        name="a point is wherever it says it is",
        module="p2pdiloco.runtime.rendezvous",
        old="        if not self._dialler.may_dial(point, place):",
        new="        if False:",
        harm="a meeting point has lines opened at a third machine, which then shuts out those who opened them",
        killed_by=(f"{_MEETING}::test_a_point_that_says_it_is_elsewhere_has_few_lines_opened_there",),
    ),
    Bug(
        name="a name is a machine of its own",
        module="p2pdiloco.runtime.dialler",
        old="        for machine in await machines(place, timeout_s):",
        new="        for machine in (place,):",
        harm="records that name one machine in a thousand ways have everybody dial it a thousand times a minute",
        killed_by=("tests/unit/test_node_ladder.py::test_however_many_names_a_machine_has_it_is_one",),
    ),
    Bug(
        name="states are offered without end",
        module="p2pdiloco.peer.respondent",
        old="if not self._offers.take(peer, self._driver.host.now()):",
        new="if False:",
        harm="whoever is connected fills the line with what overtakes contributions and counts in no budget",
        killed_by=(f"{_RESPONDENT}::test_states_are_offered_so_often_to_one_peer",),
    ),
    Bug(
        name="a name may end in a line break",
        module="p2pdiloco.protocol.manifest",
        old='Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\\Z")]',
        new='Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]',
        harm="two runs are shown with the same name, and a line of a log may be a stranger's",
        killed_by=("tests/unit/test_protocol_soundness.py::test_what_is_impossible_or_too_much_is_refused_at_once",),
    ),
    Bug(
        name="a manifest is given without end",
        module="p2pdiloco.peer.respondent",
        old="if not self._manifests.take(peer, self._driver.host.now()):",
        new="if False:",
        harm="a dozen bytes are answered with up to 4 MiB, as often as anybody asks",
        killed_by=(f"{_RESPONDENT}::test_a_manifest_is_given_seldom_to_one_peer",),
    ),
    Bug(
        name="members are told of members without end",
        module="p2pdiloco.node.fellowship",
        old="if not self._answers.take(peer, self._now_s()):",
        new="if False:",
        harm="a dozen bytes are answered with 128 KiB, as often as a member asks",
        killed_by=(f"{_FELLOWSHIP}::test_who_asks_for_members_again_and_again_is_answered_seldom",),
    ),
    Bug(
        name="signatures are looked at that bring nobody",
        module="p2pdiloco.node.fellowship",
        old="if not (self.members.grows_by(statement) or self._vain.take(came_with, self._now_s())):",
        new="if False:",
        harm="one member with a thin line takes everybody's processor with chains of its own",
        killed_by=(f"{_FELLOWSHIP}::test_who_tells_what_brings_nobody_new_is_soon_not_looked_at",),
    ),
    Bug(
        name="newcomers count as what brings nobody",
        module="p2pdiloco.wire.members",
        old="        return subject not in self._known and self._invited[by]",
        new="        return False and self._invited[by]",
        harm="a newcomer in a large run hears of some of its members only, and takes no commits of the others",
        killed_by=(f"{_FELLOWSHIP}::test_who_tells_what_brings_nobody_new_is_soon_not_looked_at",),
    ),
    Bug(
        name="a table that is full stays full",
        module="p2pdiloco.node.roster",
        old="        self._make_room(ROOM)\n",
        new="",
        harm="who has published a thousand records once keeps each newcomer of an open run from being dialled",
        killed_by=("tests/unit/test_node_roster.py::test_records_of_nobody_keep_no_newcomer_from_being_known",),
    ),
    Bug(
        name="who is connected finds no place among the known",
        module="p2pdiloco.node.roster",
        old="                self._make_room(1)\n",
        new="                pass\n",
        harm="who came while forged records filled the table is not dialled again when its connection is lost",
        killed_by=("tests/unit/test_node_roster.py::test_records_of_nobody_keep_no_newcomer_from_being_known",),
    ),
)
