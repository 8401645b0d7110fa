"""The page about task options, made from the table in `omniq.tasks.options`.

python -m tests.queue.options_page    writes it again
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from omniq.tasks.options import OPTIONS, Face, Option

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"

HEAD = """# Task options

Options decide how a task is enqueued and run. `@task(…)` sets options for a function, `queue.options(…)` for the calls that follow, and
`queue.schedules.add(…)` for the tasks of a schedule; `omniq enqueue` and `omniq schedules add` have them as flags. An option
of a call overrides `@task`, which overrides the settings. Durations are seconds or `timedelta`, and `30s`, `5m`, `2h` or `7d` on
the command line. A wrong value raises `InvalidTask` before anything is stored.

This page is generated from the table in `omniq.tasks.options` by `python -m tests.queue.options_page`; a test compares the two.

"""


def page() -> str:
    """The whole page."""
    faces = get_args(Face)
    heads = ["option", "type", "default", "meaning", *(f"`{face}`" for face in faces)]
    lines = [_line(heads), _line(["---"] * 4 + [":-:"] * len(faces))]
    return HEAD + "\n".join([*lines, *map(_row, OPTIONS.values())]) + "\n"


def _row(option: Option) -> str:
    marks = ["✓" if face in option.faces else "" for face in get_args(Face)]
    return _line([f"`{option.name}`", option.type, option.default, option.help, *marks])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
