"""Warnings about a line that is too thin for a run, or that loses long packets, from real peers; needs root.

    python -m benchmarks.wan.thin --json out/wan/thin.jsonl
    python -m benchmarks.wan.thin --lines 64k hole --models lora

Two peers train, with the commands of README.md and the default schedule; the line is the second one's. After
``--seconds`` of training both are asked to leave, the second one first. Of its tokens, those count as merged that the
first one has. Nothing is judged: the table shows what was merged, and what the second peer said.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bench
from benchmarks.netbed.testbed import Testbed
from benchmarks.wan.homes import START_S, WORDS, Home, HomesError, gathered, wait_for
from benchmarks.wan.sites import network, on_sigterm

LEAVE_S = 120.0
THIN, LONG = "line is too thin", "long packet"
"""Words in a peer's warnings by which they are found."""


class Line(NamedTuple):
    """Line of the second peer."""

    up: str
    down: str = "16mbit"
    round_trip_ms: int = 40
    loss: float = 0.0
    mtu: int = 0

    def toml(self, name: str) -> str:
        """Return the test network with this line as TOML. The first site is the bootstrap node's."""
        site: dict[str, object] = {"up": self.up, "down": self.down} | ({"mtu": self.mtu} if self.mtu else {})
        whole: dict[str, object] = {
            "round_trip_ms": self.round_trip_ms,
            "loss": self.loss,
            "queue_ms": 200,
            "up": "50mbit",
        }
        parts = [("[defaults]", whole), ('[[site]]\nname = "hub"', {}), ('[[site]]\nname = "ann"', {})]
        return f'name = "thin-{name}"\n' + "\n".join(
            "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
            for head, values in [*parts, ('[[site]]\nname = "bob"', site)]
        )


LINES = {
    "64k": Line("64kbit"),
    "256k": Line("256kbit"),
    "1m": Line("1mbit"),
    "10m": Line("10mbit"),
    "satellite": Line("10mbit", round_trip_ms=800, loss=0.02),
    "home": Line("50mbit", "300mbit"),
    "hole": Line("10mbit", mtu=1300),
}
BUILTIN = (
    "model.width = {width}\nmodel.depth = {depth}\nmodel.heads = 4\nmodel.context = {context}\ninner.batch = {batch}\n"
)


class Model(NamedTuple):
    """Model of a run, and the number of steps between two exchanges (H)."""

    sync_every: int
    toml: str


MODELS = {
    "tiny": Model(3, BUILTIN.format(width=32, depth=2, context=64, batch=64)),
    "8M": Model(6, BUILTIN.format(width=320, depth=6, context=64, batch=8)),
    "lora": Model(
        3,
        """
inner.batch = 4
[model]
kind = "huggingface"
folder = "base"
context = 64
[model.lora]
rank = 16
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
[data]
kind = "jsonl"
path = "base/corpus"
tokenizer = "base"
""",
    ),
}


def base(folder: Path) -> Path:
    """Write a Llama of 10M random parameters, whose adapters have 1M, with a tokenizer and texts; return its folder."""
    import tokenizers
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(WORDS) + 1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    known = {word: index for index, word in enumerate(["[UNK]", *dict.fromkeys(WORDS)])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "corpus").mkdir()
    texts = (" ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(100)) for number in range(400))
    (folder / "corpus" / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def measure(made: Testbed, model: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Run the model on a testbed that is up; return what each peer has said and trained, by its name."""
    own: list[str] = []
    if model == "lora":
        where = str(base(folder / "base"))
        own = ["--model", where, "--tokenizer", where, "--data", f"{where}/corpus"]
    config = f'name = "thin"\naccess = "open"\ninner.steps = 1000000\n{MODELS[model].toml}'
    config = config.replace('"base', f'"{folder}/base')
    with gathered(made, folder, run=config, rests=True, own=own) as those:
        wait_for(
            lambda: [e for e in those.homes[1].events() if e["event"] == "current"], those.homes, START_S, "a join"
        )
        began = time.time()
        for home in those.homes:
            home.rest(False)
        time.sleep(seconds)
        ended = time.time()
        for home in reversed(those.homes):
            home.process.send_signal(signal.SIGTERM)
            home.process.wait(LEAVE_S)
        ann, bob = those.homes
        every = MODELS[model].sync_every
        return {home.name: _account(home, other, began, ended, every) for home, other in ((ann, bob), (bob, ann))}


def _account(home: Home, other: Home, began: float, ended: float, sync_every: int) -> dict[str, Any]:
    events, me = home.events(), ""
    merged, steps, tokens, told_s, told_rounds = 0, 0, 0, None, None
    told = [line for line in home.lines() if THIN in line["event"]]
    told_at = datetime.fromisoformat(told[0]["time"]).timestamp() if told else math.inf
    for event in (event for event in events if event["time"] <= ended):
        match event["event"]:
            case "learner-ready":
                me = event["learner"]
            case "progress":
                steps, tokens = event["steps"], event["tokens"]
                if event["time"] <= told_at < math.inf:
                    told_s, told_rounds = told_at - began, steps / sync_every
    for event in (event for event in other.events() if event["time"] <= ended):
        if event["event"] == "commit" and event["shard"] == 0:
            merged += event["contributors"].get(me, 0)
    return {
        "rounds": steps / sync_every,
        "merged": merged / max(1, tokens),
        "told_s": told_s,
        "told_rounds": told_rounds,
        "told": told[0]["event"] if told else "",
        "alerts": [event["text"] for event in events if event["event"] == "alert" and event["kind"] == "trouble"],
        "status": home.process.returncode,
        "ending": home.report()["ending"]["reason"],
        "long_packets": sum(LONG in line["event"] for line in home.lines()),
    }


COLUMNS = (
    ("bob's rounds", "rounds", ".0f"),
    ("merged", "merged", ".0%"),
    ("told after s", "told_s", ".0f"),
    ("rounds", "told_rounds", ".1f"),
    ("exit status", "status", "d"),
    ("long packets", "long_packets", "d"),
)


def main() -> int:
    """Measure, write and print."""
    parser = bench.parser(__doc__, rows="cell", has_keep=True)
    parser.add_argument("--lines", nargs="*", choices=LINES, default=list(LINES), help="lines of the second peer")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="what is exchanged")
    parser.add_argument("--seconds", type=float, default=90.0, help="duration of a cell")
    options = parser.parse_args()
    on_sigterm()
    results, failed = {}, []
    for model, line in itertools.product(options.models, options.lines):
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-thin-") as temporary:
            folder = Path(options.keep or temporary) / f"{model}-{line}"
            try:
                with network(LINES[line].toml(line), is_verified=not LINES[line].mtu) as made:
                    found = measure(made, model, options.seconds, folder)
            except HomesError as error:  # the other cells are worth having
                failed.append(f"{model}, {line}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
        results[f"{model}, {line}"] = found["bob"]
        bench.write(options, "wan/thin", {"model": model, "line": line}, found)
    print(bench.table("cell", COLUMNS, results))
    for text in failed:
        print("no row for", text.partition("\n")[0])
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
