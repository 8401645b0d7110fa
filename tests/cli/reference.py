"""The reference page of the command line, generated from the commands.

python -m tests.cli.reference    writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omniq.cli.app import app
from omniq.cli.command import Command, Group, Option, Parameter
from omniq.cli.help_page import meaning, usage

_COMMON_OPTIONS = {"--url", "--json", "--yes"}

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"

HEAD = """# Command line

`omniq COMMAND`, or `python -m omniq COMMAND`. `omniq --version` prints the version.

Every command that uses a storage takes `--url`; without it, `OMNIQ_URL`, then `omniq.toml` or `[tool.omniq]` in
`pyproject.toml`, then `.omniq/omniq.db` in the project's folder. A command that only reads does not create a missing storage.
`--json` prints one document, or one line for each item of a list; the changelog lists every change of its keys. Tables are
for people: colours appear only on a terminal and without `NO_COLOR`, and in a pipe no line is cut. Control characters in text
from the storage are escaped. Progress bars and questions go to stderr. A command that cannot be undone asks for
confirmation; `--yes` confirms, and is required without a terminal.

A group without a command lists: `omniq tasks --status failed` is `omniq tasks list --status failed`. The beginning of an id, from
six characters on, stands for the id if no other task begins with it.

Durations are seconds or `30s`, `5m`, `2h`, `7d`; instants have a time zone: `2026-01-31T12:00Z`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | usage error |
| 3 | not found: a task, a dead letter, a schedule, a storage |
| 130 | interrupted |

An error is one line on stderr; `--debug`, anywhere on the line, adds the traceback. `omniq completion` prints the script that
completes commands, options and names in your shell.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_sections(app, "omniq"))


def _sections(group: Group, path: str) -> Iterator[str]:
    for name in group.helps:
        match group.get(name):
            case Group() as inner:
                yield from _sections(inner, f"{path} {name}")
            case Command() as command:
                yield _section(command, f"{path} {name}")


def _section(command: Command, path: str) -> str:
    heading = " ".join([path, *(usage(each) for each in command.arguments)])
    lines = [f"\n## `{heading}`\n", f"{_text(command.help)}\n", "| | |", "|---|---|"]
    lines += [f"| `{_cell(usage(each))}` | {_cell(meaning(each))} |" for each in command.arguments]
    own = [each for each in command.options if each.title not in _COMMON_OPTIONS]
    lines += [f"| `{_option(each)}` | {_cell(meaning(each))} |" for each in own]
    if not command.arguments and not own:
        lines = lines[:2]
    common = [each.title for each in command.options if each.title in _COMMON_OPTIONS]
    return "\n".join([*lines, *_common(common)]) + "\n"


def _common(names: list[str]) -> list[str]:
    return [f"\nCommon options: {', '.join(f'`{name}`' for name in names)}."] if names else []


def _option(option: Parameter) -> str:
    assert isinstance(option.shape, Option)
    names = ", ".join(sorted(option.shape.names, key=len, reverse=True))
    return names if option.kind is bool else _cell(f"{names} {option.metavar}")


def _text(help_text: str | None) -> str:
    paragraphs = (help_text or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
