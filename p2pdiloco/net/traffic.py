"""Counts of bytes."""

from __future__ import annotations

from msgspec import Struct


class Traffic(Struct):
    """Bytes of frames since the start, without TLS's and TCP's own. ``bulk`` is payload, ``control`` all the rest."""

    sent_control: int = 0
    sent_bulk: int = 0
    received_control: int = 0
    received_bulk: int = 0

    def add(self, other: Traffic) -> None:
        self.sent_control += other.sent_control
        self.sent_bulk += other.sent_bulk
        self.received_control += other.received_control
        self.received_bulk += other.received_bulk
