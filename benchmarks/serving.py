"""How old the version is by which a server answers while two peers train, and what publishing costs.

    python -m benchmarks.serving [--python PATH] [--seconds 90] [--publish-s 10] [--only NAME] [--json FILE]
    python -m benchmarks.serving --training [--rounds 6] [--seconds 40] [--publish-s 10]

A follower publishes, and runs the server's line of docs/operating.md after each publication. The server is asked once a
second to continue a text with the same random numbers, which tells the version that wrote it (of two with the same
continuation, the older counts). ``transformers`` and ``llama.cpp`` (by llama-cpp-python, in place of llama-server) are
real. ``SGLang`` and ``vLLM`` are stand-ins of this file: they check each request by the documented interface, load the
tensors, and answer with the folder's name.

A publication is taken to contain what the follower had when it began to write its checkpoint. ``--training`` compares
the training speed of the two peers beside a follower and beside one that publishes, in turns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from safetensors import SafetensorError
from safetensors.torch import load_file

from benchmarks import bench
from benchmarks.exports import Run, built_in, store
from p2pdiloco.cli.main import main as command
from p2pdiloco.demo.local_swarm import Member, Swarm
from p2pdiloco.node.publication import latest
from p2pdiloco.node.run_creation import find_run

DOCUMENT = bench.ROOT / "docs" / "operating.md"
PROMPT, TOKENS, SEED = "def ", 16, 1
START_S = 400.0
ASK_S = 1.0
WARM_S = 15.0
ENDLESS = 1_000_000
COLUMNS: tuple[bench.Column, ...] = (
    ("commit to answer, s: median", "commit_median_s", ".1f"),
    ("largest", "commit_most_s", ".1f"),
    ("largest age of a version in an answer, s", "age_most_s", ".1f"),
    ("publications", "publications", "d"),
    ("CPU s per publication", "cpu_s", ".2f"),
    ("MB written per publication", "written_mb", ".1f"),
    ("MB on disk, at most", "disk_mb", ".1f"),
)


class Server(NamedTuple):
    """A server: what it loads, and the words and the port in its line of the document that are replaced here."""

    wanted: str
    port: str
    module: str = ""
    """Needed by a real one."""
    here: tuple[str, str] = ("", "")


SERVERS = {
    "transformers": Server(
        "hf",
        "8000",
        "fastapi",
        ("transformers serve", "PYTHON -c 'from transformers.cli.transformers import main; main()' serve"),
    ),
    "llama.cpp": Server("gguf", "8080", "llama_cpp", ("llama-server -m", "PYTHON -m llama_cpp.server --model")),
    "SGLang": Server("hf", "30000"),
    "vLLM": Server("peft", "8000"),
}


def documented(name: str) -> tuple[str, str]:
    """Return how the document starts a server, and has it load a version."""
    rows = re.findall(
        rf"^\| {re.escape(name)}[^|]*\| `([^|`]*)`[^|]*\| `([^|]*)` \|[^|]*\|$", DOCUMENT.read_text(), re.MULTILINE
    )
    if len(rows) != 1:
        raise SystemExit(f"{DOCUMENT} has no line for {name}")
    start, reload = rows[0]
    return start, reload


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class StandIn(BaseHTTPRequestHandler):
    """SGLang or vLLM, as far as their documents tell what they do with a request."""

    loaded: Path | None = None
    wanted = ""
    refused: list[str]

    def do_POST(self) -> None:
        """Load a version, or answer by it."""
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/completions":
                loaded = type(self).loaded
                return self._answer(200, {"choices": [{"text": loaded.name if loaded else ""}]})
            assert self.headers["Content-Type"] == "application/json", self.headers["Content-Type"]
            type(self).loaded = self._checked(body)
            self._answer(200, {"success": True})
        except (AssertionError, KeyError, OSError, TypeError, ValueError, SafetensorError) as error:
            self.refused.append(f"{self.path}: {error!r}")
            self._answer(400, {"error": repr(error)})

    def _checked(self, body: dict[str, Any]) -> Path:
        """Check a request to load a version, and load it."""
        if self.wanted == "hf":
            assert self.path == "/update_weights_from_disk"
            assert set(body) == {"model_path"}, body
            folder = Path(body["model_path"])
            needed = ("config.json", "model.safetensors")
        else:
            assert self.path == "/v1/load_lora_adapter"
            assert set(body) <= {"lora_name", "lora_path", "load_inplace"}, body
            assert type(self).loaded is None or body.get("load_inplace") is True, "this adapter is loaded already"
            folder = Path(body["lora_path"])
            needed = ("adapter_config.json", "adapter_model.safetensors")
        json.loads((folder / needed[0]).read_text())
        assert load_file(folder / needed[1])
        return folder

    def _answer(self, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving(server: Server, start: str, port: int, folder: Path) -> Iterator[list[str]]:
    """Run a server while entered. Yields what a stand-in has refused."""
    if server.module:
        with open(folder / "server.log", "wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", start], cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield []
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return
    refused: list[str] = []
    handler = type("Handler", (StandIn,), {"wanted": server.wanted, "refused": refused})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield refused
        http.shutdown()


# -- measuring ---------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a server wrote, and when the answer was there."""

    at: float
    text: str


def ask(port: int, model: str) -> str | None:
    """Return the continuation by a server; None if it does not answer."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "seed": SEED, "temperature": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60.0) as reply:
            return str(json.load(reply)["choices"][0]["text"])
    except (OSError, ValueError, KeyError):
        return None


def expected(folder: Path) -> str:
    """Return the continuation by the version in ``folder``, by transformers in this process."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = torch.tensor([list(PROMPT.encode())])
    torch.manual_seed(SEED)
    how = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 1.0}
    found = model.generate(given, attention_mask=torch.ones_like(given), **how)
    return bytes(found[0, given.shape[1] :].tolist()).decode(errors="replace")


def expected_by(server: Server, start: str, port: int, folder: Path) -> str:
    """Return the continuation by a server that is started for one version."""
    with serving(server, start, port, folder):
        deadline = time.monotonic() + START_S
        while (text := ask(port, "model")) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"no answer from {start}: see {folder / 'server.log'}")
            time.sleep(0.2)
    return text


def keep_copy(folder: Path, kept: Path) -> None:
    """Link the newest publication's files, so that they stay when it is removed."""
    name = latest(folder)
    if name is not None and not (kept / name).exists():
        with suppress(FileNotFoundError):  # it is removed just now
            shutil.copytree(folder / name, kept / name, copy_function=os.link)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder, each once."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            found[status.st_ino] = status.st_size
    return sum(found.values())


def worker(follower: Member) -> psutil.Process | None:
    """Return the follower's process that writes publications."""
    with suppress(psutil.Error):
        for process in psutil.Process(follower.process.pid).children(recursive=True):
            if "p2pdiloco.node.publication" in process.cmdline():
                return process
    return None


def commits(member: Member) -> dict[tuple[int, int], float]:
    """Return when a peer got each version of each shard."""
    folder = member.run_folder()
    assert folder is not None
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found: dict[tuple[int, int], float] = {}
    for line in lines:
        if line["event"] == "commit":
            found.setdefault((line["shard"], line["version"]), line["time"])
    return found


def publications(member: Member) -> dict[str, float]:
    """Return when each publication began, by its name."""
    found = re.findall(
        r"^(\S+) info .* published folder=(\S+) .*seconds=([\d.]+)", "\n".join(member.output()), re.MULTILINE
    )
    return {name: datetime.fromisoformat(at).timestamp() - float(seconds) for at, name, seconds in found}


def ages(
    made: dict[tuple[int, int], float],
    had: dict[tuple[int, int], float],
    began: dict[str, float],
    said: list[tuple[float, str]],
) -> tuple[list[float], float]:
    """Return the seconds from each commit to the first answer with it, and the largest age of a version in an answer.

    Args:
        made: when each commit was made.
        had: when the follower got it.
        began: when the follower began to write each publication.
        said: each answer: when it was there, and its publication.
    """
    first, last = said[0][0], max(began[name] for _, name in said)
    to_answer = []
    for commit in (one for one, at in had.items() if at <= last and made[one] >= first):
        answered = next(at for at, name in said if began[name] >= had[commit])
        to_answer.append(answered - made[commit])
    missing = {
        name: min((made[one] for one, at in had.items() if at > start), default=None) for name, start in began.items()
    }
    old = [at - since for at, name in said if (since := missing[name]) is not None]
    return to_answer, max(0.0, *old)


def common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def match(texts: dict[str, str], text: str) -> str | None:
    """Return the publication that wrote ``text``: of those with the longest common beginning, the oldest; None if that
    is too short."""
    lengths = {name: common(one, text) for name, one in sorted(texts.items())}
    best = max(lengths, key=lambda name: lengths[name])
    return best if lengths[best] >= len(text) // 2 else None


def adapters_run(folder: Path) -> tuple[Path, Path]:
    """Write a run that trains adapters of a small model, and its base."""
    base = folder / "base"
    run: Run = built_in(folder)
    store(run, folder / "base-state")
    assert command(["export", str(folder / "base-state"), "--out", str(base)]) == 0
    texts = (line for path in (bench.ROOT / "docs").glob("*.md") for line in path.read_text().splitlines())
    (folder / "corpus").mkdir()
    (folder / "corpus" / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    text = find_run("lora").read_text()
    for old, new in (
        ('"base"', f'"{base}"'),
        ('"corpus"', f'"{folder / "corpus"}"'),
        ("context = 512", "context = 16"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "run.toml").write_text(text.replace("steps = 2000", f"steps = {ENDLESS}"))
    return folder / "run.toml", base


def whole_run(folder: Path) -> Path:
    """Write the run of ``stdlib-tiny`` without an end."""
    text = find_run("stdlib-tiny").read_text()
    assert "steps = 360" in text
    (folder / "run.toml").write_text(text.replace("steps = 360", f"steps = {ENDLESS}"))
    return folder / "run.toml"


@contextmanager
def training(folder: Path, config: Path, *more: str) -> Iterator[tuple[Swarm, str, list[Member]]]:
    """Have two peers train while entered. Yields the swarm, its address, and the two."""
    swarm = Swarm(folder / "swarm")
    try:
        address = swarm.start_bootstrap()
        peers = [swarm.start_founder("A", config, address), swarm.join("B", address, *more)]
        wait(lambda: all(_trained(peer) for peer in peers), "training", peers)
        yield swarm, address, peers
    finally:
        swarm.stop()
        swarm.kill_leftovers()


def _trained(peer: Member) -> int:
    peer.refresh()
    return peer.view.tokens


def wait(condition: Any, what: str, members: list[Member]) -> None:
    """Wait for something.

    Raises:
        SystemExit: it takes too long, or a peer has ended.
    """
    deadline = time.monotonic() + START_S
    while not condition():
        ended = [member.name for member in members if not member.is_running]
        if ended or time.monotonic() > deadline:
            raise SystemExit(f"no {what}; ended: {ended}; logs: {[str(member.log_path) for member in members]}")
        time.sleep(0.2)


def measure(name: str, options: Any, folder: Path) -> dict[str, Any]:
    """Measure one server."""
    server = SERVERS[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place, kept = folder / "published", folder / "kept"
    kept.mkdir()
    start, reload = documented(name)
    for old, new in ((*server.here,), ("PYTHON", options.python), ("DIR", str(place))) if server.module else ():
        assert old in start or old == "DIR", start
        start = start.replace(old, new)
    start = start.replace(f"{place}/latest/model.gguf", f"{place}/latest/model.gguf --port {port}")
    start = start.replace("main()' serve", f"main()' serve --device cpu --port {port}")
    script = folder / "reload.sh"
    script.write_text(f"#!/bin/sh\ncd {folder} || exit\n{reload.replace(server.port, str(port))}\n")
    script.chmod(0o755)
    config, base = adapters_run(folder) if server.wanted == "peft" else (whole_run(folder), None)
    own = () if base is None else ("--model", str(base), "--data", str(folder / "corpus"), "--tokenizer", str(base))
    as_published = ("--format", server.wanted, *(own[:2] + own[4:]))
    how = ("--follow", "--publish", str(place), "--publish-s", str(options.publish_s), "--on-publish", str(script))
    with training(folder, config, *own) as (swarm, address, peers), serving(server, start, port, folder) as refused:
        follower = swarm.join("F", address, *how, *as_published)

        def is_warm() -> bool:
            keep_copy(place, kept)
            return len(os.listdir(kept)) >= 2 and ask(port, f"{place}/latest") is not None

        wait(is_warm, "answer", [*peers, follower])  # the first publication imports libraries
        said, began_at, most, used = [], time.monotonic(), 0, []
        while time.monotonic() - began_at < options.seconds:
            if (text := ask(port, f"{place}/latest")) is not None:
                said.append(Answer(time.time(), text))
            keep_copy(place, kept)
            most = max(most, size(place))
            if (writes := worker(follower)) is not None:
                used.append(
                    (len(publications(follower)), sum(writes.cpu_times()[:2]), writes.io_counters().write_bytes)
                )
            time.sleep(ASK_S)
        made: dict[tuple[int, int], float] = {}
        for peer in peers:
            for commit, at in commits(peer).items():
                made[commit] = min(at, made.get(commit, at))
        had, began = commits(follower), publications(follower)
    if refused:
        raise SystemExit(f"{name} refused requests: {refused[:3]}")
    texts = {}
    for one in (one for one in os.listdir(kept) if one in began):
        if server.wanted == "gguf":
            texts[one] = expected_by(server, start.replace(str(place / "latest"), str(kept / one)), port, folder)
        else:
            texts[one] = expected(kept / one) if server.module else one
    named = [(one.at, match(texts, one.text)) for one in said if one.text]
    known = [(at, one) for at, one in named if one is not None]
    if len(known) < len(named) / 2:
        raise SystemExit(f"{name}: the version of {len(named) - len(known)} of {len(named)} answers is not known")
    known = [one for one in known if one[1] != known[0][1]]  # the first was not seen to replace another
    to_answer, oldest = ages({**had, **made}, had, began, known)
    (n, cpu, written), (m, cpu_then, written_then) = used[0], used[-1]
    return {
        "commit_median_s": statistics.median(to_answer),
        "commit_most_s": max(to_answer),
        "age_most_s": oldest,
        "commits": len(to_answer),
        "publications": m - n,
        "answers": len(said),
        "answers_unknown": len(named) - len(known),
        "cpu_s": (cpu_then - cpu) / max(1, m - n),
        "written_mb": (written_then - written) / max(1, m - n) / 1e6,
        "disk_mb": most / 1e6,
    }


# -- training beside it ------------------------------------------------------------------------------------------------


def beside(options: Any, folder: Path) -> None:
    """Compare the training speed beside a follower, and beside one that publishes, in turns."""
    with training(folder, whole_run(folder)) as (swarm, address, peers):
        pairs = []
        for number in range(options.rounds):
            speeds = {}
            for publishes in (False, True) if number % 2 else (True, False):
                more = (
                    ("--publish", str(folder / "published"), "--publish-s", str(options.publish_s)) if publishes else ()
                )
                follower = swarm.join("F", address, "--follow", *more)
                place = folder / "published"
                before = latest(place)
                wait(lambda: not publishes or latest(place) != before, "publication", [*peers, follower])  # noqa: B023
                time.sleep(WARM_S)
                first, since = sum(map(_trained, peers)), time.monotonic()
                time.sleep(options.seconds)
                speeds[publishes] = (sum(map(_trained, peers)) - first) / (time.monotonic() - since)
                follower.process.terminate()
                follower.process.wait()
            pairs.append(speeds)
            print(
                json.dumps({"alone": round(speeds[False]), "published": round(speeds[True])}),
                file=sys.stderr,
                flush=True,
            )
    lost = [one[True] / one[False] - 1 for one in pairs]
    alone = [one[False] for one in pairs]
    figures = {
        "alone_tokens_per_s": statistics.median(alone),
        "published_tokens_per_s": statistics.median(one[True] for one in pairs),
        "change_median": statistics.median(lost),
        "change_least": min(lost),
        "change_most": max(lost),
        "noise": statistics.stdev(alone) / statistics.mean(alone) if len(alone) > 1 else None,
    }
    columns: tuple[bench.Column, ...] = (
        ("tokens/s beside a follower", "alone_tokens_per_s", ",.0f"),
        ("beside one that publishes", "published_tokens_per_s", ",.0f"),
        ("change, median of pairs", "change_median", "+.1%"),
        ("least", "change_least", "+.1%"),
        ("largest", "change_most", "+.1%"),
        ("standard deviation of turns without", "noise", ".1%"),
    )
    bench.write(options, "serving/training", {}, figures)
    print(bench.table("", columns, {f"every {options.publish_s:g} s": figures}))


def main() -> int:
    """Measure all servers that are there."""
    parser = bench.parser(__doc__, rows="server", has_plot=False)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the real servers")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long a server is asked, or a turn is")
    parser.add_argument("--publish-s", type=float, default=10.0, help="least seconds between two publications")
    parser.add_argument("--only", default="", help="only servers with this in their names")
    parser.add_argument("--training", action="store_true", help="compare training speeds instead")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of turns for --training")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    rows = {}
    for name, server in SERVERS.items():
        if options.only not in name or options.training:
            continue
        check = [options.python, "-c", f"import {server.module or 'sys'}"]
        if subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode:
            print(f"{name}: {options.python} cannot import {server.module}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-serving-") as folder:
            title = name if server.module else f"{name} (stand-in)"
            rows[title] = measure(name, options, Path(folder))
            bench.write(options, "serving", {"server": title}, rows[title])
            print(json.dumps({title: rows[title]}), file=sys.stderr, flush=True)
    if options.training:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-serving-") as folder:
            beside(options, Path(folder))
    else:
        print(bench.table("server", COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
