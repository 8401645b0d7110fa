"""Converters between values of a type and plain data, which serializers encode.

The converters of single values, of unions and of collections. `record_converters` has those of
classes with fields, and `annotations` finds the converter of an annotation.
"""

from __future__ import annotations

import collections
import enum
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn, Protocol, cast
from uuid import UUID

from omniq.errors import SerializationError
from omniq.serialization import distinct

SCALARS = (type(None), bool, int, float, str, bytes)
TEXT_FORMS: dict[type, Callable[[str], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}
"""Plain types that JSON does not have. Inside of a record they may be given as text."""

NOT_VALID = "not a valid value"
_MAX_REASON = 300

PLAIN = (*SCALARS, timedelta, *TEXT_FORMS)
_PLAIN_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})


class Converter(Protocol):
    """Converts the values of one annotation.

    `is_plain`: the values are plain data already, so that there is nothing to convert. `where` is the
    place of the value, for errors: both methods raise `SerializationError` for a value that does
    not fit.
    """

    name: str
    is_plain: bool

    def dump(self, value: Any, where: str) -> Any:
        """Return the value as plain data. Plain data that `load` accepts is returned unchanged."""
        ...

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        """Return the value as the annotation says; one that is of this type already is unchanged.

        With `exact`, a record may have no unknown fields, and no plain value is read from text.
        """
        ...


class _Anything:
    """Values that are left as they are: of `Any`, of a type variable, of an unknown class."""

    name = "Any"
    is_plain = True

    def dump(self, value: Any, where: str) -> Any:
        return value

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        return value


ANYTHING = _Anything()


class Plain:
    """One of the types that a serializer encodes itself. Checked inside of records only."""

    is_plain = True

    def __init__(self, kind: type) -> None:
        self.name = "None" if kind is type(None) else kind.__name__
        self.kind = kind
        # Every type checker takes an int for a float.
        self._accepted = (float, int) if kind is float else kind

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, self._accepted):
            item = _numpy_item(value)
            if item is value or not isinstance(item, self._accepted):
                self.load(value, where)
        return value

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._accepted):
            return value
        read = None if exact else TEXT_FORMS.get(self.kind)
        if read is None or not isinstance(value, str):
            refuse(value, self, where)
        return called(read, value, self.name, where, NOT_VALID)


class Scalar:
    """A class whose instances become one plain value, and are made from it.

    `why`: what an error says about a value that the class does not accept; None for the text of the
    exception, which often quotes the value.
    """

    is_plain = False

    def __init__(
        self,
        kind: type,
        to_plain: Callable[[Any], Any],
        from_plain: Callable[[Any], Any],
        accepted: type | tuple[type, ...] = str,
        why: str | None = NOT_VALID,
    ) -> None:
        self.name = kind.__name__
        self._kind = kind
        self._to_plain = to_plain
        self._from_plain = from_plain
        self._accepted = accepted
        self._why = why

    def dump(self, value: Any, where: str) -> Any:
        if isinstance(value, self._kind):
            return self._to_plain(value)
        self.load(value, where)
        return value

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, self._kind):
            return value
        if not isinstance(value, self._accepted):
            refuse(value, self, where)
        return called(self._from_plain, value, self.name, where, self._why)


def enum_converter(kind: type[enum.Enum]) -> Converter:
    """By their values if these are plain, else by their names."""
    is_by_value = all(isinstance(member.value, SCALARS) for member in kind)
    values = [member.value if is_by_value else member.name for member in kind]
    is_flag = issubclass(kind, enum.Flag)
    why = NOT_VALID if is_flag else f"expected {' | '.join(map(repr, values)):.{_MAX_REASON}}"
    if is_by_value:
        return Scalar(kind, lambda member: member.value, kind, SCALARS, why)
    return Scalar(kind, lambda member: member.name, lambda name: kind[name], str, why)


class LiteralValue:
    """One of a few values. Members of an enum become their plain values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.name = " | ".join(map(repr, values))
        # By type as well: 1 and True are equal.
        self._values = {(type(value), value): value for value in values}
        self._plain = {
            (type(plain), plain): value for value in values for plain in [_plain_literal(value)]
        }
        self.is_plain = self._plain == self._values

    def dump(self, value: Any, where: str) -> Any:
        if _is_key(value) and (type(value), value) in self._values:
            return _plain_literal(value)
        self.load(value, where)
        return value

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if _is_key(value):
            if (type(value), value) in self._values:
                return value
            if (type(value), value) in self._plain:
                return self._plain[type(value), value]
        raise SerializationError(f"expected {self.name}", path=where)


def _plain_literal(value: Any) -> Any:
    return enum_converter(type(value)).dump(value, "") if isinstance(value, enum.Enum) else value


def _is_key(value: Any) -> bool:
    return isinstance(value, (*SCALARS, enum.Enum))


_Choice = tuple[int, Any]
"""The number of the member of a union that a value becomes, and what it becomes."""


class _Choices(threading.local):
    """What the unions inside of a union have made of values, while the outermost one is read.

    Classes that contain the union again would read a value once for each way to it: with two classes
    and twenty levels, a million times. The values are kept, so that each has an id that is its own.
    """

    known: dict[tuple[object, int, bool], tuple[Any, _Choice | SerializationError]] | None = None


_CHOICES = _Choices()


class UnionOf:
    """One of several types.

    A value that has exactly the type of a plain member is not converted. Any other value becomes
    the first member, in the order of the annotation, that fits it without unknown fields; if there
    is none, the first that fits it.
    """

    def __init__(self, members: list[Converter]) -> None:
        self.name = " | ".join(member.name for member in members)
        self.is_plain = all(member.is_plain for member in members)
        self._members = members
        self._kinds = {
            member.kind: number
            for number, member in enumerate(members)
            if isinstance(member, Plain)
        }
        # With one other member, plain data cannot be taken for a different one.
        self._is_clear = len(members) - (type(None) in self._kinds) <= 1

    def dump(self, value: Any, where: str) -> Any:
        if type(value) in self._kinds:
            return value
        written, plain = self._first(value, where, lambda member: member.dump(value, where))
        if self._is_clear:
            return plain
        read, _ = self._choose(plain, where)
        if read != written and not isinstance(self._members[read], Plain):
            raise SerializationError(
                f"this {self._members[written].name} would be read as {self._members[read].name}, "
                f"which fits it as well, and comes first in {self.name}; put it after the other, "
                "or give both a field with a Literal",
                path=where,
            )
        return plain

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        return self._choose(value, where, exact=exact)[1]

    def _choose(self, value: Any, where: str, *, exact: bool = False) -> _Choice:
        if type(value) in self._kinds:
            return self._kinds[type(value)], value
        if not isinstance(value, dict | list | tuple):
            return self._search(value, where, exact=exact)
        known = _CHOICES.known
        if known is None:
            _CHOICES.known = {}
            try:
                return self._search(value, where, exact=exact)
            finally:
                _CHOICES.known = None
        key = (self, id(value), exact)
        if key not in known:
            try:
                known[key] = value, self._search(value, where, exact=exact)
            except SerializationError as error:
                known[key] = value, error
        _, choice = known[key]
        if isinstance(choice, SerializationError):
            raise choice.with_traceback(None)
        return choice

    def _search(self, value: Any, where: str, *, exact: bool) -> _Choice:
        try:
            return self._first(value, where, lambda member: member.load(value, where, exact=True))
        except SerializationError:
            if exact:
                raise
        return self._first(value, where, lambda member: member.load(value, where))

    def _first(
        self, value: Any, where: str, convert: Callable[[Converter], Any]
    ) -> tuple[int, Any]:
        reasons: list[str] = []
        last: SerializationError | None = None
        for number, member in enumerate(self._members):
            try:
                return number, convert(member)
            except SerializationError as error:
                if not isinstance(member, Plain):
                    last = error
                    reasons.append(f"{str(error).removeprefix(f'{where}: '):.{_MAX_REASON}}")
        if self._is_clear and last is not None:
            raise last
        why = f" ({'; '.join(reasons)})" if reasons else ""
        raise SerializationError(f"expected {self.name}, got {type_name(value)}{why}", path=where)


class SequenceOf:
    """A list, a set, or another collection of items of one type."""

    def __init__(
        self, kind: type, make: Callable[[list[Any]], Any] | None, item: Converter
    ) -> None:
        self.name = f"{kind.__name__}[{item.name}]"
        self.is_plain = item.is_plain and (make is None or make in _PLAIN_CONTAINERS)
        self._make = make
        self._item = item

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple | set | frozenset | collections.deque):
            refuse(value, self, where)
        items = [self._item.dump(item, f"{where}[{n}]") for n, item in enumerate(value)]
        if self.is_plain and type(value) in _PLAIN_CONTAINERS:
            return value
        # A set becomes a list: plain data of its items may not fit in a set.
        return tuple(items) if isinstance(value, tuple) else items

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if not isinstance(value, list | tuple | set | frozenset | collections.deque):
            refuse(value, self, where)
        load = self._item.load
        items = [load(item, f"{where}[{n}]", exact=exact) for n, item in enumerate(value)]
        make = self._make or (tuple if isinstance(value, tuple) else list)
        if isinstance(make, type) and issubclass(make, set | frozenset):
            items = _hashable(items, self.name, where)
        return called(make, items, self.name, where)


class FixedTuple:
    """A tuple with a type for each place."""

    def __init__(self, items: list[Converter]) -> None:
        self.name = f"tuple[{', '.join(item.name for item in items)}]"
        self.is_plain = all(item.is_plain for item in items)
        self._items = items

    def dump(self, value: Any, where: str) -> Any:
        return tuple(
            item.dump(each, f"{where}[{n}]") for n, (item, each) in self._pairs(value, where)
        )

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        return tuple(
            item.load(each, f"{where}[{n}]", exact=exact)
            for n, (item, each) in self._pairs(value, where)
        )

    def _pairs(self, value: Any, where: str) -> Iterable[tuple[int, tuple[Converter, Any]]]:
        if not isinstance(value, list | tuple):
            refuse(value, self, where)
        if len(value) != len(self._items):
            raise SerializationError(f"expected {self.name}, got {len(value)} items", path=where)
        return enumerate(zip(self._items, value, strict=True))


class MappingOf:
    """A dictionary with keys of one type and values of one type."""

    def __init__(
        self, kind: type, make: Callable[[Any], Any], key: Converter, item: Converter
    ) -> None:
        self.name = f"{kind.__name__}[{key.name}, {item.name}]"
        self.is_plain = key.is_plain and item.is_plain and make is dict
        self._make = make
        self._key = key
        self._item = item

    def dump(self, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(value, self, where)
        pairs = [
            (self._key.dump(key, f"{where} key"), self._item.dump(item, f"{where}[{key!r:.60}]"))
            for key, item in value.items()
        ]
        if self.is_plain and type(value) is dict:
            return value
        return called(dict, pairs, self.name, where)

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if not isinstance(value, dict):
            refuse(value, self, where)
        pairs = [
            (
                self._key.load(key, f"{where} key", exact=exact),
                self._item.load(item, f"{where}[{key!r:.60}]", exact=exact),
            )
            for key, item in value.items()
        ]
        _hashable([key for key, _ in pairs], self.name, where)
        return called(self._make, called(dict, pairs, self.name, where), self.name, where)


def _hashable(items: list[Any], name: str, where: str) -> list[Any]:
    """The items, which a set can contain without taking quadratic time."""
    return cast(list[Any], called(lambda each: distinct(each, where), items, name, where))


def is_numpy_scalar(kind: type) -> bool:
    """Whether it is a number, a text or the like of numpy that Python has a plain type for."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    plain = (numpy.bool_, numpy.integer, numpy.floating, numpy.str_, numpy.bytes_)
    return issubclass(kind, plain) and not issubclass(kind, numpy.longdouble)


def _numpy_item(value: Any) -> Any:
    return value.item() if is_numpy_scalar(type(value)) else value


# Errors


def called(
    make: Callable[[Any], Any], value: Any, name: str, where: str, why: str | None = None
) -> Any:
    """Make the value. Constructors and validators are user code, and may raise anything.

    `why` replaces the text of an exception that quotes the value, which may be a secret.
    """
    try:
        return make(value)
    except SerializationError:
        raise
    except Exception as error:
        raise SerializationError(f"{name}: {why or _reason(error)}", path=where) from error


def _reason(error: Exception) -> str:
    """What the exception says, without the values that pydantic quotes in its messages."""
    errors = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(errors):
        try:
            found = errors(include_input=False, include_url=False, include_context=False)
            return "; ".join(
                ": ".join(filter(None, [".".join(map(str, each["loc"])), each["msg"]]))
                for each in found
            )
        except Exception:
            # Not the ValidationError of pydantic.
            return type(error).__name__
    return f"{type(error).__name__}: {error}"


def refuse(value: Any, converter: Converter, where: str) -> NoReturn:
    raise SerializationError(f"expected {converter.name}, got {type_name(value)}", path=where)


def type_name(value: object) -> str:
    return type(value).__qualname__
