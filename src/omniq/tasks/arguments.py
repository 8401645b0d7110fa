"""What the signature of a function says about its calls: which arguments fit, and their types.

It is read once for each function. A call is checked before it is stored; arguments and results of
classes are stored as plain data, and the worker makes them again from its own annotations.
"""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from omniq.errors import InvalidTask, SerializationError
from omniq.tasks.annotations import (
    dump_result,
    load_value,
    resolve_annotations,
    returned_type,
    rich_converter,
)
from omniq.tasks.batches import batch_of, item_hints
from omniq.tasks.context import TaskContext
from omniq.tasks.converters import Converter
from omniq.tasks.options import OTHER_WORDS, names_on
from omniq.tasks.resources import resource_parameters
from omniq.tasks.results import ResultsOf

_T = TypeVar("_T")
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class FunctionTypes:
    """The parameters and types of one function, without the context that the worker passes.

    `takes_context`: the first parameter is a `TaskContext`. `accepts(args, kwargs)`: whether the
    function can be called with these arguments. `converts_arguments`: whether an argument may have
    to be converted; most functions take plain data. `result` converts what the function returns;
    None if that is plain data. `resources` are the parameters that the worker fills in.
    """

    def __init__(self, func: Callable[..., Any], name: str) -> None:
        self._name = name
        annotated = inspect.signature(func)
        hints = hints_of(func, annotated)
        if (batch := batch_of(func)) is not None:
            hints = item_hints(name, batch, annotated, hints)
        parameters = list(annotated.parameters.values())
        self.takes_context = bool(parameters) and is_context(parameters[0], hints)
        own = parameters[self.takes_context :]
        for parameter in own:
            if is_context(parameter, hints):
                raise InvalidTask(
                    f"{name}: a TaskContext must be the first parameter, and {parameter.name} is not"
                )
        self.resources = resource_parameters(own, hints)
        names = {each.name for each in self.resources}
        if batch is not None and len(own) - len(names) != 1:
            others = ", ".join(each.name for each in own[1:] if each.name not in names)
            raise InvalidTask(
                f"{name}: a function with @batched takes one list of items, and resources; it also has "
                f"the parameter {others}"
            )
        self._arguments = _Arguments([each for each in own if each.name not in names], hints)
        self.result = rich_converter(returned_type(hints.get("return", Any)))
        self.converts_arguments = self._arguments.has_types
        self._shape = _Shape(func, self.takes_context, names)
        self.accepts = self._shape.accepts

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `InvalidTask` for arguments that the function does not accept."""
        if not self.accepts(args, kwargs):
            raise InvalidTask(f"{self._name}: {self._shape.why_not(args, kwargs)}")

    def takes_results(self, argument: int | str) -> bool:
        """Whether the parameter of an argument is annotated `Results[…]`."""
        return isinstance(self._arguments.converter_of(argument), ResultsOf)

    def dump(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, skip: type | None = None
    ) -> _Call:
        """Return the arguments as plain data. Raises `SerializationError` for one that does not fit.

        Values of the type `skip` stay as they are.
        """
        return self._named(lambda: self._arguments.dump(args, kwargs, skip))

    def load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the arguments as the annotations say. Raises `SerializationError`."""
        return self._named(lambda: self._arguments.load(args, kwargs))

    def dump_result(self, value: Any) -> Any:
        """Return the function's value as plain data. Raises `SerializationError`.

        Plain data that does not fit the annotation stays as it is: the work is done.
        """
        result = self.result
        return value if result is None else self._named(lambda: dump_result(result, value))

    def load_result(self, value: Any) -> Any:
        """Return the stored value as the annotation says. Raises `SerializationError`."""
        result = self.result
        return value if result is None else self._named(lambda: load_value(result, value, "result"))

    def with_resources(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[str, Any]
    ) -> _Call:
        """Return the arguments of a call with the resources among them, without the context."""
        new_args, new_kwargs = list(args), dict(kwargs)
        for parameter in self.resources:
            name, position = parameter.name, parameter.position
            if name in kwargs:
                # A record that omniq has not made: such a call is refused when it is enqueued.
                raise InvalidTask(f"{self._name}: {self._shape.why_not(args, kwargs)}")
            if position is not None and position <= len(new_args):
                new_args.insert(position, values[name])
            else:
                new_kwargs[name] = values[name]
        return tuple(new_args), new_kwargs

    def _named(self, convert: Callable[[], _T]) -> _T:
        try:
            return convert()
        except SerializationError as error:
            # Without its cause: pydantic quotes values in its messages.
            raise SerializationError(f"{self._name}: {error}") from None
        except RecursionError:
            raise SerializationError(f"{self._name}: a value is nested too deeply") from None


class _Arguments:
    """The converters of the parameters; a plain parameter has none."""

    def __init__(self, parameters: list[Parameter], hints: Mapping[str, Any]) -> None:
        self._positional: list[tuple[str, Converter | None]] = []
        self._named: dict[str, Converter | None] = {}
        self._others: Converter | None = None
        self._other_names: Converter | None = None
        for parameter in parameters:
            annotation = hints.get(parameter.name, Any)
            if parameter.default is None:
                # Many write `path: Path = None`.
                annotation = typing.Union[annotation, None]  # noqa: UP007
            converter = rich_converter(annotation)
            if parameter.kind in _POSITIONAL:
                self._positional.append((parameter.name, converter))
            if parameter.kind in _NAMED:
                self._named[parameter.name] = converter
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                self._others = converter
            elif parameter.kind is Parameter.VAR_KEYWORD:
                self._other_names = converter
        converters = (
            *(converter for _, converter in self._positional),
            *self._named.values(),
            *(self._others, self._other_names),
        )
        self.has_types = any(converter is not None for converter in converters)

    def dump(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], skip: type | None = None
    ) -> _Call:
        if skip is None:
            return self._converted(args, kwargs, lambda each, value, name: each.dump(value, name))
        return self._converted(
            args,
            kwargs,
            lambda each, value, name: value if isinstance(value, skip) else each.dump(value, name),
        )

    def load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return self._converted(args, kwargs, load_value)

    def converter_of(self, argument: int | str) -> Converter | None:
        """The converter of the argument at that position, or with that name."""
        if isinstance(argument, str):
            return self._named.get(argument, self._other_names)
        is_named = argument < len(self._positional)
        return self._positional[argument][1] if is_named else self._others

    def _converted(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        convert: Callable[[Converter, Any, str], Any],
    ) -> _Call:
        new_args = list(args)
        for number, value in enumerate(args):
            if number < len(self._positional):
                name, converter = self._positional[number]
            else:
                name, converter = f"args[{number}]", self._others
            if converter is not None:
                new_args[number] = convert(converter, value, name)
        new_kwargs = dict(kwargs)
        for name, value in kwargs.items():
            converter = self._named.get(name, self._other_names)
            if converter is not None:
                new_kwargs[name] = convert(converter, value, name)
        return tuple(new_args), new_kwargs


class _Shape:
    """How many arguments a function takes, and with which names."""

    def __init__(
        self, func: Callable[..., Any], takes_context: bool, resources: Collection[str]
    ) -> None:
        self._resources = resources
        # What Python itself checks. A decorator may pass arguments to the function that it wraps, so
        # that the signature of that one says nothing about the call.
        parameters = list(inspect.signature(func, follow_wrapped=False).parameters.values())
        if takes_context and parameters and parameters[0].kind in _POSITIONAL:
            del parameters[0]
        parameters = [each for each in parameters if each.name not in resources]
        self._signature = inspect.Signature(
            [each.replace(annotation=Parameter.empty) for each in parameters]
        )
        kinds = {each.kind for each in parameters}
        positional = [each for each in parameters if each.kind in _POSITIONAL]
        required = [each for each in parameters if _is_required(each)]
        self._most = math.inf if Parameter.VAR_POSITIONAL in kinds else len(positional)
        self._takes_any_name = Parameter.VAR_KEYWORD in kinds
        # Where a named argument stands; after all others if it can only be named.
        self._places = {
            each.name: number for number, each in enumerate(parameters) if each.kind in _NAMED
        }
        self._required = len(required)
        self._required_names = {each.name for each in required}
        self._required_places = sum(each.kind in _POSITIONAL for each in required)
        has_required_names = self._required_places < self._required
        self._least = math.inf if has_required_names else self._required

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the function can be called with these arguments. Counts, which is fast."""
        given = len(args)
        if not kwargs:
            return self._least <= given <= self._most
        found = min(given, self._required_places)
        for name in kwargs:
            place = self._places.get(name)
            if place is None:
                if not self._takes_any_name or name in self._resources:
                    return False
            elif place < given:
                return False
            else:
                found += name in self._required_names
        return given <= self._most and found == self._required

    def why_not(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What is wrong with arguments that the function does not accept."""
        for name in kwargs:
            if name in self._resources:
                return f"{name} is a resource, which the worker makes: leave it out"
        unknown = [name for name in kwargs if name not in self._places]
        if not unknown or self._takes_any_name:
            return f"{self._complaint(args, kwargs)}; it takes {self._signature}"
        name = unknown[0]
        options = names_on("options")
        option = name if name in options else OTHER_WORDS.get(name.lstrip("_"))
        if option in options:
            value = kwargs[name]
            shown = f"{value!r:.20}" if isinstance(value, int | float) else "…"
            return f"{name} is an option: queue.options({option}={shown}).enqueue(…)"
        why = f"unexpected keyword argument {name!r}"
        if close := difflib.get_close_matches(name, self._places, 1):
            return f"{why}; did you mean {close[0]!r}?"
        return f"{why}; it takes {self._signature}"

    def _complaint(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        if len(args) > self._most:
            return "too many positional arguments"
        twice = [name for name in kwargs if self._places.get(name, math.inf) < len(args)]
        if twice:
            return f"multiple values for argument {twice[0]!r}"
        missing = [
            parameter.name
            for place, parameter in enumerate(self._signature.parameters.values())
            if _is_required(parameter)
            and (parameter.name not in self._places or parameter.name not in kwargs)
            and (place >= len(args) or parameter.kind not in _POSITIONAL)
        ]
        plural = "s" if len(missing) > 1 else ""
        names = ", ".join(map(repr, missing))
        return f"missing {'a ' if not plural else ''}required argument{plural}: {names}"


def _is_required(parameter: Parameter) -> bool:
    is_single = parameter.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)
    return is_single and parameter.default is Parameter.empty


def hints_of(func: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The annotations of the signature as types; one that cannot be resolved is `Any`."""
    annotations = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not Parameter.empty
    }
    if signature.return_annotation is not signature.empty:
        annotations["return"] = signature.return_annotation
    return resolve_annotations(annotations, getattr(inspect.unwrap(func), "__globals__", {}))


def is_context(parameter: Parameter, hints: Mapping[str, Any]) -> bool:
    """Whether the worker passes the `TaskContext` for this parameter."""
    hint = hints.get(parameter.name)
    if isinstance(parameter.annotation, str) and hint is Any:
        # It may name what exists for type checkers only; then the text decides.
        return parameter.annotation.partition("[")[0].rpartition(".")[2] == TaskContext.__name__
    return hint is TaskContext or typing.get_origin(hint) is TaskContext
