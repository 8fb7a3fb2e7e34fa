"""Feeding decoders: well-formed inputs, changed in a few places, as fast as they are read.

Rules of this file:
1. A finding is an exception that is no ValueError, an input that takes longer than HANG_S of processor time, or a
   process that has grown by more than GROWTH_BYTES. Each is told with the input that did it.
2. The same seed feeds the same inputs.
"""

from __future__ import annotations

import resource
import signal
import time
from random import Random
from types import FrameType
from typing import NamedTuple

from tests.fuzz.decoders import DECODERS

HANG_S = 2.0
GROWTH_BYTES = 256 << 20
POOL = 64
"""Inputs of a decoder that are kept and changed again: those that were read to the end."""


class Finding(NamedTuple):
    """What should not be."""

    decoder: str
    what: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.decoder}: {self.what}, with {self.data[:400].hex()} ({len(self.data)} bytes)"


def fuzz(name: str, rng: Random, *, inputs: int) -> list[Finding]:
    """``inputs`` inputs for one decoder."""
    decoder, findings = DECODERS[name], []
    pool = [decoder.sample(rng) for _ in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGVTALRM, _hung)
    try:
        for number in range(inputs):
            if number % 16 == 0:
                pool[rng.randrange(len(pool))] = decoder.sample(rng)
            data = rng.choice(pool) if number % 50 == 0 else changed(rng.choice(pool), rng)
            signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
            try:
                decoder.read(data)
                if len(pool) < POOL and len(data) < 1 << 16:
                    pool.append(data)
            except ValueError:
                pass
            except Exception as error:  # noqa: BLE001 - the very thing that is looked for
                findings.append(Finding(name, f"{type(error).__name__}: {error}", data))
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, old)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > GROWTH_BYTES:
        findings.append(Finding(name, f"the process grew by {grown} bytes in {inputs} inputs", b""))
    return findings


def changed(data: bytes, rng: Random) -> bytes:
    """``data`` with one to four changes: bits, bytes, lengths, pieces left out, doubled, or out of nothing."""
    made = bytearray(data)
    for _ in range(1 + int(4 * rng.random())):
        at = int((len(made) + 1) * rng.random())
        match int(8 * rng.random()):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at % len(made)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF, rng.randrange(256)))
            case 2:
                del made[at : at + rng.randrange(1, 9)]
            case 3:
                del made[at:]
            case 4:
                made[at:at] = made[at : at + rng.randrange(1, 65)]
            case 5:
                made[at:at] = rng.randbytes(rng.randrange(1, 17))
            case 6:
                made[at : at + 4] = rng.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xdd\xff\xff\xff")
                )
            case _:
                made[at:at] = b"\x91" * rng.choice((10, 2000))
    return bytes(made[: 1 << 18])


def timed(rng: Random, seconds: float) -> tuple[dict[str, int], list[Finding]]:
    """All decoders in turns, for about so long; inputs by decoder, and findings."""
    counts, findings, end = dict.fromkeys(DECODERS, 0), [], time.monotonic() + seconds
    while time.monotonic() < end:
        for name in DECODERS:
            findings += fuzz(name, rng, inputs=500)
            counts[name] += 500
    return counts, findings


def _hung(number: int, frame: FrameType | None) -> None:
    raise RuntimeError(f"it took longer than {HANG_S:g} s")
