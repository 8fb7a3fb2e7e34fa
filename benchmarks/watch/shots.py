"""Pictures of the page and of the terminal view, for documents and for a look by eye.

    python -m benchmarks.watch.shots --out out/shots

A real run of small peers is photographed at three moments (one peer is killed, another joins late), and a made-up
recording of 64 peers. ``--crowd`` makes only the recording's pictures, ``--terminal`` only those of the terminal view
(SVG), which need no browser.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

from benchmarks.watch.browser import browser
from p2pdiloco.demo.local_swarm import Swarm
from p2pdiloco.node.run_creation import find_run
from p2pdiloco.observability.log_reader import Recording, player
from p2pdiloco.observability.tui import Top
from p2pdiloco.observability.view_sources import Tape
from p2pdiloco.observability.web_server import PageServer
from p2pdiloco.util.status_pipe import PageAt

LIMIT_S = 420.0
LOADED = "typeof picture !== 'undefined' && picture !== null && history !== null"


def crowd(folder: Path, peers: int = 64, minutes: int = 60, seed: int = 7) -> Path:
    """The logs of so many peers, made up: one tells everything, the others how they train."""
    draw = random.Random(seed)
    letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    ids = ["12D3KooW" + "".join(draw.choices(letters, k=44)) for _ in range(peers)]
    speeds = [draw.choice((0.4, 1.0, 1.0, 2.5)) * draw.uniform(0.8, 1.2) for _ in ids]
    comes = [0.0 if i < peers // 3 else draw.uniform(0.0, 40.0) for i in range(peers)]
    goes = [draw.uniform(20.0, 70.0) if draw.random() < 0.3 and i else 1e9 for i in range(peers)]
    goes = [max(at, come + 5.0) for at, come in zip(goes, comes, strict=True)]
    begun, now = 1.79e9, 1.79e9
    lines: list[dict[str, object]] = [
        {"time": begun, "event": "started", "peer": ids[0], "run": "5" * 40, "is_new": False}
    ]
    others: dict[int, list[dict[str, object]]] = {
        i: [{"time": begun + 60.0 * comes[i], "event": "started", "peer": ids[i], "run": "5" * 40, "is_new": True}]
        for i in range(1, peers)
    }
    live: set[int] = {0}
    versions, tokens = [0] * 24, 0
    for turn in range(minutes * 20):
        now = begun + 3.0 * turn
        minute = turn / 20
        for i in range(peers):
            is_live = comes[i] <= minute < goes[i]
            if is_live != (i in live):
                (live.add if is_live else live.discard)(i)
                event = "joined" if is_live else "left"
                lines += [{"time": now, "event": event, "peer": ids[i], "live": len(live)}]
                lines += [{"time": now, "event": "peers", "live": len(live)}]
        shard = turn % 24
        given = {f"{ids[i]}/1": int(8192 * speeds[i] * draw.uniform(0.7, 1.3)) for i in live if draw.random() < 0.9}
        versions[shard] += 1
        tokens += sum(given.values()) // 24
        loss = 2.2 + 3.3 / (1 + tokens / 4e5) ** 0.6
        lines += [
            {"time": now, "event": "commit", "shard": shard, "version": versions[shard], "step": turn, "head": "h"}
            | {"tokens": tokens, "owner": ids[draw.choice(sorted(live))], "contributors": given},
            {"time": now + 1.0, "event": "progress", "step": turn, "steps": turn, "tokens": 9000 * turn, "loss": None}
            | {
                "sent_bytes": 2_400_000 * turn,
                "step_time_s": 0.4,
                "compute_s": 2.9 * turn,
                "overhead_s": 0.1 * turn,
                "blocked_s": 0.0,
                "node_cpu_s": 0.3 * turn,
            }
            | {"loss": loss + draw.gauss(0.0, 0.05)},
        ]
        if turn % 4 == 0:
            for i in live - {0}:
                made = int(3000 * speeds[i] * 3.0 * (turn - 20 * comes[i]))
                words = {"time": now + 1.0, "event": "progress", "step": turn, "steps": turn, "tokens": max(0, made)}
                words |= {
                    "sent_bytes": made * 80,
                    "step_time_s": 0.4,
                    "compute_s": 2.9 * turn,
                    "overhead_s": 0.1 * turn,
                    "blocked_s": 0.0,
                    "node_cpu_s": 0.3 * turn,
                }
                others[i].append({**words, "loss": loss + draw.gauss(0.0, 0.05)})
        if turn % 20 == 0:
            at = {"version": versions[shard], "tokens": tokens, "step": turn + 1, "loss": loss + draw.gauss(0.0, 0.01)}
            lines += [{"time": now + 2.0, "event": "evaluation", **at}]
    for name, told in {"000": lines, **{f"{i:03}": one for i, one in others.items()}}.items():
        log = folder / name / "metrics.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


async def show_crowd(out: Path) -> None:
    """Light and dark, wide and on a phone."""
    recording = Recording(await asyncio.to_thread(crowd, out / "sixty-four-peers"))
    moment = recording.begins + 0.8 * (recording.ends - recording.begins)
    async with PageServer(lambda query: player(recording, query, 1.0)) as server, browser() as tab:
        for name, width, is_dark in (("crowd", 1280, False), ("crowd-dark", 1280, True), ("crowd-phone", 390, False)):
            await tab.open(f"{server.address}/?at={moment - 300.0}&speed=60", width, 900, is_dark)
            await tab.until(LOADED, "the page shows something")
            await asyncio.sleep(5.0)
            await tab.picture(out / f"{name}.png", whole=True)
            print(name, tab.complaints or "no complaints")


async def show_terminal(out: Path) -> None:
    """The same in a terminal, wide and narrow."""
    recording = Recording(await asyncio.to_thread(crowd, out / "sixty-four-peers"))
    moment = recording.begins + 0.8 * (recording.ends - recording.begins)
    for name, size, is_light in (
        ("top-crowd", (150, 48), False),
        ("top-light", (150, 48), True),
        ("top-narrow", (80, 40), False),
    ):
        app = Top(Tape(recording, 0.0, moment))
        async with app.run_test(size=size) as pilot:
            if is_light:
                await pilot.press("t")
            await app.look()
            await pilot.pause()
            (out / f"{name}.svg").write_text(app.export_screenshot())
            print(name)


async def show_run(out: Path) -> None:
    """Two peers, a kill, a join."""
    swarm = Swarm(out / "swarm")
    try:
        bootstrap = await asyncio.to_thread(swarm.start_bootstrap)
        config = find_run("stdlib-tiny")
        founder = await asyncio.to_thread(swarm.start_founder, "A", config, bootstrap, "--page", "auto")
        other = swarm.join("B", bootstrap)
        page = await asyncio.to_thread(founder.wait_for, PageAt)
        async with browser() as tab:
            await tab.open(page.url, 1280, 900)
            for name, step in (("two", 60), ("killed", 110), ("joined", 190)):
                await _until_step(swarm, step)
                await tab.until(LOADED, "the page shows something")
                await asyncio.sleep(2.0)
                await tab.picture(out / f"{name}.png", whole=True)
                print(name, "at step", founder.view.step, tab.complaints or "no complaints", flush=True)
                if name == "two":
                    other.kill()
                elif name == "killed":
                    swarm.join("C", bootstrap)
    finally:
        await asyncio.to_thread(swarm.stop)


async def _until_step(swarm: Swarm, step: int) -> None:
    founder, deadline = swarm["A"], time.monotonic() + LIMIT_S
    while founder.view.step < step:
        assert founder.is_running, "the founder ended"
        assert time.monotonic() < deadline, f"step {step} did not come"
        founder.refresh()
        await asyncio.sleep(0.5)


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/shots"), help="output folder (default: out/shots)")
    parser.add_argument("--crowd", action="store_true", help="only the pictures of the made-up recording")
    parser.add_argument("--terminal", action="store_true", help="only the terminal view")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.terminal:
        asyncio.run(show_terminal(arguments.out))
        return
    asyncio.run(show_crowd(arguments.out))
    if not arguments.crowd:
        asyncio.run(show_run(arguments.out))


if __name__ == "__main__":
    main()
