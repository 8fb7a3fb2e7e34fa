"""Bugs of what people see of a run; see ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_ALERTS_TESTS = "tests/unit/test_observability_alerts.py"
_CHRONICLE_TESTS = "tests/unit/test_observability_history.py"
_SERVER_TESTS = "tests/unit/test_observability_web_server.py"

_SOURCES_TESTS = "tests/unit/test_observability_view_sources.py"
_READER_TESTS = "tests/unit/test_observability_log_reader.py"

_CHECKUP_TESTS = "tests/unit/test_node_diagnostics.py"

_INQUIRY_TESTS = "tests/integration/test_inquiry.py"

_FORWARDER_TESTS = "tests/unit/test_node_metrics_export.py"

BUGS = (
    Bug(
        name="a number that is too large ends what reads the log",
        module="p2pdiloco.observability.log_reader",
        old="AttributeError, ArithmeticError):",
        new="AttributeError):",
        harm="one damaged line, and `events` ends in a traceback",
        killed_by=(f"{_READER_TESTS}::test_every_kind_is_told_in_words",),
    ),
    Bug(
        name="a terminal that is gone ends who logs",
        module="p2pdiloco.util.logs",
        old="            except (OSError, ValueError):",
        new="            except ValueError:",
        harm="a connection by ssh is cut while a newcomer downloads, and its node ends at the next word",
        killed_by=("tests/unit/test_util_logs.py::test_a_terminal_that_is_gone_has_no_bar_and_ends_nobody",),
    ),
    Bug(
        name="what is no news is shown as it is logged",
        module="p2pdiloco.observability.log_reader",
        old="        text = detail(event.line) if news is None else news.text",
        new="        text = None if news is None else news.text",
        harm="nine lines of ten that `events` prints are field=value",
        killed_by=(f"{_READER_TESTS}::test_every_kind_is_told_in_words",),
    ),
    Bug(
        name="what others leave behind is told as an error",
        module="p2pdiloco.util.logs",
        old="    handler.addFilter(_is_worth_telling)\n",
        new="",
        harm="in a swarm of dozens a terminal shows asyncio's errors that nobody can do anything about",
        killed_by=(
            "tests/unit/test_util_logs.py"
            "::test_what_a_search_of_the_directory_leaves_behind_is_not_told_but_a_task_of_ours_is",
        ),
    ),
    Bug(
        name="a program that does not read is told for ever",
        module="p2pdiloco.node.metrics_export",
        old="            if not pipe.is_closing() and pipe.get_write_buffer_size() < MOST_WAITING:",
        new="            if not pipe.is_closing():",
        harm="an experiment's server that is slow fills the node's memory",
        killed_by=(f"{_FORWARDER_TESTS}::test_nobody_waits_for_one_that_is_gone_or_does_not_read",),
    ),
    Bug(
        name="a membership that ends is not told",
        module="p2pdiloco.swarm.membership_sync",
        old="        return None if grant.not_after == NEVER else grant.not_after - self._now_s()",
        new="        return None",
        harm="a peer is expelled in the night, and nobody was told to ask for a new invite",
        killed_by=("tests/unit/test_swarm_membership_sync.py::test_each_knows_how_long_it_is_a_member",),
    ),
    Bug(
        name="a number that is none is forwarded",
        module="p2pdiloco.node.metrics_export",
        old=" if value is not None and math.isfinite(value)",
        new=" if value is not None",
        harm="one loss that is NaN ends the logging of all numbers",
        killed_by=(f"{_FORWARDER_TESTS}::test_a_line_has_the_numbers_that_are_known_by_the_names_of_metrics",),
    ),
    Bug(
        name="a container's limit is not looked at",
        module="p2pdiloco.node.diagnostics",
        old="            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))",
        new="            pass",
        harm="doctor promises memory for which the kernel kills the learner",
        killed_by=(f"{_CHECKUP_TESTS}::test_a_busy_machine_and_a_container_s_limit_are_named",),
    ),
    Bug(
        name="a share by what is no number",
        module="p2pdiloco.node.diagnostics",
        old="others = sum(one.tokens_per_second for one in peers if 0.0 < one.tokens_per_second < math.inf)",
        new="others = sum(one.tokens_per_second for one in peers)",
        harm="one peer that tells nan takes everybody's answer away",
        killed_by=(f"{_CHECKUP_TESTS}::test_what_a_machine_would_give_is_told",),
    ),
    Bug(
        name="another run's page is shown for a folder's",
        module="p2pdiloco.observability.view_sources",
        old="            if _is_of(seen.picture, folder):",
        new="            if True:",
        harm="`top STATE` shows a run that has the port by now, and nobody sees that",
        killed_by=(f"{_SOURCES_TESTS}::test_a_page_of_another_run_at_the_same_port_is_not_taken_for_it",),
    ),
    Bug(
        name="a page answers without end",
        module="p2pdiloco.observability.view_sources",
        old="                    if len(body) > MOST_BYTES:",
        new="                    if False:",
        harm="what listens at a port fills the memory of who looks",
        killed_by=(f"{_SOURCES_TESTS}::test_what_is_no_page_is_refused_and_what_is_endless_is_let_go",),
    ),
    Bug(
        name="others' letters reach the terminal",
        module="p2pdiloco.observability.event_schema",
        old="    return printable(named)[:LONGEST]",
        new="    return named[:LONGEST]",
        harm="a peer's words clear the screen, or type into the shell of who reads them",
        killed_by=(f"{_READER_TESTS}::test_events_are_chosen_and_told_in_sentences",),
    ),
    Bug(
        name="the end of a log that is moved aside is not read",
        module="p2pdiloco.observability.log_reader",
        old="""        found = self._read()
        if self._is_moved_aside():
            self.close()
            self._open()
            found += self._read()
        return found
""",
        new="""        if self._is_moved_aside():
            self.close()
            self._open()
        return self._read()
""",
        harm="who follows events misses those before a new log",
        killed_by=(f"{_READER_TESTS}::test_a_log_that_is_moved_aside_is_read_to_its_end_first",),
    ),
    Bug(
        name="a page answers to any name",
        module="p2pdiloco.observability.web_server",
        old="        if not is_this_machine(request.host, self._host):",
        new="        if False:",
        harm="a web site that has its name point here reads what a peer shows (DNS rebinding)",
        killed_by=(f"{_SERVER_TESTS}::test_a_foreign_name_that_points_here_is_refused",),
    ),
    Bug(
        name="an exposed page forgets its token",
        module="p2pdiloco.observability.web_server",
        old="        if self._token and not self._knows_token(request):",
        new="        if request.path == '/' and self._token and not self._knows_token(request):",
        harm="the page is closed, and the stream behind it open to all",
        killed_by=(f"{_SERVER_TESTS}::test_an_exposed_page_wants_its_token_everywhere",),
    ),
    Bug(
        name="lookers without a bound",
        module="p2pdiloco.observability.web_server",
        old="        if self._streams >= MOST_STREAMS:",
        new="        if False:",
        harm="whoever opens connections has the peer write pictures instead of merging",
        killed_by=(f"{_SERVER_TESTS}::test_lookers_are_few_and_who_goes_makes_room",),
    ),
    Bug(
        name="connections to the page without a bound",
        module="p2pdiloco.observability.connection_limits",
        old="            out.abort()",
        new="            pass",
        harm="1,300 half-sent requests take all of a peer's descriptors",
        killed_by=(f"{_SERVER_TESTS}::test_a_client_that_floods_the_page_takes_places_from_itself",),
    ),
    Bug(
        name="a request to the page may take for ever",
        module="p2pdiloco.observability.connection_limits",
        old="call_later(self._stage_s, self.abort)",
        new="call_later(self._stage_s, self._stage_s.hex)",
        harm="half-sent requests and unread answers hold descriptors for an hour",
        killed_by=(
            f"{_SERVER_TESTS}::test_a_request_that_never_ends_is_cut_off_and_a_stream_goes_on",
            f"{_SERVER_TESTS}::test_a_client_that_does_not_read_its_answers_is_let_go",
        ),
    ),
    Bug(
        name="a commit counts for each that tells of it",
        module="p2pdiloco.observability.history",
        old="version <= self._shards.get(shard, (0, 0.0, 0))[0]",
        new="version < self._shards.get(shard, (0, 0.0, 0))[0]",
        harm="shares in a recorded swarm add up to several times the truth",
        killed_by=(f"{_CHRONICLE_TESTS}::test_who_gave_and_who_merged_is_counted_once_whoever_tells",),
    ),
    Bug(
        name="an alert is told at every look",
        module="p2pdiloco.observability.alerts",
        old="is_news = kind not in self.present and (",
        new="is_news = (",
        harm="a phone that rings every five seconds is switched off",
        killed_by=(f"{_ALERTS_TESTS}::test_each_kind_is_noticed_once_within_a_minute_and_so_is_its_end",),
    ),
    Bug(
        name="the best loss counts for good",
        module="p2pdiloco.observability.alerts",
        old="deque(maxlen=RECENT_LOSSES)",
        new="deque()",
        harm="one figure that was much too low alarms everybody until the run's end",
        killed_by=(f"{_ALERTS_TESTS}::test_a_figure_that_was_much_too_low_is_forgotten",),
    ),
    Bug(
        name="each look at the loss takes a place",
        module="p2pdiloco.observability.alerts",
        old="if picture.course.held_out_step > self._loss_step:",
        new="if True:",
        harm="what the loss was is forgotten between two evaluations, and nobody is told of a model that diverges",
        killed_by=(f"{_ALERTS_TESTS}::test_the_same_evaluation_seen_again_takes_no_place",),
    ),
    Bug(
        name="others' words go through a shell",
        module="p2pdiloco.node.notifier",
        old="""        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._target),
            alert.text,
""",
        new="""        process = await asyncio.create_subprocess_shell(
            self._target + " " + alert.text,
""",
        harm="a peer's name runs commands on its listeners' machines",
        killed_by=(f"{_ALERTS_TESTS}::test_a_command_gets_others_words_as_one_argument",),
    ),
    Bug(
        name="a log line has others' words as they are",
        module="p2pdiloco.util.logs",
        old="else escaped(json.dumps(text, ensure_ascii=False))",
        new="else json.dumps(text, ensure_ascii=False)",
        harm="a peer's reason clears its reader's screen, or reads as another line",
        killed_by=("tests/unit/test_runtime_basics.py::test_a_log_line_has_nothing_that_a_terminal_obeys",),
    ),
    Bug(
        name="a stranger's status is shown as it is",
        module="p2pdiloco.swarm.run_lookup",
        old="trouble=logs.printable(told.trouble)",
        new="trouble=told.trouble",
        harm="whoever announces a run steers the terminals of those who look at it",
        killed_by=(f"{_INQUIRY_TESTS}::test_a_status_has_nothing_that_a_terminal_obeys",),
    ),
    Bug(
        name="a journal is told in others' words as they are",
        module="tests.machine_sim.replay",
        old="[printable(PEER_ID.sub(lambda found: short(found.group()), line)) for",
        new="[PEER_ID.sub(lambda found: short(found.group()), line) for",
        harm="whoever was connected steers the terminal of who replays a journal, and forges its lines",
        killed_by=(
            "tests/unit/test_machine_sim_replay.py::test_other_peers_words_steer_no_terminal_and_forge_no_line",
        ),
    ),
    Bug(
        name="a status is believed whoever tells it",
        module="p2pdiloco.swarm.run_lookup",
        old="    if told.peer != peer:",
        new="    if False:",
        harm="a peer says of another that it is in trouble",
        killed_by=(f"{_INQUIRY_TESTS}::test_nobody_tells_a_status_in_anothers_name",),
    ),
    Bug(
        name="a token must be letters",
        module="p2pdiloco.observability.web_server",
        old='word.encode(errors="backslashreplace"), mine',
        new="word.encode(), mine",
        harm="whoever reaches an exposed page fills its user's terminal with tracebacks",
        killed_by=(f"{_SERVER_TESTS}::test_a_token_of_no_letters_is_a_wrong_one",),
    ),
)
