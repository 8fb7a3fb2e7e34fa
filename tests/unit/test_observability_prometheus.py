"""The numbers for machines: their format, their names, and that documents and the Grafana board use no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from test_observability_history import ANN, BOB, chronicle, commit, progress

from p2pdiloco.observability.prometheus import NAMES, PREFIX, exposition
from p2pdiloco.observability.snapshot import RunSnapshot

ROOT = Path(__file__).parents[2]
KNOWN = {PREFIX + metric.name for metric in NAMES}
LINE = re.compile(r'([a-z_0-9]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+|NaN)')


def picture() -> RunSnapshot:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=100, bob=300))
    told.take(progress(1.0, 500))
    told.take({"time": 1.5, "event": "fault", "peer": BOB, "what": 'x"\n\\evil{} 1'})
    return told.picture(2.0)


def test_each_line_is_as_prometheus_reads_it_and_every_name_is_told_once() -> None:
    text = exposition(picture())
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) > 20
    for line in samples:
        assert LINE.fullmatch(line), line
    typed = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.MULTILINE)
    assert len(typed) == len({name for name, _ in typed})
    assert {name for name, _ in typed} <= KNOWN
    assert all((kind == "counter") == name.endswith("_total") for name, kind in typed)
    assert f'{PREFIX}peer_share_ratio{{peer="BBBBBB"}} 0.75' in text
    assert f"{PREFIX}merged_tokens_total 1000" in text


def test_what_is_not_known_is_left_out() -> None:
    assert f"{PREFIX}left_seconds" not in exposition(picture())
    assert f"{PREFIX}held_out_loss" not in exposition(picture())


def test_two_peers_with_the_same_end_are_told_apart() -> None:
    shown = picture()
    twin = msgspec.structs.replace(shown.peers[1], peer="12D3KooW" + "C" * 38 + "BBBBBB")
    text = exposition(msgspec.structs.replace(shown, peers=(*shown.peers, twin)))
    labels = re.findall(r'share_ratio\{peer="([^"]+)"', text)
    assert len(set(labels)) == 3


def test_the_document_lists_them_all() -> None:
    text = (ROOT / "docs" / "watching.md").read_text()
    assert re.findall(r"^\| `(p2pdiloco_\w+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE) == [
        (PREFIX + metric.name, metric.kind, metric.help) for metric in NAMES
    ]


def test_the_board_shows_nothing_that_is_not_told() -> None:
    board = json.loads((ROOT / "peers" / "grafana" / "p2pdiloco.json").read_text())
    used = set(re.findall(rf"\b{PREFIX}\w+", json.dumps([p["targets"] for p in board["panels"]])))
    assert len(used) > 15
    assert used <= KNOWN
