"""How the tasks of a function are enqueued, as `@task` was told, and what makes no sense there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from omniq.cron import check_cron
from omniq.durations import seconds_of
from omniq.errors import InvalidTask
from omniq.models import (
    BreakerRule,
    Task,
    TaskError,
    check_int,
    check_key,
    check_name,
)
from omniq.retry import Backoff
from omniq.tasks.error_rules import ErrorRules

Executor = Literal["async", "thread", "process"]
Hook = Callable[[Task, TaskError], Any]
"""What is called after a failure, with the task and its error; sync or async."""


_RATE = re.compile(r"([1-9]\d*)\s*/\s*([1-9]\d*)?\s*([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """How tasks of a function are enqueued unless the call says otherwise. None: not given.

    Durations are seconds. `rate` is (how many, in how many seconds); `expires` counts from the
    enqueue; `unique` and `limit_key` are keys, or functions that make one of the arguments.
    """

    queue: str | None = None
    priority: int | None = None
    max_retries: int | None = None
    retry: Backoff | None = None
    timeout: float | None = None
    executor: Executor | None = None
    breaker: tuple[BreakerRule, ...] = ()
    rate: tuple[int, float] | None = None
    max_running: int | None = None
    limit_key: str | Callable[..., str] | None = None
    cron: str | None = None
    tz: str | None = None
    interval: float | None = None
    expires: float | None = None
    result_ttl: float | None = None
    unique: str | Callable[..., str] | Literal[True] | None = None
    errors: ErrorRules | None = None
    on_failure: Hook | None = None
    on_dead: Hook | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def given(self) -> dict[str, Any]:
        """Only what was said, by name."""
        return {
            option.name: value
            for option in fields(self)
            if (value := getattr(self, option.name)) is not None and value != () and value != {}
        }


def check_options(**options: Any) -> TaskOptions:
    """The options as they are kept. Raises `InvalidTask` for those that make no sense."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None and not (name == "unique" and value is False)
    }
    known = {option.name for option in fields(TaskOptions)}
    if unknown := sorted(given.keys() - known):
        raise InvalidTask(f"@task: there is no option {unknown[0]!r}; known are {sorted(known)}")
    for name in ("timeout", "interval", "expires", "result_ttl"):
        if name in given:
            given[name] = seconds_of(name, given[name], above_zero=name != "result_ttl")
    for name, low in (("priority", -(2**63)), ("max_retries", 0), ("max_running", 1)):
        if name in given:
            check_int(name, given[name], low=low)
    if "queue" in given:
        check_name("queue", given["queue"])
    if "rate" in given:
        given["rate"] = _rate(given["rate"])
    if "breaker" in given:
        given["breaker"] = _breakers(given["breaker"])
    if "metadata" in given:
        given["metadata"] = _metadata(given["metadata"])
    _check_policies(given)
    _check_schedule(given)
    return TaskOptions(**given)


def _check_policies(given: dict[str, Any]) -> None:
    if "retry" in given and not isinstance(given["retry"], Backoff):
        raise InvalidTask("retry: expected ExponentialBackoff(...) or LinearBackoff(...)")
    if "executor" in given and given["executor"] not in get_args(Executor):
        raise InvalidTask(
            f"executor {given['executor']!r}: expected one of {', '.join(get_args(Executor))}"
        )
    if "errors" in given and not isinstance(given["errors"], ErrorRules):
        raise InvalidTask("errors: expected ErrorRules(...)")
    for name in ("on_failure", "on_dead"):
        if name in given and not callable(given[name]):
            raise InvalidTask(f"{name} {given[name]!r}: expected a function of (task, error)")
    for name in ("unique", "limit_key"):
        value = given.get(name)
        if isinstance(value, str):
            check_key(name, value)
        elif value is not None and not callable(value) and not (name == "unique" and value is True):
            raise InvalidTask(f"{name} {value!r}: expected a key, or a function that makes one")
    if "limit_key" in given and not ("rate" in given or "max_running" in given):
        raise InvalidTask("limit_key: give rate or max_running as well, or nothing is limited")


def _check_schedule(given: dict[str, Any]) -> None:
    for name in ("cron", "tz"):
        if name in given and (not isinstance(given[name], str) or not given[name].strip()):
            raise InvalidTask(f"{name} {given[name]!r}: expected text")
    if "cron" in given and "interval" in given:
        raise InvalidTask("give either cron or interval, not both")
    if "tz" in given and "cron" not in given:
        raise InvalidTask("tz: only a cron expression has a time zone")
    if "cron" in given:
        check_cron(given["cron"], given.get("tz"), error=InvalidTask)


def _rate(value: object) -> tuple[int, float]:
    """How many, in how many seconds.

    >>> _rate("100/5m")
    (100, 300.0)
    """
    if isinstance(value, str) and (found := _RATE.fullmatch(value.strip())):
        count, spans, unit = found.groups()
        return int(count), float(int(spans or 1) * _UNIT_SECONDS[unit])
    if isinstance(value, tuple) and len(value) == 2:
        count, per = value
        check_int("rate", count, low=1)
        return count, seconds_of("rate", per, above_zero=True)
    raise InvalidTask(f"rate {value!r}: expected text such as '10/s' or '100/5m', or (10, seconds)")


def _breakers(value: object) -> tuple[BreakerRule, ...]:
    several = [value] if isinstance(value, str | BreakerRule) else value
    if not isinstance(several, Iterable):
        raise InvalidTask(f"breaker {value!r}: expected a name, or several")
    rules = []
    for one in several:
        rule = BreakerRule(name=one) if isinstance(one, str) else one
        if not isinstance(rule, BreakerRule):
            raise InvalidTask(f"breaker {one!r}: expected a name")
        check_key("breaker", rule.name)
        rules.append(rule)
    return tuple(rules)


def _metadata(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidTask("metadata: expected a mapping with text as keys")
    return MappingProxyType(dict(value))
