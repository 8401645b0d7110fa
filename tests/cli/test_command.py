"""Commands are made from functions: options, arguments, help and errors."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest

from omniq.cli.command import Argument, Command, Group, HelpRequested, Option, UsageError
from omniq.cli.help_page import print_help


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def paint(
    what: Annotated[str, Argument(metavar="WHAT", help="What to paint.")],
    more: Annotated[list[str] | None, Argument(metavar="MORE", help="More of it.")] = None,
    colour: Annotated[Colour | None, Option("--colour", "-c", help="The colour.")] = None,
    coats: Annotated[int, Option("--coats", "-n", min=1, max=9, help="How many.")] = 2,
    width: Annotated[float | None, Option("--width", min=0, help="In metres.")] = None,
    tags: Annotated[list[str] | None, Option("--tag", "-t", help="Repeatable.")] = None,
    to: Annotated[Path | None, Option("--to", metavar="FILE", help="A file.")] = None,
    wet: Annotated[bool, Option("--wet", "-w", help="Wet on wet.")] = False,
    fast: Annotated[bool, Option("--fast", "-f", help="In `--wet` weather too.")] = False,
) -> dict[str, Any]:
    """Paint something.

    With `--wet`, twice.
    """
    return {name: value for name, value in locals().items() if value not in (None, False)}


def copy(
    source: Annotated[str, Argument(metavar="FROM", help="From.")],
    target: Annotated[str, Option("--target", help="To.")],
) -> str:
    """Copy something."""
    return f"{source} {target}"


command = Command("paint", paint)


def painted(*arguments: str) -> dict[str, Any]:
    found = command.run(arguments, "omniq paint")
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("wall", {"what": "wall"}),
        ("wall door roof", {"what": "wall", "more": ["door", "roof"]}),
        ("--colour red wall", {"what": "wall", "colour": Colour.RED}),
        ("wall --colour=blue door", {"what": "wall", "colour": Colour.BLUE, "more": ["door"]}),
        ("wall -n 3", {"what": "wall", "coats": 3}),
        ("wall -n3", {"what": "wall", "coats": 3}),
        ("wall -n=3", {"what": "wall", "coats": 3}),
        ("wall -wn3", {"what": "wall", "coats": 3, "wet": True}),
        ("wall -wf", {"what": "wall", "wet": True, "fast": True}),
        ("wall --tag a -t b", {"what": "wall", "tags": ["a", "b"]}),
        ("wall -n 3 -n 4", {"what": "wall", "coats": 4}),
        ("wall --to a/b", {"what": "wall", "to": Path("a/b")}),
        ("wall --width 1e-3", {"what": "wall", "width": 0.001}),
        ("wall -1 -2.5 -.5", {"what": "wall", "more": ["-1", "-2.5", "-.5"]}),
        ("-- --wet -w", {"what": "--wet", "more": ["-w"]}),
        ("wall - door", {"what": "wall", "more": ["-", "door"]}),
        ("wall --tag=--wet", {"what": "wall", "tags": ["--wet"]}),
        ("wall --tag -t", {"what": "wall", "tags": ["-t"]}),
    ],
)
def test_a_line_becomes_the_arguments_of_the_function(line, expected):
    assert painted(*line.split()) == {"coats": 2} | expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "missing argument: WHAT"),
        ("wall --color red", "no such option: --color; did you mean --colour?"),
        ("wall -x", "no such option: -x"),
        ("wall -wx", "no such option: -x"),
        ("wall --colour green", "--colour green: expected one of red, blue"),
        ("wall --colour", "--colour needs a value: --colour COLOUR"),
        ("wall -n", "-n needs a value: -n N"),
        ("wall --wet=yes", "--wet takes no value"),
        ("wall -n 0", "--coats 0: expected at least 1"),
        ("wall -n 10", "--coats 10: expected at most 9"),
        ("wall -n 1.5", "--coats 1.5: expected a whole number"),
        ("wall --width nan", "--width nan: expected at least 0"),
        ("wall --width far", "--width far: expected a number"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_the_help(line, message):
    with pytest.raises(UsageError) as raised:
        painted(*line.split())

    joint = " See" if message.endswith("?") else "; see"
    assert str(raised.value) == f"{message}{joint} omniq paint --help"
    assert raised.value.code == 2


def test_every_argument_has_its_place_and_a_required_option_must_be_given():
    one = Command("copy", copy)

    assert one.run(["a", "--target", "b"], "omniq copy") == "a b"
    with pytest.raises(UsageError, match="unexpected argument: b"):
        one.run(["a", "b", "--target", "c"], "omniq copy")
    with pytest.raises(UsageError, match="missing option: --target"):
        one.run(["a"], "omniq copy")


def test_the_help_names_everything_and_fits_the_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(HelpRequested) as asked:
        command.run(["wall", "--help", "--nonsense"], "omniq paint")
    print_help(asked.value.command, asked.value.path)

    shown = capsys.readouterr().out
    assert shown.startswith("Usage: omniq paint [OPTIONS] WHAT [MORE…]\n\nPaint something.\n")
    assert "With --wet, twice." in shown
    assert "  -n, --coats N        How many. [default: 2]" in shown
    assert "      --to FILE        A file." in shown
    assert "<" not in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_a_group_runs_its_commands_and_lists_by_default(capsys):
    group = Group("things", "Things.")
    group.command("list")(copy)
    group.command()(paint)

    assert group.run(["paint", "wall"], "omniq things") == {"what": "wall", "coats": 2}
    assert group.run(["--target", "b", "a"], "omniq things") == "a b"
    with pytest.raises(UsageError, match="no such command: pant; did you mean paint"):
        group.run(["pant"], "omniq things")
    with pytest.raises(HelpRequested):
        group.run(["--help"], "omniq things")
    print_help(group, "omniq things")
    assert "  paint       Paint something." in capsys.readouterr().out


def test_a_parameter_without_its_shape_is_refused():
    def broken(what: str) -> None:
        """Nothing says what it is."""

    def strange(what: Annotated[set[str], Argument(metavar="X", help="X.")]) -> None:
        """No text becomes a set."""

    with pytest.raises(TypeError, match="what is not Annotated"):
        _ = Command("broken", broken).parameters
    with pytest.raises(TypeError, match="no text is converted"):
        _ = Command("strange", strange).parameters


def test_help_in_a_terminal_has_colours(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_help(command, "omniq paint")

    assert "\x1b[1mUsage:\x1b[0m" in capsys.readouterr().out
