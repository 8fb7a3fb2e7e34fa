"""The numbers for machines: their formats, their names, and that documents and the Grafana board use no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from test_observability_history import ANN, BOB, chronicle, commit, progress

from p2pdiloco.observability.prometheus import METRICS, PREFIX, expose
from p2pdiloco.observability.snapshot import RunSnapshot

ROOT = Path(__file__).parents[2]
KNOWN = {PREFIX + metric.name for metric in METRICS}


def picture() -> RunSnapshot:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=100, bob=300))
    told.take(progress(1.0, 500))
    told.take({"time": 1.5, "event": "fault", "peer": BOB, "what": 'x"\n\\evil{} 1'})
    return told.picture(2.0)


def families(snapshot: RunSnapshot) -> dict[str, Family]:
    """Metrics by their names, as Prometheus reads them."""
    body, _ = expose(snapshot)
    found = list(read_text(body.decode()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def value(family: Family, **labels: str) -> float:
    (sample,) = [sample for sample in family.samples if sample.labels == labels]
    return sample.value


def test_prometheus_reads_every_name_once_with_its_kind_and_labels() -> None:
    found = families(picture())
    names = {sample.name for family in found.values() for sample in family.samples}
    assert len(names) > 20
    assert names <= KNOWN
    for family in found.values():
        assert family.type in ("gauge", "counter")
        assert all((family.type == "counter") == sample.name.endswith("_total") for sample in family.samples)
    assert value(found[f"{PREFIX}peer_share_ratio"], peer="BBBBBB") == 0.75
    assert value(found[f"{PREFIX}merged_tokens"]) == 1000


def test_the_words_of_others_stay_one_short_label() -> None:
    (sample,) = families(picture())[f"{PREFIX}happened"].samples
    assert set(sample.labels) == {"what"}
    assert sample.labels["what"].isprintable()
    assert "evil{} 1" in sample.labels["what"]
    assert len(sample.labels["what"]) <= 80


def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    plain, kind = expose(picture())
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    body, kind = expose(picture(), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in read_openmetrics(body.decode())} == set(families(picture()))
    assert plain != body


def test_what_is_not_known_is_left_out() -> None:
    found = families(picture())
    assert f"{PREFIX}left_seconds" not in found
    assert f"{PREFIX}held_out_loss" not in found


def test_two_peers_with_the_same_end_are_told_apart() -> None:
    shown = picture()
    twin = msgspec.structs.replace(shown.peers[1], peer="12D3KooW" + "C" * 38 + "BBBBBB")
    found = families(msgspec.structs.replace(shown, peers=(*shown.peers, twin)))
    assert len({sample.labels["peer"] for sample in found[f"{PREFIX}peer_share_ratio"].samples}) == 3


def test_the_document_lists_them_all() -> None:
    text = (ROOT / "docs" / "watching.md").read_text()
    assert re.findall(r"^\| `(p2pdiloco_\w+)` \| (.*) \|$", text, re.MULTILINE) == [
        (PREFIX + metric.name, metric.help) for metric in METRICS
    ]
    assert "`_total` are counters, all others gauges" in text
    assert [metric.name for metric in METRICS if (metric.kind == "counter") != metric.name.endswith("_total")] == []


def test_the_board_shows_nothing_that_is_not_told() -> None:
    board = json.loads((ROOT / "peers" / "grafana" / "p2pdiloco.json").read_text())
    used = set(re.findall(rf"\b{PREFIX}\w+", json.dumps([p["targets"] for p in board["panels"]])))
    assert len(used) > 15
    assert used <= KNOWN
