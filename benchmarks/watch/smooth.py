"""Drawing time of a page and a terminal view with 64 peers.

    python -m benchmarks.watch.smooth --peers 64 --seconds 15

A made-up recording is played at sixty times its speed on the page in a headless browser, and in the terminal view.

- A page is smooth if its thread is free again within 20 ms, so that scrolling and keys respond at once. The time of a
  picture and of a history, layout included, is the least of several, because other work may want the cores. Frames, and
  tasks of more than 50 ms, are reported as this machine had them.
- A headless browser draws in software, which costs more than a screen's GPU.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import bench
from benchmarks.watch.browser import browser
from benchmarks.watch.shots import LOADED, crowd
from p2pdiloco.observability.log_reader import Recording, player
from p2pdiloco.observability.tui import Top
from p2pdiloco.observability.view_sources import Tape
from p2pdiloco.observability.web_server import PageServer

SPEED = 60.0
"""At which a picture has changed everywhere after a second."""
WATCH = """
window.frames_ms = []; window.long_ms = [];
new PerformanceObserver(list => list.getEntries().forEach(e => long_ms.push(e.duration))).observe({type: 'longtask'});
(function next(before) { requestAnimationFrame(now => { if (before) frames_ms.push(now - before); next(now); }); })(0);
"""
PARTS = """(() => {
  const took = (work) => Math.min(...Array.from({length: 9}, () => {
    const began = performance.now(); work(); document.body.offsetHeight; return performance.now() - began; }));
  return [took(show), took(drawCurve), took(drawLanes)]; })()"""


async def of_page(recording: Recording, moment: float, seconds: float) -> dict[str, float]:
    """A picture a second comes by the stream."""
    async with PageServer(lambda query: player(recording, query, 1.0)) as server, browser() as tab:
        await tab.open(f"{server.address}/?at={moment}&speed={SPEED:g}", 1280, 900)
        await tab.until(LOADED, "the page shows something")
        await asyncio.sleep(2.0)
        await tab.value(WATCH)
        await asyncio.sleep(seconds)
        frames, long = sorted(await tab.value("frames_ms")), await tab.value("long_ms")
        picture, curve, lanes = await tab.value(PARTS)
    return {
        "page_picture_ms": picture,
        "page_curve_ms": curve,
        "page_lanes_ms": lanes,
        "page_frame_ms": statistics.median(frames),
        "page_frame_99_ms": frames[int(0.99 * len(frames))],
        "page_long_tasks_a_minute": 60 * len(long) / seconds,
        "page_longest_task_ms": max(long, default=0.0),
    }


async def of_terminal(recording: Recording, moment: float, looks: int) -> dict[str, float]:
    """Processor time of a look, a drawing, and what textual makes of it."""
    app, took = Top(Tape(recording, SPEED, moment), every_s=3600.0), []
    async with app.run_test(size=(150, 48)) as pilot:
        await app.look()
        await pilot.pause()
        for _ in range(looks):
            began = time.process_time()
            await app.look()
            await pilot.pause()
            took.append(1000 * (time.process_time() - began))
    return {"top_ms_a_picture": statistics.median(took), "top_most_ms": max(took)}


def main() -> int:
    """Measure, print."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--peers", type=int, default=64, help="peers of the recording")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-smooth-") as folder:
        recording = Recording(crowd(Path(folder), options.peers))
        moment = recording.begins + 0.5 * (recording.ends - recording.begins)
        found = asyncio.run(of_page(recording, moment, options.seconds))
        found |= asyncio.run(of_terminal(recording, moment, 20))
    bench.write(options, "watch/smooth", {}, found)
    for name, value in found.items():
        print(f"{name:<28}{value:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
