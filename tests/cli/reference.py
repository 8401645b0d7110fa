"""The page about the command line, made from the commands themselves.

python -m tests.cli.reference    writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from omniq.cli.app import app

_EVERYWHERE = {"--url", "--json", "--yes", "--help"}

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"

HEAD = """# Command line

`omniq COMMAND`, or `python -m omniq COMMAND`. Made from the commands by `python -m tests.cli.reference`; a test
compares the two.

Every command that looks at a storage takes `--url`; without it, `OMNIQ_URL`, then `omniq.toml` or `[tool.omniq]` in
`pyproject.toml`, then `.omniq/omniq.db` here. A command that only asks does not make a storage that is not there.
`--json` prints one document, or one line for each item of a list; its keys do not change without a word in the
changelog. Tables are for people: colours only on a terminal and without `NO_COLOR`, whole lines in a pipe. Whatever
comes from the storage is shown as text, control characters written out. Bars and questions go to stderr. What cannot be
undone asks first; `--yes` answers, and is needed where nobody can be asked.

Durations are seconds or `30s`, `5m`, `2h`, `7d`; instants have a zone: `2026-01-31T12:00Z`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it could not be done |
| 2 | it was asked for wrongly |
| 3 | what was named is not there: a task, a dead letter, a schedule, a storage |
| 130 | interrupted |

What went wrong is one line on stderr; `--debug`, anywhere on the line, adds the traceback. `omniq --install-completion`
teaches your shell the commands and options.
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
    own = [each for each in options if not _EVERYWHERE & set(each.opts)]
    lines += [f"| `{_option(each)}` | {_cell(each.help)} |" for each in own]
    also = [name for each in options for name in each.opts if name in _EVERYWHERE - {"--help"}]
    if not arguments and not own:
        lines = lines[:2]
    return "\n".join([*lines, *_also(also)]) + "\n"


def _also(names: list[str]) -> list[str]:
    return [f"\nAnd {', '.join(f'`{name}`' for name in names)}."] if names else []


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


def _text(words: str | None) -> str:
    paragraphs = (words or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(words: str | None) -> str:
    return " ".join((words or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
