"""SECURITY.md lists all kinds of attack, and each has a test where the list says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\| (S\d\d) \| [^|]+ \| `([^`]+)` \|$", re.MULTILINE)


def listed() -> dict[str, str]:
    return dict(LINE.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8")))


def test_the_list_is_in_order_and_has_no_number_twice():
    numbers = [number for number, _ in LINE.findall((ROOT / "SECURITY.md").read_text("utf-8"))]

    assert numbers == sorted(set(numbers))
    assert {f"S{number:02}" for number in range(1, 62)} <= set(numbers)


def test_each_attack_is_tested_where_the_list_says():
    """By a mark, or, in the files of the dashboard, by a heading."""
    missing = []
    for number, place in listed().items():
        text = (ROOT / place).read_text(encoding="utf-8")
        marks = re.findall(r"@pytest\.mark\.security\(([^)]*)\)", text)
        is_marked = any(f'"{number}"' in mark for mark in marks)
        is_headed = not marks and _has_heading(number, text)
        if not is_marked and not is_headed:
            missing.append((number, place))

    assert missing == []


def _has_heading(number: str, text: str) -> bool:
    spans = re.findall(r"\bS(\d\d)(?: to S(\d\d))?", text)
    return any(int(low) <= int(number[1:]) <= int(high or low) for low, high in spans)
