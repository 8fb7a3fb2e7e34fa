"""What people type wrongly: an exit status, one sentence with cause and remedy, never a traceback. Those that need a
network are in ``tests/integration/test_bad_input.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_access_invite_code import invite

from p2pdiloco.access.invite_code import encode_invite
from tests.typed import main

pytestmark = [pytest.mark.usefixtures("own_logging"), pytest.mark.heavy]
REPAIR, NOBODY_THERE = 2, 3
NOBODY = "12D3KooWFBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvC"
DEAD = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
LLAMA = "model.kind = 'huggingface'\nmodel.config.model_type = 'llama'\nmodel.config.vocab_size = 64\n"
FILES = {
    "broken.toml": "name = \n",
    "empty.toml": "",
    "unknown.toml": "name = 'x'\ncolour = 'red'\n",
    "spaces.toml": "name = 'no spaces please'\n",
    "negative.toml": "name = 'x'\ninner.steps = -1\n",
    "words.toml": "name = 'x'\ninner.batch = 'many'\n",
    "heads.toml": "name = 'x'\nmodel.width = 30\nmodel.heads = 4\n",
    "multiple.toml": "name = 'x'\nschedule.fragments = 3\nschedule.sync_every = 10\n",
    "warmup.toml": "name = 'x'\ninner.steps = 10\ninner.warmup = 50\n",
    "codec.toml": "name = 'x'\ncodec.up = 'int3'\n",
    "optimizer.toml": "name = 'x'\ninner.optimizer = 'adam'\n",
    "nowhere.toml": "name = 'x'\ndata.kind = 'files'\ndata.path = '/nowhere'\n",
    "external.toml": "name = 'x'\nmodel.kind = 'external'\n",
    "stepless.toml": "name = 'x'\n",
    "pathless.toml": "name = 'x'\ndata.kind = 'text'\n",
    "llama.toml": f"name = 'x'\n{LLAMA}data.kind = 'text'\ndata.path = 'docs'\n",
    "weightless.toml": "name = 'x'\nmodel.kind = 'huggingface'\nmodel.folder = 'docs'\ndata.kind = 'stdlib'\n",
    "notes.txt": "no journal, no key, no checkpoint",
    "docs/a.txt": "a document\n",
    "state-of-nothing/readme.txt": "nothing",
    "half/checkpoint/state-00000001.json": "{",
}
MISUSES: list[tuple[str, int, list[str]]] = [
    # commands and options
    ("", REPAIR, ["COMMAND"]),
    ("strat", REPAIR, ["there is no command strat", "did you mean start?"]),
    ("jion ADDR", REPAIR, ["did you mean join?"]),
    ("exprot x", REPAIR, ["did you mean export?"]),
    ("xyzzy", REPAIR, ["there is no command xyzzy"]),
    ("start stdlib-tiny --bootsrap x", REPAIR, ["there is no option --bootsrap", "did you mean --bootstrap?"]),
    ("join x --devcie cuda", REPAIR, ["did you mean --device?"]),
    ("generate x --temprature 1", REPAIR, ["did you mean --temperature?"]),
    ("members ad", REPAIR, ["there is no command members ad", "did you mean members add?"]),
    ("members ban", REPAIR, ["PEER|INVITE"]),
    ("watch --follow", REPAIR, ["--follow belongs to the list of events: add --events"]),
    ("watch docs --kind joined --page 8000", REPAIR, ["--kind belongs to the list of events: add --events"]),
    ("watch docs --events --page 8000", REPAIR, ["--page and --events", "choose one"]),
    ("watch --events http://127.0.0.1:1", REPAIR, ["http://127.0.0.1:1 is a page already", "name a folder"]),
    ("watch docs --page off", REPAIR, ["--page", "'off' is not a port"]),
    ("watch docs --page 8000", REPAIR, ["no peer has logged anything below docs"]),
    ("start stdlib-tiny --chat --page off", REPAIR, ["--chat is on the page", "leave out --page off"]),
    ("chat nobodys", REPAIR, ["nobodys"]),
    ("start", REPAIR, ["CONFIG"]),
    ("join", REPAIR, ["ADDR"]),
    ("fetch", REPAIR, ["INVITE|RUN|ADDR"]),
    ("export", REPAIR, ["RUN"]),
    ("resume", REPAIR, ["DIR"]),
    ("status", REPAIR, ["ADDR"]),
    ("start a.toml b.toml", REPAIR, ["b.toml"]),
    (f"start --bootstrap {DEAD} stdlib-tiny", REPAIR, ["CONFIG (--bootstrap takes all that follows it: put it last)"]),
    ("--state x join y", REPAIR, ["options come after the command: p2pdiloco join ..."]),
    # values
    ("join x --threads two", REPAIR, ["--threads", "'two' is not a whole number from 0 to 1024"]),
    ("join x --threads -1", REPAIR, ["--threads", "whole number from 0 to 1024"]),
    ("join x --threads 100000", REPAIR, ["--threads", "whole number from 0 to 1024"]),
    ("join x --leave-s soon", REPAIR, ["--leave-s", "'soon' is not a number of seconds from 0 to 3600"]),
    ("join x --leave-s 1e9", REPAIR, ["--leave-s", "from 0 to 3600"]),
    ("join x --checkpoint-s 0", REPAIR, ["--checkpoint-s", "from 1 to"]),
    ("join x --keep-checkpoints 0", REPAIR, ["--keep-checkpoints", "1 or more"]),
    ("join x --reattach-s -5", REPAIR, ["--reattach-s", "from 0 to 86400"]),
    ("join x --publish notes.txt", REPAIR, ["--publish", "notes.txt' is not a folder: name another one"]),
    ("join x --publish docs --publish-s 0", REPAIR, ["--publish-s", "seconds from 1 to"]),
    ("join x --publish docs --publish-keep 0", REPAIR, ["--publish-keep", "1 or more"]),
    ("join x --publish docs --on-publish no-such-program", REPAIR, ["--on-publish", "there is no command"]),
    (f"join {DEAD} --format hf", REPAIR, ["--format is for --publish DIR: add that"]),
    (f"join {DEAD} --on-publish true", REPAIR, ["--on-publish is for --publish DIR: add that"]),
    ("start stdlib-tiny --publish docs --format peft", REPAIR, ["a whole model", "--format hf"]),
    ("start stdlib-tiny --publish docs --like docs", REPAIR, ["--like is for runs of training scripts"]),
    ("join x --stay-s forever", REPAIR, ["--stay-s", "'forever' is not a number of seconds"]),
    ("join x --write-gb 0", REPAIR, ["--write-gb", "gigabytes"]),
    ("join x --spot oracle", REPAIR, ["--spot", "aws, gcp, azure"]),
    ("join x --up 20", REPAIR, ["--up", "write 2.5gbit"]),
    ("join x --up 20mb", REPAIR, ["--up", "write 2.5gbit"]),
    ("join x --down fast", REPAIR, ["--down", "write 2.5gbit"]),
    ("join x --log-level loud", REPAIR, ["--log-level", "debug"]),
    ("generate x --tokens 0", REPAIR, ["--tokens", "1 or more"]),
    ("generate x --temperature -1", REPAIR, ["--temperature", "from 0 to 100"]),
    ("generate x --seed many", REPAIR, ["--seed", "whole number"]),
    ("export x --format onnx", REPAIR, ["--format", "hf", "safetensors"]),
    ("tests.machine_sim --scenario doom", REPAIR, ["--scenario"]),
    ("start stdlib-tiny --name two/words", REPAIR, ["--name two/words", "letters, digits"]),
    ("demo --steps 0", REPAIR, ["--steps", "'0' is not a whole number from 1 to 1000000"]),
    ("demo --steps -3", REPAIR, ["--steps", "'-3' is not a whole number from 1 to"]),
    ("demo --steps nan", REPAIR, ["--steps", "whole number from 1 to"]),
    ("demo --steps 1e3", REPAIR, ["--steps", "whole number from 1 to"]),
    ("demo --steps 99999999999999999999", REPAIR, ["--steps", "whole number from 1 to"]),
    ("demo --steps 1", REPAIR, ["--steps 1 does not fit the run", "inner.warmup = 20 must be at most inner.steps = 1"]),
    ("demo --steps 40 --config stepless.toml", REPAIR, ["stepless.toml has no line such as steps = 400"]),
    ("demo --time-limit 0", REPAIR, ["--time-limit", "seconds from 1 to 86400"]),
    ("demo --time-limit nan", REPAIR, ["--time-limit", "seconds from 1 to 86400"]),
    ("demo --time-limit -1", REPAIR, ["--time-limit", "seconds from 1 to 86400"]),
    ("demo --config nothing.toml", REPAIR, ["nothing.toml: no such file"]),
    ("tests.chaos --peers 1", REPAIR, ["--peers", "whole number from 2 to 26"]),
    ("tests.chaos --peers -3", REPAIR, ["--peers", "whole number from 2 to 26"]),
    ("tests.chaos --seconds nan", REPAIR, ["--seconds", "seconds from 1 to 86400"]),
    ("tests.chaos --seconds -1", REPAIR, ["--seconds", "seconds from 1 to 86400"]),
    ("tests.chaos --seed 99999999999999999999", REPAIR, ["--seed", "whole number from 0 to"]),
    ("tests.chaos --json docs", REPAIR, ["--json", "'docs' is a folder: name a file"]),
    ("tests.chaos --json notes.txt/a.json", REPAIR, ["--json", "lies in a file, not in a folder"]),
    ("tests.machine_sim --jobs 0", REPAIR, ["--jobs", "whole number from 1 to 1024"]),
    ("tests.machine_sim --jobs -1", REPAIR, ["--jobs", "whole number from 1 to 1024"]),
    ("tests.machine_sim --fresh 0", REPAIR, ["--fresh", "whole number from 1 to"]),
    ("tests.machine_sim --fresh 99999999999999999999999", REPAIR, ["--fresh", "whole number from 1 to"]),
    ("tests.machine_sim --seeds 0-99999999999999999999999", REPAIR, ["--seeds", "at most 18 digits"]),
    ("tests.machine_sim --seeds -5", REPAIR, ["--seeds -5", "give a range such as 0-999"]),
    ("members add --max-weight nan", REPAIR, ["--max-weight", "is not a number from 0 to"]),
    ("members add --max-weight inf", REPAIR, ["--max-weight", "is not a number from 0 to"]),
    ("bootstrap --rendezvous 0.0.0.0:31337", REPAIR, ["write it as"]),
    ("bootstrap --bootstrap /ip4/127.0.0.1/tcp/4100", REPAIR, ["lacks the peer id"]),
    ("start stdlib-tiny --bootstrap /ip4/127.0.0.1/tcp/4100", REPAIR, ["lacks the peer id"]),
    # configurations
    ("start nothing.toml", REPAIR, ["nothing.toml: no such file", "shipped with p2pdiloco: llama-125m"]),
    ("start stdlib-tyni", REPAIR, ["did you mean stdlib-tiny?"]),
    ("start docs", REPAIR, ["docs: a folder, not a file", "shipped with p2pdiloco"]),
    ("start broken.toml", REPAIR, ["broken.toml", "line 1", "write lines such as"]),
    ("start empty.toml", REPAIR, ["empty.toml", "the key name is missing: add it"]),
    ("start unknown.toml", REPAIR, ["unknown.toml", "there is no key colour: there are name, access"]),
    ("start spaces.toml", REPAIR, ["spaces.toml", "letters, digits, dots, dashes and underscores"]),
    ("start negative.toml", REPAIR, ["inner.steps = -1: write a whole number of at least 1"]),
    ("start words.toml", REPAIR, ["inner.batch = 'many': write a whole number"]),
    ("start heads.toml", REPAIR, ["model.width = 30", "multiple of"]),
    ("start multiple.toml", REPAIR, ["schedule.sync_every = 10", "multiple of"]),
    ("start warmup.toml", REPAIR, ["inner.warmup"]),
    ("start codec.toml", REPAIR, ["codec.up = 'int3': choose one of auto, bf16"]),
    ("start optimizer.toml", REPAIR, ["inner.optimizer = 'adam': choose one of adamw, muon"]),
    ("start external.toml", REPAIR, ["p2pdiloco.DiLoCo"]),
    ("start nowhere.toml", REPAIR, ["/nowhere is not a folder", "--data"]),
    ("start pathless.toml", REPAIR, ["--data FOLDER"]),
    ("start stdlib-tiny --data nowhere", REPAIR, ["nowhere is not a folder", "--data"]),
    ("start llama.toml", REPAIR, ["tokenizer.json", "--tokenizer"]),
    ("start weightless.toml", REPAIR, ["config.json", "save_pretrained"]),
    # addresses
    ("join 127.0.0.1:4100", REPAIR, ["write it as /ip4/127.0.0.1/tcp/4100"]),
    ("join example.org", REPAIR, ["write it as"]),
    ("join /ip4/127.0.0.1/tcp/4100", REPAIR, ["lacks the peer id", "copy the whole address"]),
    ("status 127.0.0.1:4100", REPAIR, ["write it as"]),
    ("fetch /ip4/127.0.0.1/tcp/4100", REPAIR, ["lacks the peer id"]),
    ("fetch story", REPAIR, ["has met no directory yet", "p2pdiloco fetch ADDR --run NAME"]),
    (f"fetch story {DEAD} --run other", REPAIR, ["one run at a time"]),
    ("start stdlib-tiny --listen 0.0.0.0:99", REPAIR, ["write it as /ip4/0.0.0.0/tcp/99"]),
    ("bootstrap --listen 0.0.0.0:31337", REPAIR, ["write it as"]),
    ("bootstrap --listen /ip4/203.0.113.7/tcp/4000", REPAIR, ["no address of this machine", "--announce"]),
    (f"join {DEAD}", NOBODY_THERE, [DEAD, "connection refused", "start it again"]),
    (f"status {DEAD}", NOBODY_THERE, [DEAD, "connection refused", "start it again"]),
    # files
    ("resume nowhere", REPAIR, ["nowhere", "name a state folder"]),
    ("resume state-of-nothing", REPAIR, ["there is no checkpoint in state-of-nothing", "name a state folder"]),
    ("resume half", REPAIR, ["state-00000001.json", "use another peer's folder"]),
    ("export nowhere", REPAIR, ["nowhere is not a folder", "p2pdiloco fetch ADDR"]),
    ("export state-of-nothing", REPAIR, ["there is no checkpoint"]),
    ("generate half", REPAIR, ["state-00000001.json"]),
    ("tests.machine_sim.replay nowhere.bin", REPAIR, ["nowhere.bin: No such file", "mend the path"]),
    ("tests.machine_sim.replay notes.txt", REPAIR, ["notes.txt is not a journal", "tests.chaos"]),
    (f"join {DEAD} --identity notes.txt", REPAIR, ["notes.txt"]),
    ("tests.chaos --plan nothing", REPAIR, ["nothing"]),
    ("demo --out notes.txt", REPAIR, ["--out notes.txt is a file", "name a folder"]),
    ("demo --out docs", REPAIR, ["holds something else than a demo"]),
]


def test_there_are_many() -> None:
    assert len(MISUSES) >= 60
    assert len({words for words, _, _ in MISUSES}) == len(MISUSES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(("words", "status", "told"), MISUSES, ids=[words or "nothing" for words, _, _ in MISUSES])
def test_a_misuse_is_told_in_a_sentence(
    words: str, status: int, told: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(words.split())
    except SystemExit as error:
        ended = int(str(error.code))
    errors = [line for line in capsys.readouterr().err.splitlines() if " info " not in line and " warning " not in line]
    assert (ended, "Traceback" in "".join(errors)) == (status, False), errors
    said = [line for line in errors if line.startswith(("p2pdiloco", "python -m "))]
    assert len(said) == 1, errors
    for word in told:
        assert word in said[0]


@pytest.mark.parametrize(
    "command",
    [
        "join INVITE",
        "fetch INVITE",
        "status INVITE",
        "members ban INVITE",
        "start stdlib-tiny --bootstrap INVITE",
        "resume half --bootstrap INVITE",
    ],
)
def test_text_beside_an_invite_is_an_error_before_anything_is_made(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, before = encode_invite(invite()), sorted(here.rglob("*"))
    for other in (" junk", " " * 500 + "; touch x", "\n; touch x", "\r\n" + "junk", "\x1b[2J", text):
        words = [text + other if word == "INVITE" else word for word in command.split()]
        assert main(words) == REPAIR
        assert "copy it again" in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    [
        "demo --out old --steps -3",
        "demo --out old --steps 0",
        "demo --out old --steps 1",
        "demo --out old --time-limit nan",
        "demo --out old --config broken.toml",
        "demo --out old --config nothing.toml",
        "demo --out mine",
        "tests.chaos --out old --seconds nan",
        "tests.chaos --out old --peers 0",
        "tests.chaos --out old --seed -1",
        "tests.chaos --out old --plan broken.toml",
        "bootstrap --state new --listen 0.0.0.0:1",
        "bootstrap --state new --bootstrap junk",
        "start stdlib-tiny --state new --listen 0.0.0.0:1",
        "start stdlib-tiny --state new --bootstrap junk",
        "join junk --state new",
        "fetch /ip4/127.0.0.1/tcp/4100 --state new",
    ],
)
def test_what_is_refused_has_deleted_and_made_nothing(command: str, here: Path) -> None:
    for name in ("run.toml", "schedule.json", "peer-A/x/metrics.jsonl"):
        (here / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "old" / name).write_text("of the last recording")
    if "demo" in command:
        (here / "old" / "schedule.json").unlink()
    (here / "mine").mkdir()
    (here / "mine" / "run.toml").write_text("a run of my own")
    (here / "mine" / "thesis.tex").write_text("which no demo has written")
    before = sorted(here.rglob("*"))
    try:
        status = main(command.split())
    except SystemExit as error:
        status = int(str(error.code))
    assert status == REPAIR
    assert sorted(here.rglob("*")) == before
