"""Stored values that are chosen to cost time, and errors that would quote a secret."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import pydantic
import pytest

from omniq import Secret
from omniq import TaskContext as Context
from omniq.errors import SerializationError
from omniq.tasks.annotations import converter_of
from omniq.tasks.secret_parameters import secret_parameters
from tests.serialization.kinds import Color

T = TypeVar("T")
CardNumber = Secret[str]
_EQUAL_HASHES = 2**61 - 1
"""Whole numbers that this divides have the hash 0."""


@dataclass
class Sum:
    inner: Sum | Product | None = None
    kind: Literal["sum"] = "sum"


@dataclass
class Product:
    inner: Sum | Product | None = None
    kind: Literal["product"] = "product"


@dataclass
class Left(Generic[T]):
    inner: Left[T] | Right[T] | None = None


@dataclass
class Right(Generic[T]):
    inner: Left[T] | Right[T] | None = None


@dataclass
class Page(Generic[T]):
    items: list[T]


@dataclass
class Rows(Generic[T]):
    page: Page[list[T]]


@dataclass
class Tags:
    numbers: set[int] | None = None
    ids: frozenset[UUID] = frozenset()
    prices: dict[Decimal, int] | None = None


def nested(value: Any, depth: int = 60) -> Any:
    for _ in range(depth):
        value = {"inner": value}
    return value


@pytest.mark.parametrize("annotation", [Sum | Product, Left[int] | Right[int]])
def test_a_deep_value_that_no_class_of_a_union_fits_is_refused_quickly(annotation):
    started = time.process_time()

    with pytest.raises(SerializationError, match=r"expected (Sum|Left)") as error:
        converter_of(annotation).load(nested(5), "value")

    assert time.process_time() - started < 2
    assert len(str(error.value)) < 2000


def test_a_deep_object_of_the_second_class_of_a_union_is_converted_quickly():
    deep: Product | None = None
    for _ in range(60):
        deep = Product(deep)
    converter = converter_of(Sum | Product)
    started = time.process_time()

    assert converter.load(converter.dump(deep, "value"), "value") == deep
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "stored",
    [
        {"numbers": [n * _EQUAL_HASHES for n in range(10_000)]},
        {"ids": [UUID(int=n * _EQUAL_HASHES) for n in range(10_000)]},
        {"prices": {str(n * _EQUAL_HASHES): 1 for n in range(10_000)}},
    ],
)
def test_a_set_whose_items_have_the_same_hash_is_refused(stored):
    with pytest.raises(SerializationError, match=r"t\.\w+: 10000 items of a set, or keys, have"):
        converter_of(Tags).load(stored, "t")


def test_a_fraction_is_not_read_from_an_exponent():
    assert converter_of(Fraction).load("1/3", "f") == Fraction(1, 3)
    with pytest.raises(SerializationError, match="f: Fraction: not a valid value"):
        converter_of(Fraction).load("1e10000000", "f")


def test_the_types_of_a_generic_class_may_contain_those_of_another():
    converter = converter_of(Rows[Sum])
    rows = Rows(Page([[Sum()]]))

    assert converter.load(converter.dump(rows, "rows"), "rows") == rows


@dataclass
class Stay:
    begin: date


@pytest.mark.parametrize(
    ("annotation", "stored"),
    [(Color, "private"), (Stay, {"begin": "private"}), (IPv4Address, "private")],
)
def test_an_error_about_a_value_does_not_quote_it(annotation, stored):
    with pytest.raises(SerializationError) as error:
        converter_of(annotation).load(stored, "value")
    assert "private" not in str(error.value)


@dataclass
class Card:
    code: Secret[str]


class Login(NamedTuple):
    user: str
    password: str


class Account(pydantic.BaseModel):
    password: pydantic.SecretStr


class Answer(pydantic.BaseModel):
    question: str
    reply: pydantic.SecretStr


class Form(pydantic.BaseModel):
    answers: list[Answer]


def test_a_parameter_whose_fields_would_show_a_secret_is_hidden():
    def sign_up(
        card: Card, login: Login, account: Account, form: Form | None, page: Page[int]
    ) -> None: ...

    assert secret_parameters(sign_up) == (0, "card", 1, "login", 3, "form")


def test_a_mark_inside_of_a_union_hides_the_parameter():
    def charge(card: Any) -> None: ...

    charge.__annotations__["card"] = Secret[str] | None

    assert secret_parameters(charge) == (0, "card")


def test_an_error_inside_of_optional_values_has_its_place_once():
    with pytest.raises(SerializationError) as error:
        converter_of(Chain).load({"next": {"next": {"next": 5}}}, "value")
    assert str(error.value) == "value.next.next.next: expected Chain, got int"


def test_a_mark_under_another_name_hides_the_parameter():
    def charge(card: CardNumber) -> None: ...

    assert secret_parameters(charge) == (0, "card")


def test_a_context_under_another_name_does_not_move_the_secrets():
    def charge(ctx: Context, card: Secret[str]) -> None: ...

    assert secret_parameters(charge) == (0, "card")


@dataclass
class Chain:
    next: Chain | None = None
