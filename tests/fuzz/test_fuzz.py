"""The short form of ``python -m tests.fuzz``, and that it would find what it looks for."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.fuzz import decoders, engine
from tests.fuzz.decoders import DECODERS, Decoder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_a_decoder_takes_or_refuses_whatever_comes(name: str) -> None:
    seed = random.randrange(2**32)
    findings = engine.fuzz(name, random.Random(seed), inputs=1000)
    assert not findings, f"python -m tests.fuzz --decoder '{name}' --seed {seed}: {findings[0]}"


@pytest.mark.parametrize("name", sorted(set(DECODERS) - {"commit"}))
def test_what_it_begins_with_is_taken_or_refused_for_what_it_says(name: str) -> None:
    """Samples are as well-formed as types can tell; of those that nothing else is asked of, some are taken."""
    rng, taken = random.Random(4), 0
    for _ in range(200):
        try:
            DECODERS[name].read(DECODERS[name].sample(rng))
            taken += 1
        except ValueError:
            continue
    assert taken or name in ("greeting", "manifest"), "nothing well-formed is fed to it"


def test_crashes_and_hangs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(data: bytes) -> None:
        if len(data) > 3:
            raise IndexError("of ours")

    def hang(data: bytes) -> None:
        while True:
            pass

    monkeypatch.setattr(engine, "HANG_S", 0.05)
    monkeypatch.setitem(decoders.DECODERS, "crash", Decoder(crash, lambda rng: b"12345"))
    monkeypatch.setitem(decoders.DECODERS, "hang", Decoder(hang, lambda rng: b""))
    assert "IndexError" in str(engine.fuzz("crash", random.Random(1), inputs=10)[0])
    assert "longer than" in str(engine.fuzz("hang", random.Random(1), inputs=1)[0])


def test_every_decoder_of_the_wire_is_among_them() -> None:
    """By name: what begins with decode, unseal, split, read or decompress, in the packages that read others' bytes."""
    fed = (ROOT / "tests" / "fuzz" / "decoders.py").read_text()
    inside = {"decode_certificate", "decode_text", "decode_statement", "read_statement"}  # of those that are there
    for package in ("wire", "net"):
        for path in sorted((ROOT / "p2pdiloco" / package).glob("*.py")):
            if path.stem == "link":
                continue  # a script and its node, on one machine
            for name in re.findall(
                r"^def ((?:decode|unseal|split|read|decompress)\w*)\(", path.read_text(), re.MULTILINE
            ):
                assert name in fed or name in inside, f"{path}: {name}"
