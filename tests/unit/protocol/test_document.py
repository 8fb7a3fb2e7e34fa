"""Each rule of docs/protocol.md has a test, each test of this folder has a rule, and a page of the site says which.

A rule is a paragraph that begins with its id in bold. A test names its rules at the beginning of its docstring.
"""

from __future__ import annotations

import re

from p2pdiloco.protocol import support
from tests.golden.protocol_tests import ID, SPECIFICATION, page, rules_of_tests

RULE = re.compile(r"(?:\A|\n\n)\*\*([A-Z]\d[a-z]?)\*\* ([A-Z`].+?[.])(?=\n\n|\n?\Z)", re.DOTALL)
"""A rule's paragraph: its id, and its sentences."""
BOLD_ID = re.compile(r"\*\*([A-Z]\d[a-z]?)\*\*")
ROW = re.compile(r"^\| ([A-Z]\d[a-z]?) \| (.+) \|$", re.MULTILINE)
"""A row of the page: a rule's id, and links to its tests."""
LINK = re.compile(r"\[`(test_\w+)`\]\([\w./]*/(test_\w+\.py)\)")


def rules() -> dict[str, str]:
    """Return the text of each rule by its id."""
    found = RULE.findall(SPECIFICATION.read_text(encoding="utf-8"))
    assert len(found) == len(dict(found)), "an id is there twice"
    return dict(found)


def listed() -> dict[str, set[tuple[str, str]]]:
    """Return the tests of each rule, as file and name, that the page lists."""
    rows = ROW.findall(page())
    assert len(rows) == len(dict(rows)), "a rule has two rows"
    return {rule: {(file, test) for test, file in LINK.findall(links)} for rule, links in rows}


def test_every_line_of_a_rule_names_a_test() -> None:
    """At least one docstring carries the rule's id, and the page lists the test."""
    text, known = SPECIFICATION.read_text(encoding="utf-8"), rules()
    assert sorted(BOLD_ID.findall(text)) == sorted(known), "an id in bold begins a paragraph of whole sentences"
    carried, on_the_page = set().union(*rules_of_tests().values()), listed()
    assert sorted(known.keys() - carried) == []
    assert sorted(rule for rule in known if not on_the_page.get(rule)) == []
    assert len(known) > 90


def test_every_test_that_a_rule_names_carries_the_rules_id() -> None:
    carried = rules_of_tests()
    named = {(rule, *test) for rule, tests in listed().items() for test in tests}
    assert named == {(rule, *test) for test, rules_of_test in carried.items() for rule in rules_of_test}


def test_every_test_carries_the_id_of_a_rule_that_is_in_the_document() -> None:
    known = rules().keys()
    assert [test for test, carried in rules_of_tests().items() if not carried or carried - known] == []


def test_no_two_tests_have_the_same_name() -> None:
    """Documents and seeded bugs find a test by its name alone."""
    names = [test for _, test in rules_of_tests()]
    assert sorted(names) == sorted(set(names))


def test_every_id_that_the_document_mentions_is_a_rule_or_the_beginning_of_some() -> None:
    text, known = SPECIFICATION.read_text(encoding="utf-8"), rules()
    mentioned = set(ID.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))
    assert {one for one in mentioned if not any(rule.startswith(one) for rule in known)} == set()


def test_the_table_of_majorities_is_that_of_the_module() -> None:
    """Both list the same rules in the same order, with the same kind of threshold."""
    assert support.__doc__ is not None
    rows = re.findall(r"^([A-Z]\d\w.*?)  .*  (\S.*)$", support.__doc__, re.MULTILINE)
    of_module = [(rules, "leading" in threshold, "most" in threshold) for rules, threshold in rows]
    section = SPECIFICATION.read_text(encoding="utf-8").split("## Majorities")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]\d\w.*?) \| .* \| (.+) \|$", section, re.MULTILINE)
    assert of_module == [(rules, "leading" in threshold, "most" in threshold) for rules, threshold in rows]
    assert len(rows) > 15
