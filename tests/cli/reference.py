"""The reference page of the command line, generated from the commands.

python -m tests.cli.reference    writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from omniq.cli.app import app

_COMMON_OPTIONS = {"--url", "--json", "--yes", "--help"}

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

An error is one line on stderr; `--debug`, anywhere on the line, adds the traceback. `omniq --install-completion` installs
completion of commands and options for your shell.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_sections(get_command(app), "omniq"))


def _sections(command: Any, path: str) -> Iterator[str]:
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            if each.invoke_without_command:
                yield _section(each, f"{path} {name}")
            yield from _sections(each, f"{path} {name}")
        else:
            yield _section(each, f"{path} {name}")


def _section(command: Any, path: str) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([path, *(_usage(each) for each in arguments)])
    lines = [f"\n## `{usage}`\n", f"{_text(command.help)}\n", "| | |", "|---|---|"]
    lines += [f"| `{_usage(each)}` | {_cell(each.help)} |" for each in arguments]
    own = [each for each in options if not _COMMON_OPTIONS & set(each.opts)]
    lines += [f"| `{_option(each)}` | {_cell(each.help)} |" for each in own]
    common = [
        name for each in options for name in each.opts if name in _COMMON_OPTIONS - {"--help"}
    ]
    if not arguments and not own:
        lines = lines[:2]
    return "\n".join([*lines, *_common(common)]) + "\n"


def _common(names: list[str]) -> list[str]:
    return [f"\nCommon options: {', '.join(f'`{name}`' for name in names)}."] if names else []


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    many = "…" if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _option(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len, reverse=True))
    if option.is_flag:
        return names
    value = option.metavar or max(option.opts, key=len).lstrip("-").upper()
    return f"{names} {value}".replace("|", "\\|")


def _text(help_text: str | None) -> str:
    paragraphs = (help_text or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
