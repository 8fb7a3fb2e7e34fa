"""``p2pdiloco watch``: a recording as a page, and as events. Its view in a terminal: ``test_observability_tui.py``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from test_observability_history import ANN, commit, progress
from test_observability_log_reader_playback import started, write

from p2pdiloco.cli.errors import INTERRUPTED
from p2pdiloco.cli.main import main

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.mark.heavy
@pytest.mark.parametrize("words", [["watch", "FOLDER", "--page", "auto"], ["watch", "--page", "auto"]])
def test_a_folder_is_served_as_a_page(words: list[str], tmp_path: Path) -> None:
    """Without WHAT, that of ``--state``."""
    write(tmp_path / "metrics.jsonl", started(100.0, ANN), commit(110.0, 1, ANN, ann=5), progress(111.0, 5))
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    command = [sys.executable, "-m", "p2pdiloco", *words, "--state", str(tmp_path), "--speed", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        told = re.search(r"http://\S+", server.stdout.readline())
        assert told is not None
        with urllib.request.urlopen(f"{told[0].rstrip('/')}/picture.json", timeout=20) as answer:
            assert json.load(answer)["title"]["me"] == ANN
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == INTERRUPTED


def test_events_of_one_peer_and_kind_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "metrics.jsonl", started(100.0, ANN), progress(111.0, 5))
    for words in (["watch", str(tmp_path), "--events"], ["watch", "--events", "--state", str(tmp_path)]):
        assert main([*words, "--kind", "progress", "--peer", ANN[-6:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {**progress(111.0, 5), "source": ANN}
        assert main([*words, "--peer", "nobody"]) == 0
        assert capsys.readouterr().out == ""
