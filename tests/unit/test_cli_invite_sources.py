"""An invite need not stand on the command line, where other users of the machine see it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from p2pdiloco.access.invite_code import VARIABLE
from p2pdiloco.cli.main import _parse

ADDRESS = "/ip4/203.0.113.5/tcp/1/p2p/12D3KooWGC6ojBxqrUuW4JNJKUaRpQgR6TFbCbPEQ1kf6dvNYH9w"
OTHER = "/ip4/203.0.113.6/tcp/1/p2p/12D3KooWGC6ojBxqrUuW4JNJKUaRpQgR6TFbCbPEQ1kf6dvNYH9w"
COMMANDS = ("join", "fetch", "status", "doctor")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_read_from_a_file_from_standard_input_or_from_the_environment(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "invite"
    path.write_text(f"{ADDRESS}\n{OTHER}\n")
    assert _parse([command, "--invite-file", str(path)]).address == [ADDRESS, OTHER]
    monkeypatch.setattr("sys.stdin", io.StringIO(ADDRESS + "\n"))
    assert _parse([command, "-"]).address == [ADDRESS]
    monkeypatch.setenv(VARIABLE, f"{OTHER} {ADDRESS}")
    assert _parse([command]).address == [OTHER, ADDRESS]
    assert _parse([command, ADDRESS]).address == [ADDRESS], "what is given comes before the variable"
    assert _parse([command, "--invite-file", str(path), OTHER]).address == [OTHER, ADDRESS, OTHER]


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_without_any_the_ways_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse([command])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("--invite-file", "standard input", VARIABLE))


def test_a_doctor_needs_none() -> None:
    assert _parse(["doctor"]).address == []


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "invite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        _parse(["join", "--invite-file", str(path)])
    assert str(path) in capsys.readouterr().err
