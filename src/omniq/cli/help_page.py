"""The help of a command or a group of commands, as `--help` prints it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from omniq.cli import screen
from omniq.cli.command import Argument, Command, Group, Option, Parameter
from omniq.cli.text import Text, has_colours

_WIDTH = 100
_MAX_INDENT = 30
_HELP = ("-h, --help", "Show this help.")
_CODE = re.compile(r"`([^`]+)`")

Row = tuple[str, str]


def print_help(command: Command | Group, path: str, more: Sequence[Row] = ()) -> None:
    """Print the help on stdout; `more` are options that the command itself does not know of."""
    stream = sys.stdout
    width = min(screen.width_for(stream, in_pipe=_WIDTH), _WIDTH)
    page = _group(command, path, more) if isinstance(command, Group) else _command(command, path)
    for line in _wrapped(page, width):
        stream.write(f"{line.rendered(has_colours(stream))}\n")


Part = Text | Row
"""A paragraph, or a name with its meaning beside it."""


def _command(command: Command, path: str) -> Iterator[Part]:
    arguments = command.arguments
    yield _usage(" ".join([path, "[OPTIONS]", *(usage(each) for each in arguments)]))
    yield from _paragraphs(command.help)
    yield from _section("Arguments:", [(each.title, meaning(each)) for each in arguments])
    options = [(_names(each), meaning(each)) for each in command.options]
    yield from _section("Options:", [*options, _HELP])


def _group(group: Group, path: str, more: Sequence[Row]) -> Iterator[Part]:
    default = " Without a command: list." if group.lists_by_default else ""
    yield _usage(f"{path} COMMAND …")
    yield from _paragraphs(f"{group.help}{default}")
    yield from _section("Commands:", [*group.helps.items()])
    yield from _section("Options:", [*more, _HELP])
    yield from _paragraphs(f"`{path} COMMAND --help` explains a command.")


def _usage(text: str) -> Text:
    return Text.of(Text("Usage:", "bold"), f" {text}")


def _paragraphs(help: str) -> Iterator[Part]:
    for paragraph in help.split("\n\n"):
        yield Text()
        yield _text(" ".join(paragraph.split()))


def _section(title: str, rows: Sequence[Row]) -> Iterator[Part]:
    if rows:
        yield Text()
        yield Text(title, "bold")
        yield from rows


def usage(argument: Parameter) -> str:
    """An argument as the usage line shows it.

    Optional ones are in brackets; one that takes several words ends with an ellipsis.
    """
    name = f"{argument.title}{'…' if argument.is_list else ''}"
    return name if argument.is_required else f"[{name}]"


def _names(option: Parameter) -> str:
    assert isinstance(option.shape, Option)
    names = ", ".join(sorted(option.shape.names, key=len))
    # Options without a short name are aligned with the long names of the others.
    indent = "" if len(option.shape.names) > 1 or len(names) == len("-x") else "    "
    return f"{indent}{names}" + ("" if option.kind is bool else f" {option.metavar}")


def meaning(parameter: Parameter) -> str:
    """The help of an option or argument, with its default, and whether it is required."""
    shape = parameter.shape
    if isinstance(shape, Argument):
        return shape.help
    if parameter.is_required:
        return f"{shape.help} [required]"
    if parameter.default in (None, False):
        return shape.help
    return f"{shape.help} [default: {parameter.default}]"


def _text(content: str) -> Text:
    """The text, with what is in backticks in bold."""
    parts = _CODE.split(content)
    return Text.of(*(Text(part, "bold" if at % 2 else "") for at, part in enumerate(parts)))


def _wrapped(page: Iterator[Part], width: int) -> Iterator[Text]:
    parts = list(page)
    names = [len(part[0]) for part in parts if not isinstance(part, Text)]
    indent = min(max(names, default=0) + 4, _MAX_INDENT)
    for part in parts:
        if isinstance(part, Text):
            yield from part.wrapped(width)
            continue
        name, help = part
        first, *rest = _text(help).wrapped(max(width - indent, 20))
        head = Text.of("  ", Text(name, "cyan"))
        if len(name) + 4 > indent:
            yield head
            yield Text.of(" " * indent, first)
        else:
            yield Text.of(head, " " * (indent - 2 - len(name)), first)
        for line in rest:
            yield Text.of(" " * indent, line)
