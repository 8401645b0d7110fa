"""The options of a task: one table, from which checks, help texts and the docs are made.

`OPTIONS` says for each option where it can be given, its type, its default, its help text and its
check. A test compares the table with the signatures of `@task`, `options(…)`, `schedules.add` and
the two commands; `docs/reference/options.md` is generated from it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

from omniq.cron import check_cron
from omniq.errors import InvalidTask
from omniq.models import (
    NO_TIMEOUT,
    BreakerRule,
    Limit,
    OnConflict,
    Task,
    TaskError,
    TaskResult,
    check_above_zero,
    check_delays,
    check_int,
    check_key,
    check_name,
)
from omniq.retry import Backoff
from omniq.tasks.declared_schedules import Cron, DeclaredSchedule, Interval
from omniq.tasks.durations import UNIT_SECONDS, seconds_of
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.versions import FIRST_VERSION, Upcasters, check_upcasters, checked_upcasters

Executor = Literal["async", "thread", "process"]
SequenceOnFailure = Literal["continue", "halt"]
"""Whether the next task of a sequence runs after one has failed for good."""

Hook = Callable[[Task, TaskError], Any]
"""A function, sync or async, that is called with a task and its error after a failure."""

SuccessHook = Callable[[Task, TaskResult], Any]
"""A function, sync or async, that is called with a task and its result after a success."""

Face = Literal["@task", "options", "schedules.add", "omniq enqueue", "omniq schedules add"]
"""A place where an option can be given."""

OTHER_WORDS: Mapping[str, str] = {
    "age_limit": "expires",
    "at": "eta",
    "autoretry_for": "errors",
    "countdown": "delay",
    "defer_by": "delay",
    "defer_until": "eta",
    "job_id": "task_id",
    "job_timeout": "timeout",
    "max_tries": "max_retries",
    "meta": "metadata",
    "queue_name": "queue",
    "queueing_lock": "unique",
    "rate_limit": "rate",
    "retries": "max_retries",
    "retry_delays": "retry",
    "retry_backoff": "retry",
    "schedule_at": "eta",
    "schedule_in": "delay",
    "soft_time_limit": "timeout",
    "throws": "errors",
    "time_limit": "timeout",
}
"""Words of other task queues, without a leading underscore, and the options with that meaning."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_FUNC_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_RATE = re.compile(r"([1-9]\d*)\s*/\s*([1-9]\d*)?\s*([smhd])")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """How tasks of a function are enqueued unless the call says otherwise. None: not given.

    Durations are seconds. `retry` is a backoff, or a list of delays; a `timeout` of `NO_TIMEOUT` is no
    limit. `rate` is (count, seconds); `expires` counts from the enqueue; `unique`, `limit_key`, `sequence` and
    `fair_key` are keys, or functions that make a key from the arguments.
    """

    queue: str | None = None
    priority: int | None = None
    max_retries: int | None = None
    max_crashes: int | None = None
    retry: Backoff | tuple[float, ...] | None = None
    timeout: float | None = None
    executor: Executor | None = None
    breaker: tuple[BreakerRule, ...] = ()
    rate: tuple[int, float] | None = None
    max_running: int | None = None
    limit_key: str | Callable[..., str] | None = None
    cost: float | Callable[..., float] | None = None
    limits: tuple[Limit, ...] | Callable[..., Iterable[Limit]] = ()
    sequence: str | Callable[..., str] | None = None
    sequence_on_failure: SequenceOnFailure | None = None
    fair_key: str | Callable[..., str] | None = None
    fair_weight: float | Callable[..., float] | None = None
    ageing: float | None = None
    cron: str | None = None
    tz: str | None = None
    interval: float | None = None
    reschedule_on_failure: bool | None = None
    expires: float | None = None
    result_ttl: float | None = None
    unique: str | Callable[..., str] | Literal[True] | None = None
    on_conflict: OnConflict | None = None
    max_wait: float | None = None
    unique_for: float | None = None
    errors: ErrorRules | None = None
    on_success: SuccessHook | None = None
    on_failure: Hook | None = None
    on_dead: Hook | None = None
    name: str | None = None
    aliases: tuple[str, ...] = ()
    version: int | None = None
    upcasters: Upcasters | None = None
    schedules: tuple[DeclaredSchedule, ...] = ()
    task_type: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a worker finds the function, besides its path."""
        return self.aliases if self.name is None else (self.name, *self.aliases)

    def given(self) -> dict[str, Any]:
        """Return only the options that were given, by name."""
        return {
            option.name: value
            for option in fields(self)
            if (value := getattr(self, option.name)) is not None and value != () and value != {}
        }


def check_options(face: Face = "@task", /, **options: Any) -> TaskOptions:
    """Return the options in the form that is stored. Raises `InvalidTask` for bad ones."""
    given = {
        name: value
        for name, value in options.items()
        # A timeout of None is given: no limit.
        if (value is not None or name == "timeout") and not (name == "unique" and value is False)
    }
    refuse_unknown(face, given)
    checked = {name: OPTIONS[name].check(name, value) for name, value in given.items()}
    _check_together(checked)
    if face == "@task":
        check_upcasters(checked.get("version", FIRST_VERSION), checked.get("upcasters"))
    return TaskOptions(**checked)


def _check_together(given: dict[str, Any]) -> None:
    """Refuse options that contradict each other; add what one option says for another."""
    if "limit_key" in given and not ("rate" in given or "max_running" in given):
        raise InvalidTask("limit_key: give rate or max_running as well, or nothing is limited")
    if "sequence_on_failure" in given and "sequence" not in given:
        raise InvalidTask("sequence_on_failure: give sequence as well, or there is none")
    if "fair_weight" in given and "fair_key" not in given:
        raise InvalidTask("fair_weight: give fair_key as well, or nothing is shared")
    if "fair_key" in given and "ageing" in given:
        raise InvalidTask("give either fair_key or ageing, not both: each decides the order")
    if isinstance(delays := given.get("retry"), tuple):
        count = given.setdefault("max_retries", len(delays))
        if count != len(delays):
            raise InvalidTask(
                f"max_retries={count} and a retry list of {len(delays)} delays contradict each other: "
                "give the list alone, its length is the number of retries"
            )
    if "schedules" in given and ("cron" in given or "interval" in given):
        raise InvalidTask("give either schedules or one of cron and interval, not both")
    if "cron" in given and "interval" in given:
        raise InvalidTask("give either cron or interval, not both")
    if "tz" in given and "cron" not in given:
        raise InvalidTask("tz: only a cron expression has a time zone")
    if "cron" in given:
        check_cron(given["cron"], given.get("tz"), error=InvalidTask)


# Checks of one option: each returns the value in the form that `TaskOptions` holds


def _queue(name: str, value: Any) -> Any:
    check_name(name, value)
    return value


def _integer(name: str, value: Any, *, low: int) -> Any:
    check_int(name, value, low=low)
    return value


def _duration(name: str, value: Any, *, above_zero: bool = True) -> float:
    seconds: float = seconds_of(name, value, above_zero=above_zero)
    return seconds


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidTask(f"{name} {value!r}: expected text")
    return value


def _key(name: str, value: Any) -> Any:
    if isinstance(value, str):
        check_key(name, value)
    elif not callable(value) and not (name == "unique" and value is True):
        raise InvalidTask(f"{name} {value!r}: expected a key, or a function that makes one")
    return value


def _number(name: str, value: Any) -> Any:
    if not callable(value):
        check_above_zero(name, value)
    return value


def check_limits(name: str, value: Any) -> tuple[Limit, ...]:
    """Refuse anything but limits."""
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for each in found:
        if not isinstance(each, Limit):
            raise InvalidTask(f"{name} {each!r}: expected a list of Limit(…)")
    return found


def _limits(name: str, value: Any) -> Any:
    return value if callable(value) else check_limits(name, value)


def _retry(name: str, value: Any) -> Backoff | tuple[float, ...]:
    """Return the backoff, or the delays in seconds.

    >>> _retry("retry", [10, timedelta(minutes=1)])
    (10.0, 60.0)
    """
    if isinstance(value, Backoff):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidTask(
            f"{name} {value!r}: expected a list of delays such as [10, 30, 60], "
            "ExponentialBackoff(...) or LinearBackoff(...)"
        )
    delays = [each.total_seconds() if isinstance(each, timedelta) else each for each in value]
    check_delays(name, delays)
    return tuple(map(float, delays))


def _timeout(name: str, value: Any) -> float:
    return NO_TIMEOUT if value is None else seconds_of(name, value, above_zero=True)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidTask(f"{name} {value!r}: expected True or False")
    return value


def _label(name: str, value: Any) -> Any:
    check_key(name, value)
    return value


def _executor(_: str, value: Any) -> Any:
    if value not in get_args(Executor):
        raise InvalidTask(f"executor {value!r}: expected one of {', '.join(get_args(Executor))}")
    return value


def _on_failure(name: str, value: Any) -> Any:
    if value not in get_args(SequenceOnFailure):
        raise InvalidTask(
            f"{name} {value!r}: expected one of {', '.join(get_args(SequenceOnFailure))}"
        )
    return value


def _on_conflict(name: str, value: Any) -> Any:
    if value not in get_args(OnConflict):
        raise InvalidTask(f"{name} {value!r}: expected one of {', '.join(get_args(OnConflict))}")
    return value


def _error_rules(_: str, value: Any) -> ErrorRules:
    if not isinstance(value, ErrorRules):
        raise InvalidTask("errors: expected ErrorRules(...)")
    return value


def _hook(name: str, value: Any) -> Any:
    second = "result" if name == "on_success" else "error"
    if not callable(value):
        raise InvalidTask(f"{name} {value!r}: expected a function of (task, {second})")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        # Some builtins have none.
        return value
    try:
        signature.bind(None, None)
    except TypeError:
        # Here and not at the first failure, which the hook is there to report.
        given = getattr(value, "__qualname__", repr(value))
        raise InvalidTask(
            f"{name} {given}: expected a function of (task, {second}), but it takes {signature}"
        ) from None
    return value


def _task_name(name: str, value: Any) -> str:
    # An alias may be an older path, whose words may have any letters.
    words = _DOTTED if name == "name" else _FUNC_PATH
    if not isinstance(value, str) or not words.fullmatch(value) or len(value) > 512:
        raise InvalidTask(
            f"{name} {value!r}: expected words with dots between them, such as 'mail.send', of "
            "ASCII letters, digits and underscores"
        )
    first, *_, last = value.split(".")
    if any(part.startswith("__") for part in value.split(".")) or last.startswith("_"):
        raise InvalidTask(f"{name} {value!r}: names with a leading underscore are never run")
    if first in sys.stdlib_module_names or first == "omniq":
        raise InvalidTask(
            f"{name} {value!r}: {first} is a module whose functions are never run; begin with "
            f"another word, such as 'app.{value}'"
        )
    return value


def _task_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidTask(f"{name} {value!r}: expected a list of names")
    return tuple(dict.fromkeys(_task_name(name, each) for each in value))


def _schedules(name: str, value: Any) -> tuple[DeclaredSchedule, ...]:
    several = [value] if isinstance(value, Cron | Interval) else value
    if isinstance(several, str) or not isinstance(several, Iterable):
        raise InvalidTask(f"{name} {value!r}: expected a list, such as [Cron('0 3 * * *')]")
    found = tuple(several)
    for each in found:
        if not isinstance(each, Cron | Interval):
            raise InvalidTask(f"{name} {each!r}: expected Cron(…) or Interval(…)")
    return found


def rate_of(_: str, value: Any) -> tuple[int, float]:
    """The number of starts and the seconds of a rate.

    >>> rate_of("rate", "100/5m")
    (100, 300.0)
    """
    if isinstance(value, str) and (found := _RATE.fullmatch(value.strip())):
        count, spans, unit = found.groups()
        return int(count), float(int(spans or 1) * UNIT_SECONDS[unit])
    if isinstance(value, tuple) and len(value) == 2:
        count, per = value
        check_int("rate", count, low=1)
        return count, seconds_of("rate", per, above_zero=True)
    raise InvalidTask(f"rate {value!r}: expected text such as '10/s' or '100/5m', or (10, seconds)")


def _breakers(_: str, value: Any) -> tuple[BreakerRule, ...]:
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


def _metadata(_: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidTask("metadata: expected a mapping with text as keys")
    return MappingProxyType(dict(value))


def _unchecked(_: str, value: Any) -> Any:
    return value


# The table


@dataclass(frozen=True, slots=True)
class Option:
    """One option: `type` and `default` are texts for readers, `example` is for the command line.

    `check` returns the value as it is stored, or raises `InvalidTask`. Options that `@task` does not
    have are checked by `call_options` and by `Schedule`.
    """

    name: str
    _: KW_ONLY
    type: str
    default: str = ""
    faces: frozenset[Face]
    help: str
    example: str = ""
    check: Callable[[str, Any], Any] = _unchecked


_EVERYWHERE: frozenset[Face] = frozenset(get_args(Face))
_IN_PYTHON: frozenset[Face] = frozenset({"@task", "options", "schedules.add"})
_NOT_ADD = _EVERYWHERE - {"omniq schedules add"}
_NOT_SCHEDULED: frozenset[Face] = frozenset({"@task", "options", "omniq enqueue"})
_DECORATOR: frozenset[Face] = frozenset({"@task"})
_CALL: frozenset[Face] = frozenset({"options", "omniq enqueue"})
_SCHEDULE: frozenset[Face] = frozenset({"schedules.add", "omniq schedules add"})

_FUNCTION = "function of (task, error)"
_SPANS = "30s, 5m, 2h or 7d"
_INSTANT = "2026-01-31T12:00Z"

OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            "queue",
            type="str",
            default="default",
            faces=_EVERYWHERE,
            help="The queue of the task.",
            check=_queue,
        ),
        Option(
            "priority",
            type="int",
            default="0",
            faces=_EVERYWHERE,
            help="Tasks with a higher priority run first.",
            check=partial(_integer, low=-(2**63)),
        ),
        Option(
            "max_retries",
            type="int",
            default="setting default_max_retries",
            faces=_NOT_ADD,
            help="The number of retries after a failed first run.",
            check=partial(_integer, low=0),
        ),
        Option(
            "max_crashes",
            type="int",
            default="setting max_crashes",
            faces=_IN_PYTHON,
            help=(
                "The number of workers that may die while they run the task before it becomes a dead "
                "letter. With 0, a run that was interrupted is never repeated."
            ),
            check=partial(_integer, low=0),
        ),
        Option(
            "retry",
            type="list of durations, ExponentialBackoff or LinearBackoff",
            default="setting retry, else exponential",
            faces=_NOT_ADD,
            help="The delays before retries. A list has one delay for each retry, and its length is max_retries.",
            check=_retry,
        ),
        Option(
            "timeout",
            type="duration or None",
            default="setting default_timeout",
            faces=_NOT_ADD,
            help="Stop a run after this time. None means no limit; on the command line: none.",
            check=_timeout,
        ),
        Option(
            "executor",
            type="async, thread or process",
            default="async for async def, else thread",
            faces=_DECORATOR,
            help="Where the function runs.",
            check=_executor,
        ),
        Option(
            "breaker",
            type="str, BreakerRule, or several",
            faces=_IN_PYTHON,
            help="The circuit breakers that hold the task while they are open.",
            check=_breakers,
        ),
        Option(
            "rate",
            type="str such as 10/s, or (count, duration)",
            faces=_IN_PYTHON,
            help="The number of runs that may start in a period of time.",
            check=rate_of,
        ),
        Option(
            "max_running",
            type="int",
            faces=_IN_PYTHON,
            help="The number of tasks with the same limit key that may run at the same time.",
            check=partial(_integer, low=1),
        ),
        Option(
            "limit_key",
            type="str, or function of the arguments",
            default="path of the function",
            faces=_IN_PYTHON,
            help="Tasks with the same key share rate and max_running.",
            check=_key,
        ),
        Option(
            "cost",
            type="number above 0, or function of the arguments",
            default="1",
            faces=_IN_PYTHON,
            help="The units that the task takes of rate and max_running, which are then numbers of units, and of its fair_key.",
            check=_number,
        ),
        Option(
            "limits",
            type="list of Limit, or function of the arguments",
            faces=_IN_PYTHON,
            help="More limits that the task must pass: it enters all of them together.",
            check=_limits,
        ),
        Option(
            "sequence",
            type="str, or function of the arguments",
            faces=_NOT_ADD,
            help="Run the tasks with this key one at a time, in the order of their enqueue.",
            check=_key,
        ),
        Option(
            "sequence_on_failure",
            type="continue or halt",
            default="continue",
            faces=_NOT_ADD,
            help="Whether the next task of the sequence runs after one has failed for good.",
            check=_on_failure,
        ),
        Option(
            "fair_key",
            type="str, or function of the arguments",
            faces=_NOT_ADD,
            help="The keys of the waiting tasks in a queue take turns, however many tasks each of them has.",
            check=_key,
        ),
        Option(
            "fair_weight",
            type="number above 0, or function of the arguments",
            default="1",
            faces=_NOT_ADD,
            help="How many turns the fair_key gets for one of a key with weight 1.",
            check=_number,
        ),
        Option(
            "ageing",
            type="duration",
            faces=_NOT_ADD,
            help="The time of waiting that is worth one step of priority, so that no task waits for ever.",
            example=_SPANS,
            check=_duration,
        ),
        Option(
            "cron",
            type="str",
            faces=_EVERYWHERE,
            help="Run at the times of a cron expression.",
            example="'0 3 * * MON-FRI'",
            check=_text,
        ),
        Option(
            "tz",
            type="str",
            default="UTC",
            faces=_EVERYWHERE,
            help="The time zone of the cron expression.",
            example="Europe/Berlin",
            check=_text,
        ),
        Option(
            "interval",
            type="duration",
            faces=_EVERYWHERE,
            help="Run repeatedly, with this time between runs.",
            example="30s or 2h",
            check=_duration,
        ),
        Option(
            "reschedule_on_failure",
            type="bool",
            default="False",
            faces=_NOT_SCHEDULED,
            help="Continue a repeating task with its next run after a failure that is not retried.",
            check=_switch,
        ),
        Option(
            "expires",
            type="duration; in options also datetime",
            faces=_NOT_ADD,
            help="When to cancel the task if it has not started.",
            example=_SPANS,
            check=_duration,
        ),
        Option(
            "result_ttl",
            type="duration",
            default="setting result_ttl",
            faces=_IN_PYTHON,
            help="The time for which the result is stored; 0 stores no result.",
            check=partial(_duration, above_zero=False),
        ),
        Option(
            "unique",
            type="str, True, or function of the arguments",
            faces=_NOT_ADD,
            help="Allow one unfinished task with this key.",
            check=_key,
        ),
        Option(
            "on_conflict",
            type="keep, replace or extend",
            default="keep",
            faces=_NOT_SCHEDULED,
            help="What to do with the task that holds the unique key: nothing, give it the new call, or delay it.",
            check=_on_conflict,
        ),
        Option(
            "max_wait",
            type="duration",
            faces=_NOT_SCHEDULED,
            help="How long on_conflict may delay a task after the first call with its unique key.",
            example=_SPANS,
            check=_duration,
        ),
        Option(
            "unique_for",
            type="duration",
            faces=_NOT_SCHEDULED,
            help="Hold the unique key for this time from the enqueue, also when the task has ended.",
            example=_SPANS,
            check=_duration,
        ),
        Option(
            "errors",
            type="ErrorRules",
            default="setting errors",
            faces=_DECORATOR,
            help="Rules that decide which exceptions are retried.",
            check=_error_rules,
        ),
        Option(
            "on_success",
            type="function of (task, result)",
            faces=_DECORATOR,
            help="Called after a successful run, once the success is recorded.",
            check=_hook,
        ),
        Option(
            "on_failure",
            type=_FUNCTION,
            faces=_DECORATOR,
            help="Called after every failed run.",
            check=_hook,
        ),
        Option(
            "on_dead",
            type=_FUNCTION,
            faces=_DECORATOR,
            help="Called when the task fails for good.",
            check=_hook,
        ),
        Option(
            "name",
            type="str such as mail.send",
            default="path of the function",
            faces=_DECORATOR,
            help="The name under which tasks of the function are stored; it stays when the function moves.",
            check=_task_name,
        ),
        Option(
            "aliases",
            type="list of str",
            faces=_DECORATOR,
            help="Further names, such as earlier paths, whose stored tasks the function runs.",
            check=_task_names,
        ),
        Option(
            "version",
            type="int",
            default="1",
            faces=_EVERYWHERE,
            help="The version of the function's parameters: a worker with an older one leaves the task to others.",
            check=partial(_integer, low=1),
        ),
        Option(
            "upcasters",
            type="mapping of int to function or None",
            faces=_DECORATOR,
            help="For each older version the function that turns its arguments into those of the next one.",
            check=checked_upcasters,
        ),
        Option(
            "task_type",
            type="str",
            default="path of the function",
            faces=_NOT_ADD,
            help="The kind of work, shown in logs, metrics and dead letters; never decides what runs.",
            check=_label,
        ),
        Option(
            "schedules",
            type="list of Cron and Interval",
            faces=_DECORATOR,
            help="Calls of the function at certain times, each with its arguments.",
            check=_schedules,
        ),
        Option(
            "metadata",
            type="mapping with str keys",
            faces=_NOT_ADD,
            help="Data that is stored with the task.",
            check=_metadata,
        ),
        Option(
            "connection",
            type="connection of a database driver",
            faces=frozenset({"options"}),
            help="Enqueue in the open transaction of this connection.",
        ),
        Option(
            "after",
            type="handles of tasks and flows, or ids",
            faces=frozenset({"options"}),
            help="Run the task when all of these have succeeded; if one does not, cancel it.",
        ),
        Option(
            "after_any",
            type="handles of tasks and flows, or ids",
            faces=frozenset({"options"}),
            help="Run the task when all of these have ended, in whatever way.",
        ),
        Option(
            "eta",
            type="datetime",
            faces=_CALL,
            help="Do not start the task before this time.",
            example=_INSTANT,
        ),
        Option(
            "delay",
            type="duration",
            faces=_CALL,
            help="Do not start the task until this time has passed.",
            example=_SPANS,
        ),
        Option(
            "task_id",
            type="str",
            default="a new id",
            faces=_CALL,
            help="The id of the task.",
        ),
        Option(
            "at",
            type="datetime",
            faces=_SCHEDULE,
            help="Run once, at this time.",
            example=_INSTANT,
        ),
        Option(
            "start",
            type="datetime",
            faces=_SCHEDULE,
            help="Skip the times before this one; intervals count from it.",
            example=_INSTANT,
        ),
        Option(
            "end",
            type="datetime",
            faces=_SCHEDULE,
            help="Skip the times after this one.",
            example=_INSTANT,
        ),
        Option(
            "missed",
            type="once, all or skip",
            default="once",
            faces=_SCHEDULE,
            help="What to do with times that passed while no worker ran.",
        ),
        Option(
            "max_missed",
            type="int",
            default="100",
            faces=frozenset({"schedules.add"}),
            help="The maximum number of missed times that missed=all runs.",
        ),
        Option(
            "overlap",
            type="allow, skip, queue or cancel_old",
            default="allow",
            faces=_SCHEDULE,
            help="What to do when the previous run has not ended.",
        ),
        Option(
            "jitter",
            type="duration",
            default="0",
            faces=_SCHEDULE,
            help="Delay each run by up to this time.",
            example=_SPANS,
        ),
    )
}


def names_on(face: Face) -> set[str]:
    """Return the names of the options that can be given there."""
    return {option.name for option in OPTIONS.values() if face in option.faces}


def refuse_unknown(face: Face, given: Iterable[str]) -> None:
    """Raise `InvalidTask` for the first name that is no option there."""
    known = names_on(face)
    for name in given:
        if name not in known:
            raise InvalidTask(f"{_shown(face)}: {_why_unknown(name, face, known)}")


def _shown(face: Face) -> str:
    return f"{face}(…)" if face in ("options", "schedules.add") else face


def _why_unknown(name: str, face: Face, known: set[str]) -> str:
    if name in OPTIONS:
        others = next(each for each in get_args(Face) if each in OPTIONS[name].faces)
        place = f": queue.options({name}=…)" if face == "@task" else ""
        return f"{name} is an option of {_shown(others)}, not of {_shown(face)}{place}"
    meant = OTHER_WORDS.get(name.lstrip("_"))
    near = [meant] if meant in known else get_close_matches(name, known, n=1)
    of_calls = names_on("options") if face == "@task" else set()
    of_call = [meant] if meant in of_calls else get_close_matches(name, of_calls, n=1)
    if of_call and of_call[0] not in known and (meant or not near):
        return (
            f"there is no option {name!r}; did you mean {of_call[0]}? It is an option of each call: "
            f"queue.options({of_call[0]}=…)"
        )
    if near:
        return f"there is no option {name!r}; did you mean {near[0]}?"
    return f"there is no option {name!r}; the options are {', '.join(sorted(known))}"


def option_help(name: str) -> str:
    """Return the help text of an option for the command line.

    >>> option_help("tz")
    'The time zone of the cron expression. Example: Europe/Berlin.'
    """
    option = OPTIONS[name]
    return option.help if not option.example else f"{option.help} Example: {option.example}."
