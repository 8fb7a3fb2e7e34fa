"""Words, and the length of sentences, of the documents: ``python -m tests.readability [FILE ...]``.

A word has a letter or a digit: the bars of a table are none.

Code, tables, headings and the targets of links do not count as sentences. Generated pages are listed apart. These are
figures to look at; no test asserts them.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = "<!-- generated"
"""A page that begins with it is written by a command."""
END = re.compile(r"(?<=[.!?:])[\"')`*]*\s+(?=[A-Z`\"(*\[])")


def documents() -> list[Path]:
    """All Markdown files under version control's eyes: the root's, those in docs/, and READMEs beside code."""
    nested = [path for folder in ("docs", "tests", "benchmarks", "peers") for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *(path for path in nested if "node_modules" not in path.parts)])


def sentences(text: str) -> list[int]:
    """The number of words of each sentence in running text and lists."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( {4}|\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text)
    found = (len(one.split()) for block in blocks for one in END.split(" ".join(block.split())))
    return [words for words in found if words]


def main(names: list[str]) -> None:
    total = generated = 0
    print(f"{'words':>7} {'median':>7} {'p90':>4}  document")
    for path in [Path(name).resolve() for name in names] or documents():
        text = path.read_text(encoding="utf-8")
        words, lengths = len(re.findall(r"\S*\w\S*", text)), sorted(sentences(text)) or [0]
        is_generated = text.startswith(GENERATED)
        generated, total = generated + words * is_generated, total + words * (not is_generated)
        p90 = lengths[int(0.9 * (len(lengths) - 1))]
        note = " (generated)" if is_generated else ""
        print(f"{words:7} {statistics.median(lengths):7.0f} {p90:4}  {path.relative_to(ROOT)}{note}")
    print(f"{total:7} words in all, {generated} more in generated pages")


if __name__ == "__main__":
    main(sys.argv[1:])
