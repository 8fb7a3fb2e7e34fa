"""Bugs of what people see of a run; see ``planted``."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_ALERTS_TESTS = "tests/unit/test_watch_alerts.py"
_CHRONICLE_TESTS = "tests/unit/test_watch_chronicle.py"
_SERVER_TESTS = "tests/unit/test_watch_server.py"

BUGS = (
    Bug(
        name="a page answers to any name",
        module="p2pdiloco.watch.server",
        old="        if not is_this_machine(request.host, self._host):",
        new="        if False:",
        harm="a web site that has its name point here reads what a peer shows (DNS rebinding)",
        killed_by=(f"{_SERVER_TESTS}::test_a_foreign_name_that_points_here_is_refused",),
    ),
    Bug(
        name="an exposed page forgets its token",
        module="p2pdiloco.watch.server",
        old="        if self._token and not self._knows_token(request):",
        new="        if request.path == '/' and self._token and not self._knows_token(request):",
        harm="the page is closed, and the stream behind it open to all",
        killed_by=(f"{_SERVER_TESTS}::test_an_exposed_page_wants_its_token_everywhere",),
    ),
    Bug(
        name="lookers without a bound",
        module="p2pdiloco.watch.server",
        old="        if self._streams >= MOST_STREAMS:",
        new="        if False:",
        harm="whoever opens connections has the peer write pictures instead of merging",
        killed_by=(f"{_SERVER_TESTS}::test_lookers_are_few_and_who_goes_makes_room",),
    ),
    Bug(
        name="a commit counts for each that tells of it",
        module="p2pdiloco.watch.chronicle",
        old="version <= self._shards.get(shard, (0, 0.0, 0))[0]",
        new="version < self._shards.get(shard, (0, 0.0, 0))[0]",
        harm="shares in a recorded swarm add up to several times the truth",
        killed_by=(f"{_CHRONICLE_TESTS}::test_who_gave_and_who_merged_is_counted_once_whoever_tells",),
    ),
    Bug(
        name="an alert is told at every look",
        module="p2pdiloco.watch.alerts",
        old="is_news = kind not in self.present and (",
        new="is_news = (",
        harm="a phone that rings every five seconds is switched off",
        killed_by=(f"{_ALERTS_TESTS}::test_each_kind_is_noticed_once_within_a_minute_and_so_is_its_end",),
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
)
