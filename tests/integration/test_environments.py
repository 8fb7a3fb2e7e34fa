"""Commands in environments that lack what most have: a home folder, names that are text, warnings that do not raise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
# A user id without a name, which may read everything, as Python may lie in another user's home folder.
READS = "+dac_read_search"
NAMELESS = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
NAMELESS += ["--inh-caps", READS, "--ambient-caps", READS]


def becomes_nameless() -> bool:
    """Whether this machine allows it."""
    try:
        return subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def doctor(
    folder: Path, *words: str, through: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """What ``p2pdiloco doctor`` says in ``folder``, without a home folder of that user."""
    lacking = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in lacking}
    return subprocess.run(
        [*through, sys.executable, "-m", "p2pdiloco", "doctor", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", [(), ("--state", "state")])
def test_a_user_without_name_and_home_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    if not becomes_nameless():
        pytest.skip("needs root and setpriv")
    tmp_path.chmod(0o777)
    ended = doctor(tmp_path, *words, through=NAMELESS)
    assert "Traceback" not in ended.stderr
    assert "libp2p daemon  " in ended.stdout, ended
    assert "none runs with that state folder" in ended.stdout
    assert ("HOME is not set" in ended.stderr) is (not words)


def test_a_folder_whose_name_is_no_text_and_warnings_that_are_errors(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for words in ((), ("--json",)):
        ended = doctor(folder, "--state", str(folder / "state"), *words, PYTHONWARNINGS="error", HOME=str(tmp_path))
        assert "Traceback" not in ended.stderr
        assert "starts; visible as" in ended.stdout, "the library behind it raises a warning"
        assert "state, " in ended.stdout


SAYING = """
import os, sys
from p2pdiloco.cli import export, main, peer_options

async def run(arguments):
    peer_options.say(arguments.out)
    return 0

export.run = run
sys.argv[1:] = ["export", "story", "--out", os.fsdecode(b"/caf\\xe9")]
sys.exit(main.main())
"""


def test_a_path_that_is_no_text_is_printed() -> None:
    """Where standard output is strict, as in most UTF-8 locales."""
    ended = subprocess.run(
        [sys.executable, "-c", SAYING],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "/caf\\udce9\n"), ended.stderr
