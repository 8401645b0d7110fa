"""Functions whose parameters have changed since their tasks were stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniq import Args, TaskContext, task


@dataclass
class Address:
    email: str
    name: str = ""


def send_1(mail: str, subject: str = "none") -> Args:
    return Args(mail, title=subject)


def send_2(mail: str, title: str) -> Args:
    return Args(to={"email": mail, "name": "unknown"}, title=title)


@task(version=3, upcasters={1: send_1, 2: send_2})
async def send(to: Address, title: str) -> list[str]:
    return [type(to).__name__, to.email, to.name, title]


@task(version=2, upcasters={1: lambda number: Args(number, 10)})
def add(number: int, other: int) -> int:
    return number + other


@task(version=2, upcasters={1: lambda number: Args(number, 100)}, executor="process")
def add_in_a_process(number: int, other: int) -> int:
    return number + other


@task(version=2, upcasters={1: None})
async def unchanged(number: int, factor: int = 2) -> int:
    return number * factor


@task(version=3, upcasters={2: None})
async def without_the_first(number: int) -> int:
    return number


def broken_upcaster(number: int) -> Args:
    raise ValueError("no such number")


@task(version=2, upcasters={1: broken_upcaster})
async def with_a_broken_upcaster(number: int) -> int:
    return number


@task(version=2, upcasters={1: lambda number: (number,)})  # type: ignore[dict-item, return-value]
async def with_an_upcaster_of_another_type(number: int) -> int:
    return number


@task(version=2, upcasters={1: lambda number: Args(number, number)})
async def with_an_upcaster_that_does_not_fit(number: int) -> int:
    return number


RUNS: list[Any] = []


@task(version=2, upcasters={1: lambda number: Args(number, "new")})
async def in_steps(ctx: TaskContext, number: int, text: str) -> str:
    async def double() -> int:
        RUNS.append("step")
        return number * 2

    doubled = await ctx.step("double", double)
    return f"{doubled} {text}"
