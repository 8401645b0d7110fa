"""The rules of single types: unions, records of other versions, aliases, and what stays plain."""

from __future__ import annotations

import collections
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID, uuid4

import msgspec
import numpy
import pydantic
import pytest

from omniq.errors import SerializationError
from omniq.models import Task
from omniq.serialization import MsgspecSerializer
from omniq.tasks.annotations import converter_of
from tests.serialization.kinds import Address, Color, Contact, Level, Mood, Point, Team

T = TypeVar("T")


@dataclass
class Dog:
    name: str


@dataclass
class Cat:
    name: str
    lives: int = 9


@dataclass
class Twin:
    name: str


class Event(pydantic.BaseModel):
    at: datetime = pydantic.Field(default_factory=lambda: datetime.now(UTC))
    note: str | None = None
    count: int = pydantic.Field(1, validation_alias="howMany")


def round_trip(annotation: Any, value: Any) -> Any:
    converter = converter_of(annotation)
    return converter.load(converter.dump(value, "value"), "value")


@pytest.mark.parametrize(
    "annotation",
    [
        *(int, str, float, bytes, bool, None, Any, object, datetime, UUID, Decimal, T),
        *(list, dict, tuple, set, list[int], dict[str, list[int]], tuple[int, str], int | None),
        *(Literal["a", 1], Annotated[int, "x"], list[dict[str, date | None]]),
        *(type, type[int], Task.__init__, print, "text", 5),
    ],
    ids=str,
)
def test_plain_types_and_unknown_ones_need_no_conversion(annotation):
    assert converter_of(annotation).is_plain


class TestUnions:
    def test_a_plain_member_keeps_its_values(self):
        for annotation in (Path | str, str | Path):
            assert round_trip(annotation, "x") == "x"
            # The function says that it takes text.
            assert round_trip(annotation, Path("x")) == "x"
        assert round_trip(int | Level, Level.HIGH) == 2

    def test_text_is_read_as_a_plain_type_only_if_nothing_else_fits(self):
        path = Path("00000000-0000-0000-0000-000000000005")

        assert round_trip(UUID | Path, path) == path
        assert converter_of(UUID | Dog).load(str(path), "id") == UUID(int=5)

    def test_other_members_are_tried_in_their_order(self):
        load = converter_of(Dog | Twin).load

        assert load({"name": "rex"}, "pet") == Dog("rex")
        assert converter_of(Twin | Dog).load({"name": "rex"}, "pet") == Twin("rex")

    def test_a_member_without_unknown_fields_goes_before_one_with_them(self):
        for pets in (Dog | Cat, Cat | Dog):
            assert round_trip(pets, Cat("tom", 7)) == Cat("tom", 7)
        assert round_trip(Dog | Cat, Dog("rex")) == Dog("rex")
        assert converter_of(Dog | Cat).load({"name": "rex", "new": 1}, "pet") == Dog("rex")

    @pytest.mark.parametrize(
        ("annotation", "value"),
        [
            (Dog | Twin, Twin("tom")),
            (Cat | Dog, Dog("rex")),
            (dict[str, Any] | Dog, Dog("rex")),
            (list[Dog] | list[Twin], [Twin("tom")]),
            (Literal["red"] | Color, Color.RED),
        ],
    )
    def test_a_value_that_would_be_read_as_another_member_is_refused(self, annotation, value):
        with pytest.raises(SerializationError, match=r"pet: this .* would be read as .* Literal"):
            converter_of(annotation).dump(value, "pet")

    def test_the_error_has_the_reason_of_each_member(self):
        with pytest.raises(
            SerializationError,
            match=r"expected Dog \| Color \| None, got dict \(Dog needs 'name'; exp",
        ):
            converter_of(Dog | Color | None).load({}, "pet")
        with pytest.raises(SerializationError, match=r"^pet: Dog needs 'name'$"):
            converter_of(Dog | None).load({}, "pet")


class TestRecords:
    def test_unknown_fields_of_a_newer_version_are_left_out(self):
        assert converter_of(Dog).load({"name": "rex", "new": 1}, "pet") == Dog("rex")
        assert converter_of(list[Contact]).load([{"mail": "a", "new": 1}], "c")[0].mail == "a"

    def test_missing_fields_have_their_defaults(self):
        assert converter_of(Cat).load({"name": "tom"}, "pet") == Cat("tom", 9)

    def test_text_is_read_where_json_has_no_type(self):
        @dataclass
        class Stay:
            id: UUID
            begin: date
            at: datetime
            price: Decimal

        number = uuid4()
        data = {
            "id": str(number),
            "begin": "2026-01-31",
            "at": "2026-01-31T12:00Z",
            "price": "1.50",
        }

        stay = converter_of(Stay).load(data, "stay")

        assert (stay.id, stay.begin, stay.price) == (number, date(2026, 1, 31), Decimal("1.50"))
        assert stay.at == datetime(2026, 1, 31, 12, tzinfo=UTC)

    def test_a_class_inside_of_a_function_may_contain_itself(self):
        @dataclass
        class Link:
            following: Link | None = None

        assert round_trip(Link, Link(Link())) == Link(Link())

    def test_a_class_that_needs_more_than_its_fields_is_refused_when_it_is_passed(self):
        @dataclass
        class Hashed:
            seed: InitVar[int]
            value: int = field(init=False)

            def __post_init__(self, seed: int) -> None:
                self.value = seed * 2

        with pytest.raises(SerializationError, match=r"it: Hashed cannot be .* takes seed"):
            converter_of(Hashed).dump(Hashed(3), "it")

    def test_a_field_may_be_of_any_class_that_is_known(self):
        @dataclass
        class Mixed:
            contact: Contact
            point: Point
            addresses: dict[Mood, Address]

        value = Mixed(Contact(mail="a"), Point(1, 2.0), {Mood.GOOD: Address("x")})

        assert round_trip(Mixed, value) == value

    def test_numpy_numbers_fit_a_field_of_a_plain_type(self):
        plain = converter_of(Cat).dump(Cat("tom", numpy.int64(3)), "pet")  # type: ignore[arg-type]

        task = Task(func_path="m.f", args=(plain,))
        serializer = MsgspecSerializer()
        assert serializer.decode_task(serializer.encode_task(task)).args[0]["lives"] == 3


class TestPydantic:
    def test_fields_that_were_not_set_stay_so(self):
        contact = Contact(mail="a")

        received = round_trip(Contact, contact)

        assert received == contact
        assert received.model_dump(exclude_unset=True) == {"mail": "a"}

    def test_a_default_that_differs_from_call_to_call_is_kept(self):
        event = Event.model_validate({})

        assert round_trip(Event, event) == event

    def test_aliases_and_names_are_both_read(self):
        load = converter_of(Event).load

        assert load({"howMany": 3}, "event").count == load({"count": 3}, "event").count == 3

    def test_secrets_arrive(self):
        team = Team(lead=Contact(mail="a"), secret=pydantic.SecretStr("pw"), theBudget=Decimal(3))

        assert round_trip(Team, team).secret.get_secret_value() == "pw"

    def test_an_error_names_the_field_and_not_the_value(self):
        with pytest.raises(SerializationError, match=r"c: Contact: age: Input should be") as error:
            converter_of(Contact).load({"mail": "a", "age": "private"}, "c")
        assert "private" not in str(error.value)


def test_constraints_of_msgspec_are_checked():
    class Percent(msgspec.Struct):
        value: Annotated[int, msgspec.Meta(le=100)]

    with pytest.raises(SerializationError, match=r"p: Percent: Expected `int` <= 100"):
        converter_of(Percent).dump(Percent(101), "p")


def test_subclasses_of_plain_types_are_passed_by_value_where_no_annotation_names_them():
    Pair = collections.namedtuple("Pair", "left right")

    class Stamp(datetime):
        pass

    class Row(UUID):
        pass

    values = (
        *(Level.HIGH, Mood.GOOD, collections.OrderedDict(a=1), collections.Counter("aa")),
        *(Pair(1, 2), Stamp(2026, 1, 2, tzinfo=UTC), Row(int=5), {Mood.GOOD: [Level.LOW]}),
        *(numpy.int32(5), numpy.float64(1.5), numpy.bool_(True), numpy.str_("x")),
    )
    serializer = MsgspecSerializer()

    args = serializer.decode_task(serializer.encode_task(Task(func_path="m.f", args=values))).args

    assert args == (
        *(2, "good", {"a": 1}, {"a": 2}),
        *((1, 2), datetime(2026, 1, 2, tzinfo=UTC), UUID(int=5), {"good": [1]}),
        *(5, 1.5, True, "x"),
    )
    assert {type(value) for value in args} == {int, str, dict, tuple, datetime, UUID, float, bool}
