"""Functions that these tests enqueue, with annotations as people write them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from omniq import Retry, TaskContext, task
from tests.serialization.kinds import Color, Contact, User

if TYPE_CHECKING:
    from tests.serialization.kinds import Movie as Missing

P = ParamSpec("P")
R = TypeVar("R")

RUNS: list[Any] = []
"""What the functions were called with."""


@dataclass
class Order:
    number: int
    color: Color = Color.RED

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("a number is positive")


@dataclass
class Intruder:
    """No function names it."""

    number: int = 0
    made = 0

    def __post_init__(self) -> None:
        Intruder.made += 1


@dataclass
class Invoice(Order):
    total: int = 0


@task
def add(a: int, b: int = 2) -> int:
    return a + b


@task
async def fetch(url: str, *, depth: int) -> str:
    return url * depth


@task
def keywords(a: int, *, b: int, c: int) -> int:
    return a + b + c


@task
def anything(*args: Any, **kwargs: Any) -> None: ...


@task
def positional(a: int, /, **others: Color) -> Color | None:
    RUNS.append((a, others))
    return others.get("a")


@task
def several(*orders: Order) -> list[Order]:
    RUNS.append(orders)
    return list(orders)


@task
async def ship(order: Order) -> Order:
    RUNS.append(order)
    return Order(order.number + 1, order.color)


@task
def ship_in_thread(ctx: TaskContext, order: Order, *, user: User | None = None) -> Order:
    RUNS.append((ctx.attempt, order, user, threading.current_thread().name))
    return order


@task(executor="process")
def ship_in_process(ctx: TaskContext, order: Order, contact: Contact) -> dict[str, Contact]:
    assert type(order) is Order
    assert type(contact) is Contact
    return {str(ctx.attempt): contact}


@task(executor="process")
def returns_other_in_process() -> Order:
    return User("ada", None)  # type: ignore[return-value, arg-type]


@task
async def in_steps(ctx: TaskContext, number: int) -> Order:
    first = await ctx.step("first", ship, Order(number))
    RUNS.append(first)
    if ctx.attempt == 1:
        raise Retry(delay=0)
    return first


@task
def returns_subclass_in_step(ctx: TaskContext) -> None:
    ctx.step("first", returns_subclass)


@task
def implicit_optional(path: Path = None) -> Path | None:  # type: ignore[assignment]  # noqa: RUF013
    RUNS.append(path)
    return path


@task
def half_resolved(missing: Missing, order: Order) -> Missing:
    RUNS.append((missing, order))
    return missing


@task
def without_annotations(order, path):
    return order


@task
def broken_annotation(order: 1 / 0) -> None:  # type: ignore[valid-type]
    RUNS.append(order)


@task
def returns_plain_data() -> Order:
    return {"number": 3}  # type: ignore[return-value]


@task
def returns_none() -> Order:
    return None  # type: ignore[return-value]


@task
def returns_subclass() -> Order:
    return Invoice(1, total=2)


@task
def returns_other() -> Order:
    return User("ada", None)  # type: ignore[return-value, arg-type]


@task
def returns_awaitable(order: Order) -> Awaitable[Order]:
    return ship(order)


def timed(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return func(*args, **kwargs)

    return call


def with_session(func: Callable[..., R]) -> Callable[..., R]:
    """Passes an argument, so that the caller has one less."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> R:
        return func("session", *args, **kwargs)

    return call


@task
@timed
def decorated(order: Order, times: int = 1) -> list[Order]:
    return [order] * times


@task
@with_session
def injected(session: str, number: int) -> str:
    return f"{session} {number}"


@task(
    unique=lambda order: f"order-{order.number}",
    rate="9/s",
    limit_key=lambda order: order.color.name,
)
def keyed(order: Order) -> None: ...


@task(unique=True)
def unique(order: Order) -> None: ...
