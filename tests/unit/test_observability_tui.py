"""``p2pdiloco watch`` in a terminal that nobody sees, and what it draws."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from test_observability_history import ANN, BOB, chronicle, commit, progress
from test_observability_log_reader_playback import started, write

from p2pdiloco.observability import formatting, tui_layout
from p2pdiloco.observability.log_reader import Recording
from p2pdiloco.observability.snapshot import Headline, History, OwnWords, PeerRow, Sample
from p2pdiloco.observability.tui_layout import BRAILLE, EMPTY, curve, lane, thinned
from p2pdiloco.observability.view_sources import Sighting, Tape, UnseenError

HOSTILE = "\x1b]0;evil\x07\x1b[2J\u202e[bold]x[/]\n\r" + "w" * 500


def told() -> History:
    shown = chronicle(1)
    for version in range(1, 30):
        shown.take(commit(10.0 * version, version, ANN, ann=100, bob=300))
        at = {"time": 10.0 * version, "step": 8 * version, "tokens": 1000 * version, "version": version}
        shown.take({**at, "event": "evaluation", "loss": 5.0 / version})
        shown.take(progress(10.0 * version, 500 * version, loss=6.0 / version))
    shown.take({"time": 150.0, "event": "joined", "peer": BOB, "live": 2})
    return shown.history()


def test_the_held_out_loss_has_its_step() -> None:
    shown = chronicle(1)
    shown.take({"time": 1.0, "event": "evaluation", "version": 4, "tokens": 900, "step": 30, "loss": 2.743})
    assert tui_layout.cards(shown.picture(2.0))[0] == ("held-out loss", "2.743", "at step 30")


def test_numbers_are_written_as_on_the_page() -> None:
    assert [formatting.amount(v) for v in (None, 0, 999, 1240, 12_400, 999_999, 3.2e9)] == [
        "-", "0", "999", "1.24 k", "12.4 k", "1,000 k", "3.20 G",
    ]  # fmt: skip
    assert [formatting.volume(v) for v in (0, 999, 12_500, 123e6)] == ["0 B", "999 B", "12.5 kB", "123 MB"]
    assert [formatting.duration(v) for v in (-1, 59, 61, 3660, 90_000, float("inf"))][:5] == [
        "0 s", "59 s", "1 min 01 s", "1 h 01 min", "1 d 1 h",
    ]  # fmt: skip
    assert formatting.percent(0.0321) == "3.2 %"
    assert formatting.clock(1e300) == "-"


@pytest.mark.parametrize("over_time", [False, True])
@pytest.mark.parametrize("size", [(20, 6), (80, 14), (200, 40)])
def test_a_curve_fills_its_room_and_falls(size: tuple[int, int], over_time: bool) -> None:
    lines = curve(told(), *size, over_time=over_time)
    assert len(lines) == size[1]
    assert {len(line) for line in lines} == {size[0]}
    main = [[at for at, cell in enumerate(line) if cell.kind == "main"] for line in lines]
    rows = [row for row, columns in enumerate(main) if columns]
    drawn = [row for row, line in enumerate(lines) if any(cell.kind in ("main", "second") for cell in line)]
    assert drawn[0] <= 0.08 * size[1]
    assert drawn[-1] >= 0.85 * (size[1] - 3)
    assert min(main[rows[0]]) < min(main[rows[-1]]), "high losses are left, low ones right"
    assert any(cell.kind == "good" for line in lines for cell in line), "who came is marked"
    assert all(cell.letter != chr(BRAILLE) for line in lines for cell in line)


def test_without_a_loss_or_without_room_nothing_is_drawn() -> None:
    assert curve(chronicle(1).history(), 80, 14, over_time=False) == []
    assert curve(told(), 10, 14, over_time=False) == []
    one = msgspec.structs.replace(told(), held_out=((0.0, 5.0, 2.0),), train=())
    drawn = [cell for line in curve(one, 40, 10, over_time=True) for cell in line if cell.kind == "main"]
    assert len(drawn) == 1
    assert EMPTY.letter == " "


def test_lanes_are_as_wide_as_they_must_be() -> None:
    assert lane([0, 1, 4, 8], 4, 6, 8) == " ▁▄█  "
    assert lane([0, 8] * 80, 160, 20, 8) == "█" * 20
    assert lane([], 0, 5, 0) == "     "
    assert len(thinned([(float(i), 0.0, 1.0) for i in range(401)], 80)) <= 80


class Stage:
    """A peer that answers what the test wants."""

    def __init__(self) -> None:
        self.is_there = True
        shown = chronicle(1)
        shown.take(commit(1.0, 1, BOB, ann=5, bob=6))
        own = OwnWords(
            phase=HOSTILE, tokens_per_s=1.0, tokens=1, loss=None, version_min=1, version_max=1, up_bytes=0,
            down_bytes=0, blocked_s=0.0, trouble=HOSTILE,
        )  # fmt: skip
        evil = PeerRow(peer=HOSTILE, is_live=True, words=own)
        picture = shown.picture(2.0)
        self.sighting = Sighting(
            msgspec.structs.replace(
                picture,
                title=msgspec.structs.replace(picture.title, name=HOSTILE),
                peers=(*picture.peers, evil),
                headlines=(Headline(at=1.0, level=HOSTILE, text=HOSTILE),),
                counts={HOSTILE: 3},
                troubles=(HOSTILE,),
                sample=Sample(at=1.0, step=1, text=HOSTILE),
            ),
            told(),
        )

    async def look(self) -> Sighting:
        if not self.is_there:
            raise UnseenError("no answer from http://127.0.0.1:7373")
        return self.sighting


@pytest.mark.heavy
def test_it_shows_hostile_words_as_words_and_says_when_nobody_answers() -> None:
    from p2pdiloco.observability.tui import LIGHT, Top

    async def whole() -> None:
        stage = Stage()
        app = Top(stage, every_s=3600.0)
        async with app.run_test(size=(140, 60)) as pilot:
            await pilot.pause()
            await app.look()
            await pilot.pause()
            text = letters(app)
            assert "[bold]x[/]" in text
            assert "BBBBBB" in text
            assert "fork" not in text
            for letter in "\x1b\x07\r\u202e":
                assert letter not in text
            await pilot.press("x", "t")
            assert (app.is_over_time, app.theme) == (True, LIGHT)
            stage.is_there = False
            await app.look()
            await pilot.pause()
            assert "no answer from http://127.0.0.1:7373" in letters(app)
            assert "BBBBBB" in letters(app), "what was seen last stays"
            await pilot.resize_terminal(60, 20)
            await pilot.pause()
            assert "no answer" in letters(app)

    asyncio.run(whole())


@pytest.mark.heavy
@pytest.mark.parametrize("width", [80, 109, 110, 120, 149, 150, 200])
def test_no_number_on_a_card_is_cut(width: int) -> None:
    from p2pdiloco.observability.tui import Top

    async def whole() -> None:
        stage = Stage()
        picture = stage.sighting.picture
        course = msgspec.structs.replace(
            picture.course,
            tokens_per_s=7241.0,
            swarm_tokens_per_s=123_456.0,
            tokens_merged=3_210_000_000,
            train_loss=2.3,
        )
        count = msgspec.structs.replace(picture.headcount, participating=12, weight_averaged=11)
        stage.sighting = Sighting(msgspec.structs.replace(picture, course=course, headcount=count), told())
        app = Top(stage, every_s=3600.0)
        async with app.run_test(size=(width, 60)) as pilot:
            await pilot.pause()
            await app.look()
            await pilot.pause()
            text = letters(app)
            for line in (line for card in tui_layout.cards(stage.sighting.picture) for line in card):
                assert line in text

    asyncio.run(whole())


@pytest.mark.heavy
def test_a_recording_is_played_paused_and_leapt_through(tmp_path: Path) -> None:
    from p2pdiloco.observability.tui import Top

    commits = [commit(100.0 + version, version, BOB, ann=5) for version in range(1, 101)]
    write(tmp_path / "metrics.jsonl", started(100.0, ANN), *commits)

    async def whole() -> None:
        tape = Tape(Recording(tmp_path), 0.0, 100.0)
        app = Top(tape, every_s=3600.0)
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.press("right", "right")
            assert app.seen is not None
            assert app.seen.picture.at == 110.0
            await pilot.press("left")
            assert app.seen.picture.at == 105.0
            assert app.seen.picture.merges[0].version == 5
            await pilot.press("plus")
            assert tape.speed == 60.0
            await pilot.press("space")
            assert tape.speed == 0.0
            assert "paused" in letters(app)
            tape.go(tape.recording.ends, 60.0)
            await app.look()
            await pilot.pause()
            assert "end of the recording" in letters(app)
            assert "playing" not in letters(app)
            await pilot.press("space")
            assert app.seen.picture.at < tape.recording.ends
            assert tape.speed == 60.0, "it plays from the beginning"

    asyncio.run(whole())


def letters(app: object) -> str:
    """All that stands on the screen."""
    from textual.app import App

    assert isinstance(app, App)
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in lines)
