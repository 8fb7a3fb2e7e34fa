"""Tags the wheel by what it holds; everything else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """A wheel for any machine, if no compiler made the codec's library; else one for any Python on this kind of
    machine, since the library does not use Python's API."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, its ABI, and the machine."""
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("_native*"))
        return super().get_tag()


setup(cmdclass={"bdist_wheel": Wheel})
