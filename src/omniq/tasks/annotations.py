"""From annotations to converters.

What a converter makes is decided by the annotation alone: a stored value never names a type.
Libraries are looked at only if the program has imported them: their classes cannot be named
otherwise.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import dataclasses
import enum
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, Union
from weakref import WeakKeyDictionary

import msgspec

from omniq.errors import InvalidTask, SerializationError
from omniq.serialization import TO_BASE
from omniq.tasks.converters import (
    ANYTHING,
    PLAIN,
    Converter,
    FixedTuple,
    LiteralValue,
    MappingOf,
    Plain,
    Scalar,
    SequenceOf,
    UnionOf,
    enum_converter,
    is_numpy_scalar,
)
from omniq.tasks.record_converters import (
    AS_TEXT,
    NamedTupleRecord,
    PydanticModel,
    Record,
    StructRecord,
    TypedDictionary,
    attrs_fields,
    dataclass_fields,
)
from omniq.tasks.resources import resource_of
from omniq.tasks.results import Results, ResultsOf

_SEQUENCES: dict[Any, Callable[[list[Any]], Any] | None] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.deque: collections.deque,
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
    collections.abc.MutableSequence: list,
    # These keep the type of what was passed.
    collections.abc.Sequence: None,
    collections.abc.Collection: None,
    collections.abc.Iterable: None,
}
_MAPPINGS: dict[Any, Callable[[Any], Any]] = {
    dict: dict,
    collections.OrderedDict: collections.OrderedDict,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
}
_SCALARS = (str, int, float, bytes)
"""The plain types whose subclasses are converted. Others, such as sets, have items."""

_PLAIN_DATA = frozenset({*PLAIN, list, tuple, dict, set, frozenset})
_WRAPPERS = {typing.Annotated, typing.Required, typing.NotRequired, typing.Final}


def converter_of(annotation: Any) -> Converter:
    """Return the converter of a type. A type that is not known has one that changes nothing."""
    return _Factory({}, []).make(annotation)


def rich_converter(annotation: Any) -> Converter | None:
    """Return the converter of a type; None for plain data, which needs none."""
    converter = converter_of(annotation)
    return None if converter.is_plain else converter


def result_converter(func: Callable[..., Any]) -> Converter | None:
    """Return the converter of what the function returns; None if that is plain data."""
    func = getattr(func, "__func__", func)
    try:
        if func not in _results:
            _results[func] = _find_result_converter(func)
        return _results[func]
    except TypeError:
        # A callable object that cannot be a key.
        return _find_result_converter(func)


_results: WeakKeyDictionary[Callable[..., Any], Converter | None] = WeakKeyDictionary()


def _find_result_converter(func: Callable[..., Any]) -> Converter | None:
    annotation = getattr(func, "__annotations__", {}).get("return")
    if annotation is None:
        return None
    names = getattr(inspect.unwrap(func), "__globals__", {})
    return rich_converter(
        returned_type(resolve_annotations({"return": annotation}, names)["return"])
    )


def returned_type(annotation: Any) -> Any:
    """The type of the value: what a function returns, or the awaitable that it returns."""
    if typing.get_origin(annotation) in (collections.abc.Awaitable, collections.abc.Coroutine):
        return typing.get_args(annotation)[-1]
    return annotation


def dump_result(converter: Converter, value: Any) -> Any:
    """Return a result as plain data. Plain data that does not fit stays as it is: the work is done."""
    try:
        return converter.dump(value, "result")
    except SerializationError:
        if type(value) in _PLAIN_DATA:
            return value
        raise
    except RecursionError:
        raise SerializationError("nested too deeply", path="result") from None


def load_value(converter: Converter, value: Any, where: str) -> Any:
    """Return a stored value as the annotation says."""
    try:
        return converter.load(value, where)
    except SerializationError:
        if type(value) in _PLAIN_DATA:
            raise
        # An object that a pickle has made: it is what the caller passed.
        return value


def resolve_annotations(
    annotations: Mapping[str, Any], names: dict[str, Any], own_names: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the annotations as types. One that cannot be resolved counts as `Any`.

    One after the other: a name that exists for type checkers only must not spoil the others.
    """
    found: dict[str, Any] = {}
    for name, annotation in annotations.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(holder, names, own_names, include_extras=True)
        except InvalidTask:
            # Of `Resource(…)`, which says what is wrong.
            raise
        except Exception:
            # Evaluating the text of an annotation runs it, and it may raise anything.
            found[name] = _resource_in(annotation, names)
    return found


def _resource_in(annotation: Any, names: dict[str, Any]) -> Any:
    """The resource of an annotation whose type exists for type checkers only; `Any` without one.

    Raises `InvalidTask` for a resource that cannot be made: as an ordinary parameter, a caller could pass
    a value for it.
    """
    if not isinstance(annotation, str) or "Resource(" not in annotation:
        return Any
    try:
        hint = eval(annotation, names, _Names(names))
        resource = resource_of(hint)
    except InvalidTask:
        raise
    except Exception:
        return Any
    if resource is None:
        return Any
    if resource.make is _ForTypeCheckers:
        raise InvalidTask(
            f"{annotation:.200}: its names do not exist in the module of the function; define or import "
            "what makes the resource at the top of the module, not only under TYPE_CHECKING"
        )
    return typing.Annotated[Any, resource]


class _Missing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: object) -> Any:
        return cls


class _ForTypeCheckers(metaclass=_Missing):
    """Stands for a name that exists for type checkers only."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _ForTypeCheckers)


def class_annotations(kind: type) -> dict[str, Any]:
    """The annotations of the fields of a class and of its bases, as types."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__ if not typing.is_typeddict(kind) else [kind]):
        annotations = inspect.get_annotations(base)
        module = sys.modules.get(base.__module__)
        # Its own name: a class that is defined inside of a function may contain itself.
        own_names = {**vars(base), base.__name__: base}
        found |= resolve_annotations(annotations, vars(module) if module else {}, own_names)
    return found


class _Factory:
    """Makes converters. `parameters` are the types for the type variables of a generic class.

    `made` are the converters of classes: one that contains itself has one converter. It is a list,
    because the types of a generic class may have annotations that cannot be keys.
    """

    def __init__(self, parameters: Mapping[Any, Any], made: list[tuple[Any, Converter]]) -> None:
        self._parameters = parameters
        self._made = made

    def make(self, annotation: Any) -> Converter:
        if isinstance(annotation, TypeVar):
            annotation = self._parameters.get(annotation, annotation)
        annotation = _unwrapped(annotation)
        if annotation is None:
            annotation = type(None)
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Literal:
            return LiteralValue(args)
        if origin in (Union, types.UnionType):
            return UnionOf([self.make(arg) for arg in args])
        kind = annotation if origin is None else origin
        if not isinstance(kind, type):
            return ANYTHING
        return self._of_class(kind, tuple(args))

    def _of_class(self, kind: type, args: tuple[Any, ...]) -> Converter:
        if kind in PLAIN:
            return Plain(kind)
        if kind is Results:
            return ResultsOf(self.make(args[0]) if args else ANYTHING)
        if (made := self._of_record(kind, args)) is not None:
            return made
        if (scalar := _scalar_of(kind)) is not None:
            return scalar
        return self._of_container(kind, args) or ANYTHING

    def _of_record(self, kind: type, args: tuple[Any, ...]) -> Converter | None:
        if issubclass(kind, msgspec.Struct):
            annotation = kind[args] if args else kind  # type: ignore[index]
            return StructRecord(kind, annotation, self.make)
        if _is_pydantic_model(kind):
            return PydanticModel(kind)
        key = (kind, *map(self._filled_in, args))
        for known, converter in self._made:
            if known == key:
                return converter
        variables = getattr(kind, "__parameters__", ())
        factory = _Factory(dict(zip(variables, key[1:], strict=False)), self._made)
        if typing.is_typeddict(kind):
            dictionary = TypedDictionary(kind, _required_keys(kind))
            self._made.append((key, dictionary))
            dictionary.complete(factory._fields_of(kind))
            return dictionary
        find = partial(factory._fields_of, kind)
        if dataclasses.is_dataclass(kind):
            made: Converter = Record(kind, dataclass_fields(kind), find)
        elif hasattr(kind, "__attrs_attrs__"):
            made = Record(kind, attrs_fields(kind), find)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            made = NamedTupleRecord(kind, find)
        else:
            return None
        self._made.append((key, made))
        return made

    def _fields_of(self, kind: type) -> Mapping[str, Converter]:
        hints = class_annotations(kind)
        # A field without an annotation, such as one of `collections.namedtuple`, is plain.
        return collections.defaultdict(
            lambda: ANYTHING, {name: self.make(hint) for name, hint in hints.items()}
        )

    def _of_container(self, kind: type, args: tuple[Any, ...]) -> Converter | None:
        if kind is tuple and args and args[-1] is not Ellipsis:
            return FixedTuple([self.make(arg) for arg in args if arg != ()])
        if kind is collections.defaultdict:
            return self._mapping(kind, args, _defaultdict_maker(args))
        if kind is collections.Counter:
            return self._mapping(kind, (*args[:1], int), collections.Counter)
        if kind in _MAPPINGS or issubclass(kind, dict):
            return self._mapping(kind, args, _MAPPINGS.get(kind, kind))
        if kind in _SEQUENCES or issubclass(kind, list | tuple | set | frozenset):
            item = self.make(args[0]) if args else ANYTHING
            return SequenceOf(kind, _SEQUENCES.get(kind, kind), item)
        return None

    def _mapping(self, kind: type, args: tuple[Any, ...], make: Callable[[Any], Any]) -> Converter:
        key, item = (self.make(arg) for arg in args) if len(args) == 2 else (ANYTHING, ANYTHING)
        return MappingOf(kind, make, key, item)

    def _filled_in(self, annotation: Any) -> Any:
        """The annotation with types in place of the type variables of this class."""
        if isinstance(annotation, TypeVar):
            return self._parameters.get(annotation, annotation)
        variables = getattr(annotation, "__parameters__", ())
        if variables and typing.get_origin(annotation) is not None:
            return annotation[tuple(self._parameters.get(each, each) for each in variables)]
        return annotation


def _scalar_of(kind: type) -> Converter | None:
    if issubclass(kind, enum.Enum):
        return enum_converter(kind)
    if issubclass(kind, PurePath):
        return Scalar(kind, str, kind)
    if kind is os.PathLike:
        return Scalar(kind, os.fspath, Path)
    if kind in AS_TEXT:
        return Scalar(kind, str, AS_TEXT[kind])
    if kind is bytearray:
        return Scalar(kind, bytes, bytearray, bytes)
    if hasattr(kind, "get_secret_value") and kind.__module__.startswith("pydantic"):
        return Scalar(kind, lambda value: value.get_secret_value(), kind, (str, bytes))
    if is_numpy_scalar(kind):
        return Scalar(kind, lambda value: value.item(), kind, (bool, int, float, str, bytes))
    for base in _SCALARS:
        if issubclass(kind, base):
            # An int is accepted for a float.
            accepted = (float, int) if base is float else base
            return Scalar(kind, TO_BASE[base], kind, accepted, None)
    return None


def _is_pydantic_model(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _required_keys(kind: Any) -> set[str]:
    """The keys that a dictionary must have. Python does not see the marks in annotations that are text."""
    marks = {name: typing.get_origin(hint) for name, hint in class_annotations(kind).items()}
    optional = {name for name, mark in marks.items() if mark is typing.NotRequired}
    required = {name for name, mark in marks.items() if mark is typing.Required}
    return (set(kind.__required_keys__) - optional) | required


def _defaultdict_maker(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    item = typing.get_origin(args[1]) or args[1] if len(args) == 2 else None
    default = item if item in (bool, int, float, str, list, dict, set) else None
    return lambda items: collections.defaultdict(default, items)


def _unwrapped(annotation: Any) -> Any:
    """The type inside of `Annotated`, `NewType`, a type alias and the marks of a field."""
    while True:
        origin = typing.get_origin(annotation)
        if origin in _WRAPPERS:
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType" and not typing.get_args(annotation):
            annotation = annotation.__value__
        elif isinstance(annotation, TypeVar) and annotation.__bound__ is not None:
            annotation = annotation.__bound__
        else:
            return annotation
