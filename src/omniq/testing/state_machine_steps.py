"""The steps of the storage state machine, their arguments, and how often each is drawn.

Hypothesis shrinks to the first element of each `sampled_from`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from omniq.models import (
    BreakerRule,
    FairShare,
    Limit,
    Runnable,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
)
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

SLOTS = 3

GATES: dict[str, dict[str, Any]] = {
    "": {},
    "running": {"limits": (Limit(key="one", max_running=1),)},
    "rate": {"limits": (Limit(key="two", rate=2, per=5.0),)},
    "both": {"limits": (Limit(key="one", max_running=1), Limit(key="two", rate=2, per=5.0))},
    "breaker": {"breakers": (BreakerRule(name="smtp", max_failures=2, reset_timeout=5.0),)},
}


SHARES: dict[str, dict[str, Any]] = {
    "": {},
    "a": {"fair": FairShare(key="a")},
    "b": {"fair": FairShare(key="b")},
    "heavy": {"fair": FairShare(key="heavy", weight=4)},
    "dear": {"fair": FairShare(key="a", cost=2)},
    "ageing": {"ageing": 3.0},
}
"""What decides the order of a task besides its priority and its eta."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A task to enqueue. Times are seconds from now; without a `name` it gets a new id."""

    name: str | None = None
    queue: str = "default"
    priority: int = 0
    eta: int | None = None
    unique: str | None = None
    interval: float | None = None
    expires: int | None = None
    result_ttl: float | None = None
    max_crashes: int | None = None
    gate: int = 0
    function: str = "shop.pack"
    share: str = ""


class OutcomeSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """An outcome to record for the claim that was made `back` claims ago."""

    kind: str
    back: int = 0
    is_current: bool = True
    after: int = 0


class Claimed(msgspec.Struct, frozen=True):
    """A claim, and the owner slot that made it."""

    slot: int
    task_id: str
    token: int


GATE_MIXES = st.sampled_from(
    (("",), ("", "running"), ("running",), ("running", "rate", "both"), ("breaker",), tuple(GATES))
)
MOSTLY_TRUE = st.sampled_from((True, True, True, True, False))
SLOT = st.integers(0, SLOTS - 1)
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
    "max_crashes": st.sampled_from((0, 2, 3)),
    "share": st.sampled_from(tuple(SHARES)[1:]),
    "function": st.sampled_from(("shop.mail.send", "shopping.pack", "bank.pay")),
}


@st.composite
def task_specs(draw: st.DrawFn) -> TaskSpec:
    """A strategy for tasks with up to three features."""
    # Few features at a time: short runs are easier to read, and to shrink.
    names = draw(st.lists(st.sampled_from(tuple(_FEATURES)), max_size=3, unique=True))
    features = {name: draw(_FEATURES[name]) for name in names}
    return TaskSpec(gate=draw(st.integers(0, 4)), **features)


TASK_BATCHES = st.lists(task_specs(), min_size=1, max_size=4)
OUTCOMES = st.builds(
    OutcomeSpec,
    kind=st.sampled_from(
        (
            "succeed", "retry", "fail", "hold", "reschedule", "snooze", "release", "unknown",
            "cancel", "repeat", "interrupt", "go_on",
        )
    ),
    back=BACK,
    is_current=MOSTLY_TRUE,
    after=st.sampled_from((0, 0, 2, 12, -3)),
)  # fmt: skip
CHANGED_ETAS = (0, 3, -4, 20)
"""Seconds from now until the changed eta of a task."""

SECONDS = st.sampled_from((0, -6, 4, 30))
CLAIM_TIMES = st.one_of(st.none(), st.none(), SECONDS)
QUEUE_FILTERS = st.sampled_from(
    (None, None, None, None, ("default",), ("mail",), ("mail", "default"), ("none",))
)
RUNNABLES = st.sampled_from(
    (
        None,
        None,
        None,
        Runnable(modules=("shop",)),
        Runnable(modules=("shop.mail", "bank"), names=frozenset({"shop.pack"})),
        Runnable(modules=("shop", "shopping"), excluded=frozenset({"shop.pack"})),
        Runnable(names=frozenset({"bank.pay", "shopping.pack"})),
        Runnable(modules=None, excluded=frozenset({"shop.mail.send", "shop"})),
    )
)


_Method = TypeVar("_Method", bound=Callable[..., None])
Step = tuple[str, dict[str, Any]]
_STEPS: list[str] = []
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
NEEDS: dict[str, str] = {}


def step(
    weight: int, *, needs: str = "", **arguments: st.SearchStrategy[Any]
) -> Callable[[_Method], _Method]:
    """Register a method as a step with this weight; skipped while the attribute `needs` is empty."""

    def register(method: _Method) -> _Method:
        _STEPS.extend([method.__name__] * weight)
        ARGUMENTS[method.__name__] = st.fixed_dictionaries(arguments)
        NEEDS[method.__name__] = needs
        return method

    return register


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A strategy for one step and its arguments."""
    name = draw(st.sampled_from(_STEPS))
    return name, draw(ARGUMENTS[name])


# From specs to the values that storages take


def task_of(
    spec: TaskSpec, task_id: str, gate: str, *, args: tuple[Any, ...], now: datetime
) -> Task:
    """The task that `spec` describes."""
    queue = spec.queue
    if SHARES[spec.share].get("fair") is not None:
        gate, queue = "", "mail"
    elif gate:
        # Where a line begins in which tasks are parked depends on which of them a claim has examined.
        queue = "default"
    # A claim does not examine a parked task, so the model cannot predict when it expires.
    expires = None if gate else spec.expires
    return Task(
        id=task_id,
        func_path=spec.function,
        args=args,
        queue=queue,
        priority=spec.priority,
        eta=None if spec.eta is None else now + timedelta(seconds=spec.eta),
        unique=spec.unique,
        interval=spec.interval,
        expires=None if expires is None else now + timedelta(seconds=expires),
        result_ttl=spec.result_ttl,
        max_crashes=spec.max_crashes,
        created_at=now,
        **GATES[gate],
        **SHARES[spec.share],
    )


def an_error(now: datetime) -> TaskError:
    """The error of failed runs."""
    return TaskError("no stock", error_type="ShopError", timestamp=now)


def outcome_of(spec: OutcomeSpec, claim: Claimed, *, now: datetime, repeats: bool) -> Outcome:
    """The outcome that `spec` describes, for a claim."""
    task_id, token, at = claim.task_id, claim.token, now + timedelta(seconds=spec.after)
    result = TaskResult(task_id=task_id, status=TaskStatus.SUCCESS, result=spec.back, attempts=1)
    outcomes: dict[str, Outcome] = {
        "succeed": Succeeded(task_id, token, result),
        "repeat": Succeeded(task_id, token, result, at if repeats else None),
        "retry": Retried(task_id, token, an_error(now), at),
        "hold": Retried(task_id, token, an_error(now)),
        "fail": Failed(task_id, token, an_error(now), "broken", hook=""),
        "interrupt": Failed(task_id, token, an_error(now), "crashed"),
        "go_on": Failed(task_id, token, an_error(now), "broken", at if repeats else None),
        "reschedule": Rescheduled(task_id, token, at),
        "snooze": Snoozed(task_id, token, at),
        "release": Released(task_id, token),
        "unknown": Released(task_id, token, True, at),
        "cancel": Cancelled(task_id, token, "discarded"),
    }
    return outcomes[spec.kind]
