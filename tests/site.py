"""What ``make site`` does before and after the site builder::

    python -m tests.site before out/docs    # docs/, and the pages that are written from docstrings
    python -m tests.site after out/site     # copy the repository's files that pages link to, and change these links

Pages of docs/ link to examples and tests outside of it, which no site builder copies.
"""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

from tests.golden import api_page, protocol_tests

ROOT = Path(__file__).parents[1]
FILES = "files"
_LINK = re.compile(r'(href=")((?:\.\./)+)([^"#?:]+)')


WRITTEN = {"api.md": api_page.page, "protocol-tests.md": protocol_tests.page}
"""Pages that are in no commit, because docstrings say it all."""


def prepare(source: Path) -> None:
    """Write all pages to ``source``."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source)
    for name, page in WRITTEN.items():
        (source / name).write_text(page(), encoding="utf-8")


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
    step, folder = sys.argv[1:]
    if step == "before":
        prepare(Path(folder))
        sys.exit()
    nowhere = complete(Path(folder))
    for link in nowhere:
        print(f"this link leads nowhere: {link}", file=sys.stderr)
    sys.exit(bool(nowhere))
