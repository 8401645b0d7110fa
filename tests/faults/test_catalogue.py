"""The published table of faults matches the tests that are marked with them."""

from __future__ import annotations

from tests.faults import catalogue


def test_the_catalogue_has_every_number_once():
    assert list(catalogue.faults()) == [f"F{number:02}" for number in range(1, 101)]


def test_every_fault_has_a_test_or_the_reason_why_not():
    tests = catalogue.marked()
    bare = [n for n in catalogue.faults() if not tests.get(n) and n not in catalogue.OPEN]

    assert bare == []
    assert [number for number in catalogue.OPEN if tests.get(number)] == []
    assert set(tests) <= set(catalogue.faults())


def test_at_least_ninety_of_a_hundred_are_handled():
    assert len(catalogue.faults()) - len(catalogue.OPEN) >= 90


def test_the_page_matches_the_marked_tests():
    found = catalogue.PAGE.read_text(encoding="utf-8")

    assert found == catalogue.page(), "run: python -m tests.faults.catalogue"
