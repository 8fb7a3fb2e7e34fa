"""How many bytes payloads take on the wire, for each parameter that they carry."""

from __future__ import annotations

from collections.abc import Sequence, Sized

FRAMING_BYTES = 256
"""Allowance for a message's control body and frame headers."""


class PayloadTraffic:
    """Sent payloads, up (contributions to owners) and down (commits from owners)."""

    def __init__(self, elements: Sequence[int]) -> None:
        self._elements = elements
        self.up_bytes = 0
        self.up_parameters = 0
        self.down_bytes = 0
        self.down_parameters = 0

    def sent_up(self, shard: int, payload: Sized, receivers: int) -> None:
        """A contribution went to ``receivers`` owners."""
        self.up_bytes += receivers * (len(payload) + FRAMING_BYTES)
        self.up_parameters += receivers * self._elements[shard]

    def sent_down(self, shard: int, payload: Sized, receivers: int) -> None:
        """A commit went to ``receivers`` peers."""
        self.down_bytes += receivers * (len(payload) + FRAMING_BYTES)
        self.down_parameters += receivers * self._elements[shard]

    def up_per_parameter(self) -> float:
        """Bytes for each parameter contributed; 0 if none was."""
        return self.up_bytes / self.up_parameters if self.up_parameters else 0.0

    def down_per_parameter(self) -> float:
        """Bytes for each parameter committed; 0 if none was."""
        return self.down_bytes / self.down_parameters if self.down_parameters else 0.0
