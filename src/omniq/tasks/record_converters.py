"""Converters of classes with fields: dataclasses, attrs, named tuples, msgspec and pydantic."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import timedelta
from fractions import Fraction
from functools import cached_property
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from pathlib import PurePath
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from omniq.errors import SerializationError
from omniq.tasks.converters import TEXT_FORMS, Converter, called, refuse, type_name

_MSGSPEC_TYPES = (bytes, timedelta, *TEXT_FORMS)


def _read_fraction(text: str) -> Fraction:
    if "e" in text.lower():
        # No fraction is written with an exponent, and 1e999999999 would fill the memory.
        raise ValueError("it has an exponent")
    return Fraction(text)


_AS_TEXT = (
    *(IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network, ZoneInfo),
)
AS_TEXT: dict[type, Callable[[str], Any]] = {
    **{kind: kind for kind in _AS_TEXT},
    Fraction: _read_fraction,
}
"""Classes whose instances become text, and how they are made from it."""


FindFields = Callable[[], Mapping[str, Converter]]
"""Finds the converters of the fields of a class. Called later: a class may contain itself."""


class TypedDictionary:
    """A dictionary with a type for each key. Unknown keys stay as they are."""

    def __init__(self, kind: Any, required: Set[str]) -> None:
        self.name = kind.__name__
        # A dictionary that contains itself is not plain: that ends the recursion.
        self.is_plain = False
        self._required = required
        self._items: Mapping[str, Converter] = {}

    def complete(self, items: Mapping[str, Converter]) -> None:
        """Set the converters of its items. They may contain this converter."""
        self._items = items
        self.is_plain = all(item.is_plain for item in items.values())

    def dump(self, value: Any, where: str) -> Any:
        items = self._checked(value, where)
        return {
            key: self._items[key].dump(item, f"{where}[{key!r}]") if key in self._items else item
            for key, item in items.items()
        }

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        items = self._checked(value, where)
        if exact:
            refuse_unknown(items, self._items, self, where)
        return {
            key: self._items[key].load(item, f"{where}[{key!r}]", exact=exact)
            if key in self._items
            else item
            for key, item in items.items()
        }

    def _checked(self, value: Any, where: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            refuse(value, self, where)
        if missing := sorted(self._required - value.keys()):
            raise missing_fields(self, missing, where)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass or an attrs class. `parameter`: its name in `__init__`, if it has one."""

    name: str
    parameter: str | None
    is_required: bool


def dataclass_fields(kind: type) -> list[_Field]:
    """The fields of a dataclass."""
    nothing = dataclasses.MISSING
    return [
        _Field(
            field.name,
            field.name if field.init else None,
            field.init and field.default is nothing and field.default_factory is nothing,
        )
        for field in dataclasses.fields(kind)
    ]


def attrs_fields(kind: Any) -> list[_Field]:
    """The fields of an attrs class."""
    nothing = sys.modules["attr"].NOTHING
    return [
        _Field(
            field.name,
            # Older versions have no aliases; they leave out the underscores.
            (getattr(field, "alias", None) or field.name.lstrip("_")) if field.init else None,
            field.init and field.default is nothing,
        )
        for field in kind.__attrs_attrs__
    ]


def _other_parameters(kind: type, fields: list[_Field]) -> list[str]:
    """The parameters that a call of the class needs and that are not fields, such as an `InitVar`."""
    given = {field.parameter for field in fields}
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:
        # A class without a signature, such as one that is made in C.
        return []
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in given
    ]


class Record:
    """A dataclass or an attrs class: becomes a dictionary, and is made by calling the class."""

    is_plain = False

    def __init__(self, kind: type, fields: list[_Field], find: FindFields) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._fields = fields
        self._required = {field.name for field in fields if field.is_required}
        self._other_parameters = _other_parameters(kind, fields)
        self._find = find

    @cached_property
    def _converters(self) -> Mapping[str, Converter]:
        return self._find()

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, self._kind):
            self.load(value, where)
            return value
        refuse_subclass(value, self._kind, where)
        if self._other_parameters:
            names = ", ".join(self._other_parameters)
            raise SerializationError(
                f"{self.name} cannot be made from its fields: it also takes {names}", path=where
            )
        return {
            field.name: self._converters[field.name].dump(
                getattr(value, field.name), f"{where}.{field.name}"
            )
            for field in self._fields
            # A field that `__init__` does not set may have no value.
            if hasattr(value, field.name)
        }

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._kind):
            return value
        if not isinstance(value, dict):
            refuse(value, self, where)
        if exact:
            refuse_unknown(value, [field.name for field in self._fields], self, where)
        if missing := sorted(self._required - value.keys()):
            raise missing_fields(self, missing, where)
        arguments, others = {}, {}
        for field in self._fields:
            if field.name in value:
                converter = self._converters[field.name]
                item = converter.load(value[field.name], f"{where}.{field.name}", exact=exact)
                if field.parameter is None:
                    others[field.name] = item
                else:
                    arguments[field.parameter] = item
        made = called(lambda given: self._kind(**given), arguments, self.name, where)
        for name, item in others.items():
            # The class may be frozen.
            object.__setattr__(made, name, item)
        return made


class NamedTupleRecord:
    """A named tuple: becomes a tuple, and is made by calling the class."""

    is_plain = False

    def __init__(self, kind: Any, find: FindFields) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._find = find

    @cached_property
    def _converters(self) -> list[tuple[str, Converter]]:
        found = self._find()
        return [(name, found[name]) for name in self._kind._fields]

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, self._kind):
            self.load(value, where)
            return value
        refuse_subclass(value, self._kind, where)
        return tuple(
            converter.dump(item, f"{where}.{name}")
            for (name, converter), item in zip(self._converters, value, strict=True)
        )

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._kind):
            return value
        if not isinstance(value, list | tuple):
            refuse(value, self, where)
        if len(value) > len(self._converters):
            raise SerializationError(f"too many items for {self.name}", path=where)
        items = [
            converter.load(item, f"{where}.{name}", exact=exact)
            for (name, converter), item in zip(self._converters, value, strict=False)
        ]
        return called(lambda given: self._kind(*given), items, self.name, where)


class StructRecord:
    """A msgspec class: converted by msgspec, with its own rules for names, tags and constraints."""

    is_plain = False

    def __init__(
        self, kind: type[msgspec.Struct], annotation: Any, make: Callable[[Any], Converter]
    ) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._annotation = annotation
        self._make = make
        tag = kind.__struct_config__.tag_field
        self._known = {*kind.__struct_encode_fields__, *([tag] if tag else [])}

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, self._kind):
            self.load(value, where)
            return value
        refuse_subclass(value, self._kind, where)
        try:
            plain = msgspec.to_builtins(
                value, builtin_types=_MSGSPEC_TYPES, enc_hook=self._dump_other
            )
        except Exception as error:
            # Also an error of a converter.
            raise SerializationError(f"{self.name}: {error}", path=where) from error
        # msgspec checks types when it reads, not when a value is made.
        self.load(plain, where)
        return plain

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._kind):
            return value
        if exact and isinstance(value, dict):
            refuse_unknown(value, self._known, self, where)
        try:
            return msgspec.convert(
                value, self._annotation, builtin_types=_MSGSPEC_TYPES, dec_hook=self._load_other
            )
        except Exception as error:
            # The `__post_init__` of the class may raise anything.
            raise SerializationError(f"{self.name}: {error}", path=where) from error

    def _dump_other(self, value: Any) -> Any:
        """Dump a value of a class that msgspec does not know."""
        converter = self._make(type(value))
        if converter.is_plain:
            raise TypeError(f"a value of type {type_name(value)} cannot be encoded")
        return converter.dump(value, type_name(value))

    def _load_other(self, annotation: Any, value: Any) -> Any:
        converter = self._make(annotation)
        return converter.load(value, converter.name)


class PydanticModel:
    """A pydantic model: `model_dump` writes it, and `model_validate` reads it, with all its checks."""

    is_plain = False

    def __init__(self, kind: Any) -> None:
        self.name = kind.__name__
        self._kind = kind
        # A stored model has the names of the fields; a person may also write the aliases. Before
        # pydantic 2.11, the model decides which of them are read.
        knows_names = "by_name" in inspect.signature(kind.model_validate).parameters
        self._how = {"by_alias": True, "by_name": True} if knows_names else {}

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, self._kind):
            self.load(value, where)
            return value
        refuse_subclass(value, self._kind, where)
        # Fields that were not set stay so, unless their defaults differ from call to call.
        short = self._dumped(value, where, exclude_unset=True)
        try:
            is_same = bool(self.load(short, where) == value)
        except Exception:
            # It needs the other fields, or has a comparison that fails.
            is_same = False
        if is_same:
            return short
        plain = self._dumped(value, where, exclude_unset=False)
        self.load(plain, where)
        return plain

    def _dumped(self, value: Any, where: str, *, exclude_unset: bool) -> Any:
        def dump(value: Any) -> Any:
            return _simplified(value.model_dump(round_trip=True, exclude_unset=exclude_unset))

        return called(dump, value, self.name, where)

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._kind):
            return value
        if exact and isinstance(value, dict):
            refuse_unknown(value, self._names(), self, where)
        return called(self._validate, value, self.name, where)

    def _validate(self, value: Any) -> Any:
        return self._kind.model_validate(value, strict=False, **self._how)

    def _names(self) -> set[str]:
        fields = self._kind.model_fields
        return {*fields, *(field.alias for field in fields.values() if field.alias)}


def _simplified(value: Any) -> Any:
    """The data of a model without the classes that pydantic leaves in it: it reads them from text."""
    match value:
        case enum.Enum():
            return value.value
        case Mapping():
            return {_simplified(key): _simplified(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset() | collections.deque():
            return [_simplified(item) for item in value]
        case PurePath():
            return str(value)
        case _ if isinstance(value, tuple(AS_TEXT)):
            return str(value)
        case _ if hasattr(type(value), "get_secret_value"):
            return value.get_secret_value()
        case _ if type(value).__module__.startswith("pydantic"):
            # An address of the web, and the like.
            return str(value)
        case _:
            return value


def refuse_subclass(value: Any, kind: type, where: str) -> None:
    if type(value) is not kind:
        raise SerializationError(
            f"a {type(value).__name__} would be read as {kind.__name__}, as the annotation says; "
            f"annotate it as {type(value).__name__}, or as a union",
            path=where,
        )


def refuse_unknown(
    value: Mapping[Any, Any], known: Iterable[str], converter: Converter, where: str
) -> None:
    if unknown := value.keys() - set(known):
        names = ", ".join(sorted(f"{name!r:.60}" for name in unknown))
        raise SerializationError(f"{converter.name} has no field {names}", path=where)


def missing_fields(converter: Converter, names: list[str], where: str) -> SerializationError:
    return SerializationError(f"{converter.name} needs {', '.join(map(repr, names))}", path=where)
