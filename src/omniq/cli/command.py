"""Makes commands from functions: their parameters are the options and arguments of the command.

    @app.command()
    def show(
        task_id: Annotated[str, Argument(metavar="ID", help="Id of the task.")],
        limit: Annotated[int, Option("--limit", "-n", min=1, help="Maximum number.")] = 50,
    ) -> None:
        \"\"\"Show one task.\"\"\"

A parameter without a default is required. `bool` is a flag, `list[str]` an option that may be repeated or
an argument that takes all that follow, an enumeration one of its values. The docstring is the help.
Options and arguments may stand in any order; a negative number is an argument, and all that follows
`--`. What a command returns becomes the result of `run`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omniq.errors import OmniqError

F = TypeVar("F", bound=Callable[..., object])

HELP_NAMES = ("-h", "--help")

_BAD_USAGE = 2
_NUMBER = re.compile(r"-\.?\d.*")


class UsageError(OmniqError):
    """The command line is wrong; `path` is the command whose help says how it is right."""

    code = _BAD_USAGE

    def __init__(self, message: str, path: str) -> None:
        joint = " See" if message.endswith("?") else "; see"
        super().__init__(f"{message}{joint} {path} --help")


class HelpRequested(Exception):
    """The user asks for the help of a command, or has named none, which is `code` 2."""

    def __init__(self, command: Command | Group, path: str, code: int = 0) -> None:
        super().__init__(path)
        self.command = command
        self.path = path
        self.code = code


class Option:
    """An option of a command: its names, such as `--queue` and `-q`, and what it means.

    `complete` says what a shell offers for its value: see `omniq.cli.completion`.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        complete: str = "",
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = metavar
        self.min = min
        self.max = max
        self.complete = complete


class Argument:
    """An argument of a command, known by its place."""

    def __init__(self, *, metavar: str, help: str, complete: str = "") -> None:
        self.metavar: str | None = metavar
        self.help = help
        self.complete = complete


@dataclass(frozen=True)
class Parameter:
    """One parameter of a command's function."""

    name: str
    shape: Option | Argument
    kind: type[Any]
    """What one value is converted to; `bool` is a flag."""
    is_list: bool
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def title(self) -> str:
        """What the user calls it."""
        return _longest(self.shape.names) if isinstance(self.shape, Option) else self.metavar

    @property
    def metavar(self) -> str:
        """What stands for its value in the help."""
        if self.shape.metavar is not None:
            return self.shape.metavar
        return (
            "N" if self.kind in (int, float) else self.title.lstrip("-").replace("-", "_").upper()
        )

    @property
    def choices(self) -> list[str]:
        """The values that it can have, if they are few; those of text are in the metavar: `text|json`."""
        if issubclass(self.kind, Enum):
            return [str(each.value) for each in self.kind]
        return self.metavar.split("|") if "|" in self.metavar else []

    def converted(self, text: str) -> Any:
        """The value that the text means; raises `ValueError` with what was expected."""
        if issubclass(self.kind, Enum):
            if text not in self.choices:
                raise ValueError(f"expected one of {', '.join(self.choices)}")
            return self.kind(text)
        if self.kind not in (int, float):
            return self.kind(text)
        try:
            number = self.kind(text)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"expected {what}") from None
        low, high = (
            (self.shape.min, self.shape.max) if isinstance(self.shape, Option) else (None, None)
        )
        # Written so that NaN, too, is refused.
        if low is not None and not number >= low:
            raise ValueError(f"expected at least {low}")
        if high is not None and not number <= high:
            raise ValueError(f"expected at most {high}")
        return number


class Command:
    """A function as a command."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self.name = name
        self.function = function
        self.help = inspect.getdoc(function) or ""
        self._parameters: list[Parameter] | None = None

    @property
    def parameters(self) -> list[Parameter]:
        # Read when the command is used: the hints of all other commands need not be evaluated.
        if self._parameters is None:
            self._parameters = list(_parameters(self.function))
        return self._parameters

    @property
    def options(self) -> list[Parameter]:
        return [each for each in self.parameters if isinstance(each.shape, Option)]

    @property
    def arguments(self) -> list[Parameter]:
        return [each for each in self.parameters if isinstance(each.shape, Argument)]

    def option(self, name: str) -> Parameter | None:
        """The option of that name."""
        return next((each for each in self.options if name in _names(each)), None)

    def run(self, arguments: Sequence[str], path: str) -> object:
        """Parse the arguments and call the function; `path` is what the user has typed before."""
        values = _Line(self, path).read(arguments)
        if values is None:
            raise HelpRequested(self, path)
        return self.function(**values)


class Group:
    """Commands under one name. Without a command it runs `list`, if it has one, else shows its help.

    `lazy` names commands that are imported only when they are used: name to (where, help).
    """

    def __init__(
        self, name: str, help: str, lazy: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self.name = name
        self.help = help
        self._lazy = lazy or {}
        self._own: dict[str, Command] = {}

    def command(self, name: str | None = None) -> Callable[[F], F]:
        """A decorator that makes the function a command of this group."""

        def register(function: F) -> F:
            chosen = name or function.__name__.rstrip("_")
            self._own[chosen] = Command(chosen, function)
            return function

        return register

    @property
    def helps(self) -> dict[str, str]:
        """The first sentence of each command's help, by its name."""
        lazy = {name: help for name, (_, help) in self._lazy.items()}
        return lazy | {name: summary(command.help) for name, command in self._own.items()}

    def get(self, name: str) -> Command | Group | None:
        """The command of that name, imported if need be."""
        if name in self._lazy:
            module, _, attribute = self._lazy[name][0].partition(":")
            found = getattr(import_module(module), attribute)
            return found if isinstance(found, Group) else Command(name, found)
        return self._own.get(name)

    @property
    def lists_by_default(self) -> bool:
        return "list" in self._own

    def run(self, arguments: Sequence[str], path: str) -> object:
        """Run the command that the arguments name."""
        first = arguments[0] if arguments else ""
        if first in HELP_NAMES:
            raise HelpRequested(self, path)
        if self.lists_by_default and (not first or first.startswith("-")):
            return self._own["list"].run(arguments, f"{path} list")
        if not first:
            raise HelpRequested(self, path, _BAD_USAGE)
        command = self.get(first)
        if command is None:
            what = "option" if first.startswith("-") else "command"
            raise UsageError(f"no such {what}: {first}{_did_you_mean(first, self.helps)}", path)
        return command.run(arguments[1:], f"{path} {first}")


class _Line:
    """Reads the arguments of one command."""

    def __init__(self, command: Command, path: str) -> None:
        self._command = command
        self._path = path
        self._values: dict[str, Any] = {}
        self._placed: list[str] = []

    def read(self, arguments: Sequence[str]) -> dict[str, Any] | None:
        """The values of the function's parameters; None if the help is requested."""
        rest = iter(arguments)
        for word in rest:
            if word == "--":
                self._placed += rest
            elif word in HELP_NAMES and self._command.option(word) is None:
                return None
            elif word.startswith("--"):
                name, equals, value = word.partition("=")
                self._read_option(name, value if equals else None, rest)
            elif word.startswith("-") and len(word) > 1 and not self._is_number(word):
                self._read_short(word, rest)
            else:
                self._placed.append(word)
        self._place()
        for each in self._command.parameters:
            if each.name not in self._values:
                self._values[each.name] = self._default(each)
        return self._values

    def _is_number(self, word: str) -> bool:
        return bool(_NUMBER.fullmatch(word)) and self._command.option(word[:2]) is None

    def _read_short(self, word: str, rest: Iterator[str]) -> None:
        """One word of short options: `-y`, `-n 5`, `-n5`, `-yn5`."""
        for at in range(1, len(word)):
            option = self._command.option(f"-{word[at]}")
            if option is None or option.kind is not bool:
                value = word[at + 1 :].removeprefix("=") or None
                self._read_option(f"-{word[at]}", value, rest)
                return
            self._values[option.name] = True

    def _read_option(self, name: str, value: str | None, rest: Iterator[str]) -> None:
        option = self._command.option(name)
        if option is None:
            names = [each for option in self._command.options for each in _names(option)]
            raise self._error(f"no such option: {name}{_did_you_mean(name, names)}")
        if option.kind is bool:
            if value is not None:
                raise self._error(f"{name} takes no value")
            self._values[option.name] = True
            return
        if value is None:
            value = next(rest, None)
        if value is None:
            raise self._error(f"{name} needs a value: {name} {option.metavar}")
        self._set(option, value)

    def _set(self, parameter: Parameter, text: str) -> None:
        try:
            value = parameter.converted(text)
        except ValueError as error:
            raise self._error(f"{parameter.title} {text}: {error}") from None
        if parameter.is_list:
            self._values.setdefault(parameter.name, []).append(value)
        else:
            self._values[parameter.name] = value

    def _place(self) -> None:
        """Give the words that are no options to the arguments, in their order."""
        words = iter(self._placed)
        for argument in self._command.arguments:
            for word in words:
                self._set(argument, word)
                if not argument.is_list:
                    break
        extra = next(words, None)
        if extra is not None:
            raise self._error(f"unexpected argument: {extra}")

    def _default(self, parameter: Parameter) -> Any:
        if parameter.is_required:
            kind = "option" if isinstance(parameter.shape, Option) else "argument"
            raise self._error(f"missing {kind}: {parameter.title}")
        return parameter.default

    def _error(self, message: str) -> UsageError:
        return UsageError(message, self._path)


def summary(help: str) -> str:
    """The first paragraph of a help text, on one line.

    >>> summary("List the\\nnewest.\\n\\nMore.")
    'List the newest.'
    """
    return " ".join(help.split("\n\n")[0].split())


def _parameters(function: Callable[..., object]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        shapes = [
            each
            for each in getattr(hint, "__metadata__", ())
            if isinstance(each, Option | Argument)
        ]
        if get_origin(hint) is not Annotated or len(shapes) != 1:
            raise TypeError(
                f"{function.__qualname__}: {name} is not Annotated with one Option or Argument"
            )
        kind = _without_none(get_args(hint)[0])
        is_list = get_origin(kind) is list
        one = get_args(kind)[0] if is_list else kind
        if not (one in (str, int, float, bool, Path) or issubclass(one, Enum)):
            raise TypeError(
                f"{function.__qualname__}: {name} is {one}, which no text is converted to"
            )
        yield Parameter(name, shapes[0], one, is_list, parameter.default)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (UnionType, Union):
        return kind
    (one,) = (each for each in get_args(kind) if each is not NoneType)
    return one


def _names(option: Parameter) -> tuple[str, ...]:
    return option.shape.names if isinstance(option.shape, Option) else ()


def _longest(names: Sequence[str]) -> str:
    return max(names, key=len)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
