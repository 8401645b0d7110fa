"""What can be played in a game on storages: the moves, and by which chances they are drawn.

Whatever comes first in a choice is what Hypothesis shrinks to.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from omniq.models import BreakerRule, Limit, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Rescheduled,
    Retried,
    Snoozed,
    Succeeded,
)

PLACES = 3

GATES: dict[str, dict[str, Any]] = {
    "": {},
    "running": {"limits": (Limit(key="one", max_running=1),)},
    "rate": {"limits": (Limit(key="two", rate=2, per=5.0),)},
    "both": {"limits": (Limit(key="one", max_running=1), Limit(key="two", rate=2, per=5.0))},
    "breaker": {"breakers": (BreakerRule(name="smtp", max_failures=2, reset_timeout=5.0),)},
}


class Wish(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A task to be enqueued. Times are seconds from now; without a `name` its id is a fresh one."""

    name: str | None = None
    queue: str = "default"
    priority: int = 0
    eta: int | None = None
    unique: str | None = None
    interval: float | None = None
    expires: int | None = None
    result_ttl: float | None = None
    gate: int = 0


class Ending(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """An outcome to be recorded for the claim that is `back` claims ago."""

    kind: str
    back: int = 0
    is_current: bool = True
    after: int = 0


class Claimed(msgspec.Struct, frozen=True):
    """A claim that was made, by whoever sat at that place."""

    place: int
    task_id: str
    token: int


FLAVOURS = st.sampled_from(
    (("",), ("", "running"), ("running",), ("running", "rate", "both"), ("breaker",), tuple(GATES))
)
MOSTLY = st.sampled_from((True, True, True, True, False))
PLACE = st.integers(0, PLACES - 1)
BACK = st.integers(0, 12)
QUEUES = ("default", "mail")
_NAMES = tuple(f"t{number}" for number in range(6))
_FEATURES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(_NAMES),
    "queue": st.sampled_from(QUEUES),
    "priority": st.sampled_from((1, -1)),
    "eta": st.sampled_from((-4, 0, 3, 20)),
    "unique": st.sampled_from(("red", "green", "blue")),
    "interval": st.just(5.0),
    "expires": st.sampled_from((2, 15, -1)),
    "result_ttl": st.sampled_from((0.0, 5.0)),
}


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Tasks of all kinds."""
    # A few features at a time: short games are easier to read, and to shrink.
    names = draw(st.lists(st.sampled_from(tuple(_FEATURES)), max_size=3, unique=True))
    features = {name: draw(_FEATURES[name]) for name in names}
    return Wish(gate=draw(st.integers(0, 4)), **features)


BATCH = st.lists(wishes(), min_size=1, max_size=4)
ENDINGS = st.builds(
    Ending,
    kind=st.sampled_from(
        (
            "succeed", "retry", "fail", "hold", "reschedule", "snooze", "release", "unknown",
            "cancel", "repeat",
        )
    ),
    back=BACK,
    is_current=MOSTLY,
    after=st.sampled_from((0, 0, 2, 12, -3)),
)  # fmt: skip
SECONDS = st.sampled_from((0, -6, 4, 30))
WHEN = st.one_of(st.none(), st.none(), SECONDS)
WHICH_QUEUES = st.sampled_from(
    (None, None, None, None, ("default",), ("mail",), ("mail", "default"), ("none",))
)


_Method = TypeVar("_Method", bound=Callable[..., None])
Choice = tuple[str, dict[str, Any]]
_MOVES: list[str] = []
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
NEEDS: dict[str, str] = {}


def move(
    weight: int, *, needs: str = "", **arguments: st.SearchStrategy[Any]
) -> Callable[[_Method], _Method]:
    """A move of the game, as likely as its weight says; left out while `needs` is empty."""

    def mark(method: _Method) -> _Method:
        _MOVES.extend([method.__name__] * weight)
        ARGUMENTS[method.__name__] = st.fixed_dictionaries(arguments)
        NEEDS[method.__name__] = needs
        return method

    return mark


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    """A move and its arguments."""
    name = draw(st.sampled_from(_MOVES))
    return name, draw(ARGUMENTS[name])


# From moves to what storages take


def task_of(wish: Wish, task_id: str, gate: str, *, args: tuple[Any, ...], now: datetime) -> Task:
    """The task that is wished for."""
    # A parked task is not looked at, so when one ends for being late is not for the model to say.
    expires = None if gate else wish.expires
    return Task(
        id=task_id,
        func_path="shop.pack",
        args=args,
        queue=wish.queue,
        priority=wish.priority,
        eta=None if wish.eta is None else now + timedelta(seconds=wish.eta),
        unique=wish.unique,
        interval=wish.interval,
        expires=None if expires is None else now + timedelta(seconds=expires),
        result_ttl=wish.result_ttl,
        created_at=now,
        **GATES[gate],
    )


def an_error(now: datetime) -> TaskError:
    """What runs fail with."""
    return TaskError("no stock", error_type="ShopError", timestamp=now)


def outcome_of(ending: Ending, claim: Claimed, *, now: datetime, repeats: bool) -> Outcome:
    """The outcome of a claim."""
    task_id, token, at = claim.task_id, claim.token, now + timedelta(seconds=ending.after)
    result = TaskResult(task_id=task_id, status=TaskStatus.SUCCESS, result=ending.back, attempts=1)
    outcomes: dict[str, Outcome] = {
        "succeed": Succeeded(task_id, token, result),
        "repeat": Succeeded(task_id, token, result, at if repeats else None),
        "retry": Retried(task_id, token, an_error(now), at),
        "hold": Retried(task_id, token, an_error(now)),
        "fail": Failed(task_id, token, an_error(now), "broken"),
        "reschedule": Rescheduled(task_id, token, at),
        "snooze": Snoozed(task_id, token, at),
        "release": Released(task_id, token),
        "unknown": Released(task_id, token, True, at),
        "cancel": Cancelled(task_id, token, "discarded"),
    }
    return outcomes[ending.kind]
