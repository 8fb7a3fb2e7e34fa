"""The textual app of ``p2pdiloco watch``: shows the same snapshot as the page; ``tui_layout`` lays out its panels.

Rule of this file: it takes a snapshot about once a second, and keeps showing the last one while there is no answer.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.theme import Theme
from textual.widgets import Footer, ProgressBar, Static

from p2pdiloco.observability import tui_layout
from p2pdiloco.observability.event_schema import plain
from p2pdiloco.observability.view_sources import Sighting, Source, Tape, UnseenError

EVERY_S = 1.0
DARK, LIGHT = "p2pdiloco-dark", "p2pdiloco-light"
SPEEDS = (1.0, 4.0, 10.0, 60.0, 600.0)
# Fraction of a recording that one key press moves by.
LEAP = 0.05
CARDS = 6
THEMES = (
    Theme(
        name=DARK,
        primary="#3fc1bd",
        secondary="#e3a765",
        success="#6cc783",
        warning="#e5b04c",
        error="#f27a83",
        foreground="#e4ece9",
        background="#0e1413",
        surface="#151d1c",
        panel="#151d1c",
        variables={"text-muted": "#8fa09b", "line": "#26312f"},
    ),
    Theme(
        name=LIGHT,
        primary="#0f7f81",
        secondary="#b9752b",
        success="#2c7a3f",
        warning="#a86a00",
        error="#bb2d3b",
        foreground="#17211f",
        background="#f5f6f3",
        surface="#ffffff",
        panel="#ffffff",
        dark=False,
        variables={"text-muted": "#5d6b68", "line": "#dfe4e0"},
    ),
)


class Top(App[None]):
    """Shows a source until the user quits."""

    TITLE = "p2pdiloco watch"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide"), (150, "-broad")]  # noqa: RUF012 (as textual declares it)
    CSS = """
    Screen { background: $background; }
    #head, #course { height: 1; }
    #head { background: $surface; }
    #done { width: 1fr; padding: 0 1; } #done Bar { width: 1fr; } #step { width: auto; }
    #troubles { display: none; background: $error 15%; color: $error; border-left: outer $error; padding: 0 1; }
    #body { scrollbar-size-vertical: 1; }
    .row { height: auto; }
    #cards { layout: grid; grid-size: 3; grid-rows: 5; } .-broad #cards { grid-size: 6; }
    .card { width: 1fr; height: 5; border: round $line; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    .panel { border: round $line; border-title-color: $text-muted; padding: 0 1; height: auto; }
    #curve { width: 3fr; height: 14; } #news { width: 2fr; height: 14; }
    #peers { min-height: 4; }
    #merges { width: 64; min-height: 11; } #counted { width: 1fr; min-height: 11; }
    .-narrow .row { layout: vertical; } .-narrow #cards { layout: grid; }
    .-narrow #curve, .-narrow #news, .-narrow #merges, .-narrow #counted { width: 100%; } .-narrow #news { height: 8; }
    .-narrow #merges, .-narrow #counted { min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("x", "over_time", "tokens or time"),
        Binding("t", "other_theme", "light or dark"),
        Binding("space", "pause", "pause"),
        Binding("left", "leap(-1)", "back"),
        Binding("right", "leap(1)", "on"),
        Binding("plus", "speed(1)", "faster"),
        Binding("minus", "speed(-1)", "slower"),
    ]

    def __init__(self, source: Source, every_s: float = EVERY_S) -> None:
        super().__init__()
        self.source = source
        # The snapshot and history that are shown.
        self.seen: Sighting | None = None
        # Why the source does not answer; empty if it does.
        self.lost = "connecting"
        self.is_over_time = False
        self._every_s = every_s
        self._speed = source.speed if isinstance(source, Tape) and source.speed else SPEEDS[2]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return the variables that our themes add to textual's."""
        return THEMES[0].variables

    def compose(self) -> ComposeResult:
        """Create the panels, still empty."""
        yield Static(id="head")
        with Horizontal(id="course"):
            yield ProgressBar(total=1.0, show_percentage=False, show_eta=False, id="done")
            yield Static(id="step")
        yield Static(id="troubles")
        with VerticalScroll(id="body"):
            with Horizontal(id="cards", classes="row"):
                for number in range(CARDS):
                    yield Static(id=f"card-{number}", classes="card")
            with Horizontal(classes="row"):
                yield _panel("curve", "Loss over tokens")
                yield _panel("news", "Events")
            yield _panel("peers", "Peers")
            with Horizontal(classes="row"):
                yield _panel("merges", "Latest merges")
                yield _panel("counted", "Counts")
        yield Footer()

    def on_mount(self) -> None:
        """Start to take snapshots."""
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK
        self.query_one("#body").focus()
        self.run_worker(self._keep_looking(), exclusive=True)

    def on_resize(self) -> None:
        """Lay out the panels again for the new size."""
        self.call_after_refresh(self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys for recordings where the source is none."""
        return action not in ("pause", "leap", "speed") or isinstance(self.source, Tape)

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Take one snapshot and show it."""
        try:
            self.seen, self.lost = await self.source.look(), ""
        except UnseenError as error:
            self.lost = plain(error)
        self.draw()

    def draw(self) -> None:
        """Show the last snapshot."""
        if self.seen is None:
            self._panel("head").update(Content(f" {self.lost}"))
            return
        picture, history = self.seen
        width = self.size.width
        self._panel("head").update(tui_layout.heading(picture, self._pulse(), bool(self.lost), width))
        done, step = tui_layout.progress(picture)
        self.query_one("#done", ProgressBar).update(progress=done)
        self._panel("step").update(step)
        troubles = self._panel("troubles")
        told = [*picture.troubles, *([self.lost] if self.lost else [])]
        troubles.update(Content("\n".join(plain(one) for one in told)))
        troubles.display = bool(told)
        for number, card in enumerate(tui_layout.cards(picture)):
            self._panel(f"card-{number}").update(tui_layout.card(card))
        curve, news, counted = self._panel("curve"), self._panel("news"), self._panel("counted")
        curve.border_title = "Loss over time" if self.is_over_time else "Loss over tokens"
        room = curve.content_size
        curve.update(tui_layout.losses(history, room.width, room.height, over_time=self.is_over_time))
        news.update(tui_layout.headlines(picture, *news.content_size))
        peers = self._panel("peers")
        live = sum(row.is_live for row in picture.peers)
        peers.border_title = f"Peers: {live} live, {len(picture.peers) - live} left"
        peers.update(tui_layout.peers(picture, history, peers.content_size.width))
        self._panel("merges").update(tui_layout.merges(picture))
        counted.update(tui_layout.counted(picture, counted.content_size.width))

    def _panel(self, name: str) -> Static:
        return self.query_one(f"#{name}", Static)

    def _pulse(self) -> str:
        if self.lost:
            return "no answer; retrying"
        if not isinstance(self.source, Tape) or self.seen is None:
            return "live"
        if self.seen.picture.at >= self.source.recording.ends:
            return "end of the recording"
        return f"playing at {self.source.speed:g}x" if self.source.speed else "paused"

    # -- keys ----------------------------------------------------------------------------------------------------------

    def action_over_time(self) -> None:
        """Draw the curves over time, or over tokens again."""
        self.is_over_time = not self.is_over_time
        self.draw()

    def action_other_theme(self) -> None:
        """Switch between light and dark."""
        self.theme = LIGHT if self.theme == DARK else DARK

    async def action_pause(self) -> None:
        """Pause a recording, or play on; at its end, play from the beginning."""
        if isinstance(self.source, Tape) and self.seen is not None:
            at, tape = self.seen.picture.at, self.source.recording
            is_over = at >= tape.ends
            is_standing = is_over or not self.source.speed
            self.source.go(tape.begins if is_over else at, self._speed if is_standing else 0.0)
            await self.look()

    async def action_leap(self, way: int) -> None:
        """Move back or forth in a recording."""
        if isinstance(self.source, Tape) and self.seen is not None:
            tape = self.source.recording
            self.source.go(self.seen.picture.at + way * LEAP * (tape.ends - tape.begins), self.source.speed)
            await self.look()

    async def action_speed(self, way: int) -> None:
        """Play a recording faster or slower."""
        if isinstance(self.source, Tape) and self.seen is not None:
            at = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self._speed))
            self._speed = SPEEDS[max(0, min(len(SPEEDS) - 1, at + way))]
            self.source.go(self.seen.picture.at, self._speed)
            await self.look()


def _panel(name: str, title: str) -> Static:
    panel = Static(id=name, classes="panel")
    panel.border_title = title
    return panel
