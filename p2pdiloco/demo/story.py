"""What the demo's plot made happen."""

from __future__ import annotations

from p2pdiloco.demo.local_swarm import Member


class Story:
    """What happened, and when."""

    def __init__(self, began_unix: float) -> None:
        self.began_unix = began_unix
        self.killed: Member | None = None
        self.killed_unix = 0.0
        self.version_at_kill = 0
        self.late: Member | None = None
        self.bootstrap_killed_unix = 0.0
        """0: it was not."""
        self.members: list[Member] = []
        self.leftovers: list[str] = []
