"""Bugs of what people see of a run; see ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_ALERTS_TESTS = "tests/unit/test_observability_alerts.py"
_SERVER_TESTS = "tests/unit/test_observability_web_server.py"

_READER_TESTS = "tests/unit/test_observability_log_reader.py"


_INQUIRY_TESTS = "tests/integration/test_inquiry.py"


BUGS = (
    Bug(
        name="others' letters reach the terminal",
        module="p2pdiloco.observability.event_schema",
        where="plain",
        old="printable(named)",
        new="named",
        harm="a peer's words clear the screen, or type into the shell of who reads them",
        killed_by=(f"{_READER_TESTS}::test_events_are_chosen_and_told_in_sentences",),
    ),
    Bug(
        name="an exposed page forgets its token",
        module="p2pdiloco.observability.web_server",
        where="PageServer._check",
        old="request.path not in PROBES",
        new="request.path == '/'",
        harm="the page is closed, and the stream behind it open to all",
        killed_by=(f"{_SERVER_TESTS}::test_an_exposed_page_wants_its_token_everywhere",),
    ),
    Bug(
        name="a request to the page may take for ever",
        module="p2pdiloco.observability.connection_limits",
        where="PageConnection.begin_stage",
        old="self.abort",
        new="self._stage_s.hex",
        harm="half-sent requests and unread answers hold descriptors for an hour",
        killed_by=(
            f"{_SERVER_TESTS}::test_a_request_that_never_ends_is_cut_off_and_a_stream_goes_on",
            f"{_SERVER_TESTS}::test_a_client_that_does_not_read_its_answers_is_let_go",
        ),
    ),
    Bug(
        name="others' words go through a shell",
        module="p2pdiloco.node.notifier",
        where="Notifier._run",
        old=(
            "asyncio.create_subprocess_exec(*shlex.split(self._target), alert.text, "
            "stdin=asyncio.subprocess.DEVNULL, env={**os.environ, 'P2PDILOCO_ALERT': alert.kind, "
            "'P2PDILOCO_STATE': state, 'P2PDILOCO_PEER': self._peer})"
        ),
        new=(
            "asyncio.create_subprocess_shell(self._target + ' ' + alert.text, "
            "stdin=asyncio.subprocess.DEVNULL, env={**os.environ, 'P2PDILOCO_ALERT': alert.kind, "
            "'P2PDILOCO_STATE': state, 'P2PDILOCO_PEER': self._peer})"
        ),
        harm="a peer's name runs commands on its listeners' machines",
        killed_by=(f"{_ALERTS_TESTS}::test_a_command_gets_others_words_as_one_argument",),
    ),
    Bug(
        name="a log line has others' words as they are",
        module="p2pdiloco.util.logs",
        where="_quoted",
        old="escaped(json.dumps(text, ensure_ascii=False))",
        new="json.dumps(text, ensure_ascii=False)",
        harm="a peer's reason clears its reader's screen, or reads as another line",
        killed_by=("tests/unit/test_runtime_basics.py::test_a_log_line_has_nothing_that_a_terminal_obeys",),
    ),
    Bug(
        name="a stranger's status is shown as it is",
        module="p2pdiloco.swarm.run_lookup",
        where="ask_status",
        old="logs.printable(told.trouble)",
        new="told.trouble",
        harm="whoever announces a run steers the terminals of those who look at it",
        killed_by=(f"{_INQUIRY_TESTS}::test_a_status_has_nothing_that_a_terminal_obeys",),
    ),
    Bug(
        name="a status is believed whoever tells it",
        module="p2pdiloco.swarm.run_lookup",
        where="ask_status",
        old="told.peer != peer",
        new="False",
        harm="a peer says of another that it is in trouble",
        killed_by=(f"{_INQUIRY_TESTS}::test_nobody_tells_a_status_in_anothers_name",),
    ),
    Bug(
        name="a token must be letters",
        module="p2pdiloco.observability.web_server",
        where="PageServer._knows_token",
        old="word.encode(errors='backslashreplace')",
        new="word.encode()",
        harm="whoever reaches an exposed page fills its user's terminal with tracebacks",
        killed_by=(f"{_SERVER_TESTS}::test_a_token_of_no_letters_is_a_wrong_one",),
    ),
)
