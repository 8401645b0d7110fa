"""Values: a value is returned unchanged, or refused with the path of what cannot be encoded."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest

from omniq.errors import SerializationError
from omniq.models import BreakerRule, Limit, TaskStatus
from omniq.outcomes import Succeeded
from omniq.retry import LinearBackoff
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ContractPart, claim_one, promise, status_of


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _nested_tuples(depth: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value,)
    return value


def _circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _generator() -> Iterator[int]:
    yield 1


class _Size(Enum):
    SMALL = "small"


class _Point(NamedTuple):
    x: int
    y: int


VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "zero": 0,
    "negative": -1,
    "64 bits": 2**64 - 1,
    "big": 2**200 + 1,
    "big negative": -(2**200),
    "float": 0.1,
    "NaN": math.nan,
    "infinity": math.inf,
    "negative infinity": -math.inf,
    "negative zero": -0.0,
    "smallest float": 5e-324,
    "empty text": "",
    "text": "zażółć gęślą jaźń",
    "emoji": "🦊👩‍👩‍👧‍👦",
    "NUL": "a\0b",
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "empty set": set(),
    "list of tuples": [(1, (2, (3, [4]))), ()],
    "tuple in a dict": {"a": ({"b": (1,)},)},
    "set": {3},
    "frozenset of tuples": frozenset({(1, "a")}),
    "number keys": {1: "one", -1: None, 2.5: True},
    "odd keys": {"": 1, "a b": 2, "🦊": 3, None: 4, b"x": 5},
    "aware datetime": datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC),
    "datetime of another zone": datetime(
        2026, 7, 1, tzinfo=timezone(timedelta(hours=-9, minutes=30))
    ),
    "naive datetime": datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001 - a naive datetime is a valid argument
    "date": date(2026, 2, 28),
    "time": time(23, 59, 59, 999_999),
    "timedelta": timedelta(days=-1, microseconds=1),
    "Decimal": Decimal("0.10"),
    "Decimal NaN": Decimal("NaN"),
    "UUID": UUID("12345678-1234-5678-1234-567812345678"),
    "60 levels": _nested(60),
    "60 levels of tuples": _nested_tuples(60),
}

BY_VALUE: dict[str, tuple[Any, Any]] = {
    "text of an enum": (TaskStatus.SUCCESS, "success"),
    "ordered dictionary": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "named tuple": (_Point(1, 2), (1, 2)),
    "key of an enum": ({TaskStatus.SUCCESS: 1}, {"success": 1}),
}
"""Values of a subclass of a plain type, and what they are returned as: equal, and plain."""

REFUSED: dict[str, tuple[Any, str]] = {
    "function": (lambda: None, "args[0]: a value of type function cannot be encoded"),
    "object": (object(), "args[0]: a value of type object cannot be encoded"),
    "class": (int, "args[0]: a value of type type cannot be encoded"),
    "generator": (_generator(), "args[0]: a value of type generator cannot be encoded"),
    "bytearray": (bytearray(b"x"), "args[0]: a value of type bytearray cannot be encoded"),
    "enum": (
        _Size.SMALL,
        "args[0]: a value of type omniq.testing.contract.values._Size cannot be encoded",
    ),
    "in a list": ([1, [object()]], "args[0][1][0]: a value of type object cannot be encoded"),
    "in a dict": (
        {"a": {"b": object()}},
        "args[0]['a']['b']: a value of type object cannot be encoded",
    ),
    "in a tuple": ((1, (2, object())), "args[0][1][1]: a value of type object cannot be encoded"),
    "in a set": ({object}, "args[0][0]: a value of type type cannot be encoded"),
    "tuple as a key": ({(1, 2): 3}, "args[0]: dictionary key of type tuple"),
    "NaN as a key": ({math.nan: 3}, "args[0]: NaN cannot be a dictionary key"),
    "lone surrogate": (["\ud83e"], "args[0][0]: text is not valid Unicode"),
    "lone surrogate as a key": ({"\ud83e": 1}, "text is not valid Unicode"),
    "too deep": (_nested(100), "nested more than 64 levels deep"),
    "deep in tuples": (_nested_tuples(90), "nested more than 64 levels deep"),
    "in itself": (_circle(), "nested more than 64 levels deep"),
    "huge number": (1 << 100_000, "args[0]: a number of"),
    "too large": ("x" * 2_000_000, "more than max_payload 1048576"),
}


class ValueContract(ContractPart):
    """E6, for every kind of value.

    The tests compare representations: these differ for -0.0 and 0.0, and for (1,) and [1], and are
    equal for NaN.
    """

    @promise("E6")
    @pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
    async def test_a_value_is_returned_unchanged(
        self, storage: BaseStorage, clock: ManualClock, value: Any
    ) -> None:
        await storage.enqueue(
            a_task("a", args=(value, [value]), kwargs={"k": value}, metadata={"m": value})
        )
        task = await claim_one(storage)
        await storage.record([Succeeded("a", task.token, a_result(task, {"r": (value,)}))])
        result = await storage.get_result("a")

        assert repr(task.args) == repr((value, [value]))
        assert repr((task.kwargs, task.metadata)) == repr(({"k": value}, {"m": value}))
        assert result is not None
        assert repr(result.result) == repr({"r": (value,)})

    @promise("E6")
    @pytest.mark.parametrize(("value", "plain"), BY_VALUE.values(), ids=list(BY_VALUE))
    async def test_a_subclass_of_a_plain_type_is_returned_as_an_equal_plain_value(
        self, storage: BaseStorage, value: Any, plain: Any
    ) -> None:
        await storage.enqueue(a_task("a", args=(value,), kwargs={"k": [value]}))
        task = await claim_one(storage)

        assert task.args == (value,)
        assert repr((task.args, task.kwargs)) == repr(((plain,), {"k": [plain]}))

    @promise("E6")
    async def test_every_field_is_returned_unchanged(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        hour = timedelta(hours=1)
        task = a_task(
            "a",
            func_path="pkg.mod.Class.method",
            args=(1, (2, 3)),
            kwargs={"x": b"y"},
            queue="mail-2.high_prio",
            priority=-(2**63),
            eta=clock.now() - hour,
            interval=1.5,
            cron="*/5 * * * *",
            tz="UTC",
            max_retries=0,
            retry=LinearBackoff(step=2.0),
            timeout=0.001,
            unique="k",
            expires=clock.now() + hour,
            result_ttl=0.5,
            limits=(Limit(key="l", max_running=2), Limit(key="r", rate=1, per=60.0)),
            breakers=(BreakerRule(name="smtp", max_failures=1, reset_timeout=1.0),),
            metadata={"trace": "1"},
            schedule_id="nightly",
            created_at=clock.now() - hour,
            attempts=2,
        )
        await storage.enqueue(task)
        claimed = await claim_one(storage)

        assert claimed == msgspec.structs.replace(
            task, status=TaskStatus.RUNNING, token=1, owner=storage.owner, started_at=clock.now()
        )

    @promise("E6")
    async def test_a_task_without_an_eta_is_due_when_it_was_enqueued(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))

        assert (await claim_one(storage)).eta == clock.now()

    @promise("E6")
    async def test_changing_the_arguments_after_enqueue_does_not_change_the_task(
        self, storage: BaseStorage
    ) -> None:
        items = [1]
        await storage.enqueue(a_task("a", args=(items,)))
        items.append(2)

        assert (await claim_one(storage)).args == ([1],)

    @promise("E4")
    @pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=list(REFUSED))
    async def test_a_value_that_cannot_be_encoded_is_refused_with_its_path(
        self, storage: BaseStorage, value: Any, message: str
    ) -> None:
        with pytest.raises(SerializationError) as refused:
            await storage.enqueue(a_task("a", args=(value,)))

        assert message in str(refused.value)
        assert await storage.list_tasks() == []

    @promise("E4")
    async def test_keyword_arguments_and_metadata_are_refused_with_their_path(
        self, storage: BaseStorage
    ) -> None:
        with pytest.raises(
            SerializationError, match=r"^kwargs\['to'\]: a value of type object cannot"
        ):
            await storage.enqueue(a_task("a", kwargs={"to": object()}))
        with pytest.raises(
            SerializationError, match=r"^metadata\['m'\]\[0\]: a value of type object cannot"
        ):
            await storage.enqueue(a_task("a", metadata={"m": [object()]}))

        assert await storage.list_tasks() == []

    @promise("R1")
    async def test_a_result_that_cannot_be_encoded_is_refused_and_the_claim_stays(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        with pytest.raises(
            SerializationError, match=r"^result\['x'\]: a value of type object cannot"
        ):
            await storage.mark_done("a", a_result(task, {"x": object()}))

        assert await status_of(storage, "a") is TaskStatus.RUNNING
        await storage.mark_done("a", a_result(task, "plain"))
        assert await status_of(storage, "a") is TaskStatus.SUCCESS
