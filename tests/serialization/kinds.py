"""Forty kinds of values and more: a type, and a strategy that makes values of it.

`ECHOES` has a task for each kind, which returns its argument. The values that a worker passed to
them are in `RECEIVED`.
"""

from __future__ import annotations

import collections
import enum
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
)
from uuid import UUID

import attrs
import msgspec
import numpy
import pydantic
from hypothesis import strategies as st

from omniq import task

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GOOD = "good"
    BAD = "bad"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Shape(enum.Enum):
    """Its values are not plain: it is stored by its names."""

    SQUARE = Fraction(1, 1)
    WIDE = Fraction(16, 9)


class UserId(str):
    """A subclass of str."""

    __slots__ = ()


class Cents(int):
    """A subclass of int."""


class Extras(dict[str, Any]):
    """A subclass of dict."""


class Point(NamedTuple):
    x: int
    y: float
    color: Color = Color.RED


@dataclass
class Address:
    city: str
    code: int | None = None


@dataclass(frozen=True)
class User:
    name: str
    address: Address
    tags: frozenset[str] = frozenset()
    born: date | None = None
    home: Path | None = None


@dataclass
class Ticket:
    """One of its fields is not a parameter of `__init__`."""

    title: str
    number: int = field(init=False, default=0)


@dataclass
class Node:
    """Contains itself."""

    value: int
    children: list[Node] = field(default_factory=list)


@dataclass
class Page(Generic[T]):
    items: list[T]
    number: int


@attrs.define
class Part:
    _number: int
    color: Color = Color.BLUE


@attrs.frozen
class Box:
    parts: tuple[Part, ...]


class Measure(msgspec.Struct, tag=True):
    value: float
    at: datetime
    source: Path


class Series(msgspec.Struct, frozen=True, rename="camel"):
    all_values: list[Measure]


class Mixture(msgspec.Struct):
    """Has fields of classes that msgspec does not know."""

    user: UserId
    cents: Cents
    mood: Mood
    extras: Extras
    point: Point
    contact: Contact
    big: int
    colors: tuple[Color, ...]
    number: numpy.int64


class Contact(pydantic.BaseModel):
    mail: str
    age: Annotated[int, pydantic.Field(ge=0)] = 0
    color: Color | None = None
    since: datetime | None = None
    files: list[Path] = []


class Team(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    lead: Contact
    members: dict[str, Contact] = {}
    secret: pydantic.SecretStr = pydantic.SecretStr("")
    budget: Decimal = pydantic.Field(Decimal(0), alias="theBudget")


class Movie(TypedDict):
    title: str
    color: NotRequired[Color]


class Tree(TypedDict):
    label: Color
    branches: list[Tree]


@dataclass
class Card:
    kind: Literal["card"]
    number: str


@dataclass
class Transfer:
    kind: Literal["transfer"]
    number: str


Email = NewType("Email", str)

words = st.text(max_size=8)
small = st.integers(-1000, 1000)
numbers = st.floats(allow_nan=False)
colors = st.sampled_from(Color)
paths = st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5}){0,2}", fullmatch=True).map(Path)
instants = st.datetimes() | st.datetimes(timezones=st.just(UTC))
addresses = st.builds(Address, words, st.none() | small)
users = st.builds(
    User,
    words,
    addresses,
    st.frozensets(words, max_size=3),
    st.none() | st.dates(),
    st.none() | paths,
)
parts = st.builds(Part, small, colors)
measures = st.builds(Measure, numbers, instants, paths)
contacts = st.builds(
    Contact,
    mail=words,
    age=st.integers(0, 99),
    color=st.none() | colors,
    since=st.none() | instants,
    files=st.lists(paths, max_size=2),
)


def tickets(title: str, number: int) -> Ticket:
    ticket = Ticket(title)
    ticket.number = number
    return ticket


KINDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "enum": (Color, colors),
    "int_enum": (Level, st.sampled_from(Level)),
    "str_enum": (Mood, st.sampled_from(Mood)),
    "flag": (Access, st.sampled_from([Access.READ, Access.READ | Access.WRITE])),
    "enum_by_name": (Shape, st.sampled_from(Shape)),
    "str_subclass": (UserId, words.map(UserId)),
    "int_subclass": (Cents, small.map(Cents)),
    "dict_subclass": (Extras, st.dictionaries(words, small, max_size=3).map(Extras)),
    "path": (Path, paths),
    "pure_path": (PurePosixPath, paths.map(PurePosixPath)),
    "named_tuple": (Point, st.builds(Point, small, numbers, colors)),
    "dataclass": (Address, addresses),
    "nested_dataclass": (User, users),
    "dataclass_no_init": (Ticket, st.builds(tickets, words, small)),
    "recursive_dataclass": (
        Node,
        st.recursive(
            st.builds(Node, small),
            lambda inner: st.builds(Node, small, st.lists(inner, max_size=2)),
        ),
    ),
    "generic_dataclass": (Page[User], st.builds(Page, st.lists(users, max_size=2), small)),
    "attrs": (Part, parts),
    "nested_attrs": (Box, st.builds(Box, st.lists(parts, max_size=2).map(tuple))),
    "msgspec": (Measure, measures),
    "nested_msgspec": (Series, st.builds(Series, st.lists(measures, max_size=2))),
    "msgspec_of_others": (
        Mixture,
        st.builds(
            Mixture,
            words.map(UserId),
            small.map(Cents),
            st.sampled_from(Mood),
            st.dictionaries(words, small, max_size=2).map(Extras),
            st.builds(Point, small, numbers, colors),
            contacts,
            st.integers(min_value=2**64, max_value=2**90),
            st.lists(colors, max_size=2).map(tuple),
            small.map(numpy.int64),
        ),
    ),
    "pydantic": (Contact, contacts),
    "nested_pydantic": (
        Team,
        st.builds(
            lambda lead, members, secret, budget: Team(
                lead=lead, members=members, secret=secret, theBudget=budget
            ),
            contacts,
            st.dictionaries(words, contacts, max_size=2),
            words.map(pydantic.SecretStr),
            st.decimals(allow_nan=False, allow_infinity=False),
        ),
    ),
    "typed_dict": (Movie, st.fixed_dictionaries({"title": words}, optional={"color": colors})),
    "recursive_typed_dict": (
        Tree,
        st.recursive(
            st.builds(lambda label: {"label": label, "branches": []}, colors),
            lambda inner: st.fixed_dictionaries(
                {"label": colors, "branches": st.lists(inner, max_size=2)}
            ),
        ),
    ),
    "list": (list[User], st.lists(users, max_size=2)),
    "dict": (dict[str, Address], st.dictionaries(words, addresses, max_size=2)),
    "dict_by_enum": (dict[Color, int], st.dictionaries(colors, small)),
    "set": (set[Color], st.sets(colors)),
    "frozenset": (frozenset[Level], st.frozensets(st.sampled_from(Level))),
    "tuple": (tuple[Color, int, User], st.tuples(colors, small, users)),
    "tuple_of_many": (tuple[Path, ...], st.lists(paths, max_size=3).map(tuple)),
    "sequence": (Sequence[Color], st.lists(colors, max_size=3)),
    "mapping": (Mapping[str, list[Color]], st.dictionaries(words, st.lists(colors, max_size=2))),
    "optional": (User | None, st.none() | users),
    "union_of_records": (
        Card | Transfer,
        st.builds(Card, st.just("card"), words) | st.builds(Transfer, st.just("transfer"), words),
    ),
    "union_with_plain": (int | Address | list[Color], small | addresses | st.lists(colors)),
    "ordered_dict": (
        collections.OrderedDict[str, int],
        st.dictionaries(words, small).map(collections.OrderedDict),
    ),
    "defaultdict": (
        collections.defaultdict[str, list[int]],
        st.dictionaries(words, st.lists(small, max_size=2)).map(
            lambda items: collections.defaultdict(list, items)
        ),
    ),
    "counter": (
        collections.Counter[str],
        st.dictionaries(words, st.integers(1, 9)).map(collections.Counter),
    ),
    "deque": (collections.deque[Color], st.lists(colors, max_size=3).map(collections.deque)),
    "bytearray": (bytearray, st.binary(max_size=9).map(bytearray)),
    "numpy_int": (numpy.int64, st.integers(-(2**63), 2**63 - 1).map(numpy.int64)),
    "numpy_float": (numpy.float32, st.floats(width=32, allow_nan=False).map(numpy.float32)),
    "numpy_bool": (numpy.bool_, st.booleans().map(numpy.bool_)),
    "list_of_numpy": (list[numpy.float64], st.lists(numbers.map(numpy.float64), max_size=3)),
    "ip_address": (ipaddress.IPv4Address, st.ip_addresses(v=4)),
    "fraction": (Fraction, st.fractions()),
    "literal_enum": (Literal[Color.RED, 3], st.sampled_from([Color.RED, 3])),
    "new_type": (Email, words),
    "secret": (pydantic.SecretStr, words.map(pydantic.SecretStr)),
    # Plain data needs no conversion, in a function that converts others.
    "plain": (
        dict[str, Any],
        st.dictionaries(
            words,
            st.none()
            | st.booleans()
            | small
            | numbers
            | words
            | st.binary(max_size=4)
            | instants
            | st.dates()
            | st.times()
            | st.timedeltas()
            | st.uuids()
            | st.decimals(allow_nan=False),
            max_size=4,
        ),
    ),
    "plain_types_in_a_class": (
        Page[tuple[datetime, time, timedelta, UUID, Decimal, bytes]],
        st.builds(
            Page,
            st.lists(
                st.tuples(
                    instants,
                    st.times(),
                    st.timedeltas(),
                    st.uuids(),
                    st.decimals(allow_nan=False),
                    st.binary(max_size=4),
                ),
                max_size=2,
            ),
            small,
        ),
    ),
}

RECEIVED: dict[str, Any] = {}
ECHOES: dict[str, Callable[..., Any]] = {}


def _echo(kind: str, annotation: Any) -> Callable[..., Any]:
    def echo(value: Any, *, named: Any = None) -> Any:
        RECEIVED[kind] = value, named
        return value

    echo.__name__ = echo.__qualname__ = f"echo_{kind}"
    echo.__annotations__ = {"value": annotation, "named": annotation, "return": annotation}
    return task(echo)


for _kind, (_annotation, _) in KINDS.items():
    ECHOES[_kind] = globals()[f"echo_{_kind}"] = _echo(_kind, _annotation)
