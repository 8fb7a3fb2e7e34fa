"""Version of this release, which pyproject.toml reads from here."""

VERSION = "0.1.0"
