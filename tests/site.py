"""Copies the repository's files that pages link to into the built site, so that these links lead somewhere there::

    python -m tests.site out/site

Pages of docs/ link to examples and tests outside of it, which no site builder copies.
"""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = "files"
_LINK = re.compile(r'(href=")((?:\.\./)+)([^"#?:]+)')


def complete(site: Path, root: Path = ROOT) -> list[str]:
    """Copy what is linked, and change the links. Returns links that lead nowhere."""
    dead = []
    for page in sorted(site.rglob("*.html")):
        depth = len(page.relative_to(site).parts) - 1
        if page.is_relative_to(site / FILES):
            continue

        def changed(link: re.Match[str], depth: int = depth, page: Path = page) -> str:
            start, up, target = link.groups()
            if up.count("/") <= depth:
                if not (page.parent / (up + target)).exists():
                    dead.append(up + target)
                return link[0]
            if not (root / target).exists():
                dead.append(up + target)
                return link[0]
            _copy(root / target, site / FILES / target)
            return f"{start}{'../' * depth}{FILES}/{target}"

        page.write_text(_LINK.sub(changed, page.read_text(encoding="utf-8")), encoding="utf-8")
    return dead


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or list a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)
        return
    target.mkdir(exist_ok=True)
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    for name in names:
        shutil.copyfile(source / name, target / name)
    lines = "".join(f'<li><a href="{escape(name)}">{escape(name)}</a></li>' for name in names)
    (target / "index.html").write_text(f"<title>{escape(source.name)}</title><ul>{lines}</ul>", encoding="utf-8")


if __name__ == "__main__":
    nowhere = complete(Path(sys.argv[1]))
    for link in nowhere:
        print(f"this link leads nowhere: {link}", file=sys.stderr)
    sys.exit(bool(nowhere))
