"""Builds the `Task` of a call: options of the call first, then of `@task`, then the settings.

Of the settings, those of the queue come before those for all queues.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from omniq.clock import Clock
from omniq.cron import next_run
from omniq.errors import InvalidTask
from omniq.models import (
    FairShare,
    Limit,
    Task,
    TaskWorkflow,
    check_above_zero,
    check_id,
    check_instant,
    check_key,
)
from omniq.serialization import MsgspecSerializer, keeps_objects
from omniq.settings import Settings
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.functions import not_a_function, options_of, pass_to_queue, path_of
from omniq.tasks.options import TaskOptions, check_limits, check_options
from omniq.tasks.secret_parameters import secret_parameters

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

_Call = tuple[tuple[Any, ...], dict[str, Any]]

_FOR_WORKERS = frozenset(
    (
        "executor",
        "errors",
        "on_failure",
        "on_success",
        "on_dead",
        "name",
        "aliases",
        "schedules",
        "upcasters",
    )
)

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """The options of one call: those that `@task` also has, and those of calls only."""

    options: TaskOptions
    task_id: str | None = None
    eta: datetime | None = None
    delay: float | None = None
    expires_at: datetime | None = None
    workflow: TaskWorkflow | None = None


class Standing:
    """An argument in which results of other tasks stand: it is converted when they are there."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_FunctionFacts = tuple[str, Mapping[str, Any], tuple[int | str, ...], FunctionTypes | None]
"""The path, the given options of `@task`, the parameters that hold secrets, and the types.

Of a function that is given by its path, only that path is known.
"""

NO_OPTIONS = CallOptions(options=TaskOptions())


def call_options(
    *,
    task_id: str | None = None,
    eta: datetime | None = None,
    delay: Duration | None = None,
    expires: Duration | datetime | None = None,
    after: Sequence[Any] | None = None,
    after_any: Sequence[Any] | None = None,
    **shared: Any,
) -> CallOptions:
    """Check the options of a call. Raises `InvalidTask` for wrong ones."""
    if task_id is not None:
        check_id(task_id)
    check_instant("eta", eta)
    if eta is not None and delay is not None:
        raise InvalidTask("give either eta or delay, not both")
    expires_at = expires if isinstance(expires, datetime) else None
    check_instant("expires", expires_at)
    lifetime = None if isinstance(expires, datetime) else expires
    return CallOptions(
        options=check_options("options", expires=lifetime, **shared),
        task_id=task_id,
        eta=eta,
        delay=None if delay is None else seconds_of("delay", delay),
        expires_at=expires_at,
        workflow=TaskWorkflow(after=_ids("after", after), after_any=_ids("after_any", after_any))
        if after or after_any
        else None,
    )


def _ids(name: str, given: Any) -> tuple[str, ...]:
    """The ids of tasks and flows that are given by their handles."""
    if given is None:
        return ()
    found = [
        each if isinstance(each, str) else getattr(each, "id", None) for each in _listed(given)
    ]
    for each in found:
        if not isinstance(each, str):
            raise InvalidTask(f"{name}: expected handles of tasks or flows, or ids")
        check_id(each)
    return tuple(each for each in found if each is not None)


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) or hasattr(given, "id") else list(given)


def builder_for(storage: BaseStorage) -> TaskBuilder:
    """Return a builder of tasks for this storage."""
    return TaskBuilder(
        storage.settings, storage.clock, keeps_objects=keeps_objects(storage.serializer)
    )


class TaskBuilder:
    """Builds the tasks of one queue. What does not depend on the arguments is computed once."""

    def __init__(self, settings: Settings, clock: Clock, *, keeps_objects: bool = False) -> None:
        self._settings = settings
        self._clock = clock
        self._keeps_objects = keeps_objects
        self._known: dict[Callable[..., Any] | str, _FunctionFacts] = {}
        self._codec = MsgspecSerializer(max_payload=settings.max_payload)
        # Only the queues that the settings name: there may be any number of others.
        self._retries = {each: settings.retries_of(each) for each in settings.queue_names}
        self._other_retries = settings.retries_of("")
        self._plain_retries, policy = self._retries.get("default", self._other_retries)
        # Options of every call, so that no call is plain, if the settings have delays for plain calls.
        is_plain = policy is None and settings.ageing_of("default") is None
        self._for_all: Mapping[str, Any] = {} if is_plain else {"has_policy": True}

    def build(
        self,
        func: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: CallOptions = NO_OPTIONS,
        now: datetime | None = None,
        *,
        in_flow: bool = False,
    ) -> Task:
        """Return the task of this call. The storage checks it again before it stores it.

        Calls that are enqueued together have the same creation time, `now`. With `in_flow`, the `unique` of
        `@task` does not apply, and arguments may be `Standing`. Raises `InvalidTask` for
        arguments that the function does not accept.
        """
        path, given, secrets, types = self._look_up(func)
        now = now or self._clock.now()
        passed = args, kwargs
        if types is not None:
            if not types.accepts(args, kwargs):
                types.check(args, kwargs)
            if types.converts_arguments and not self._keeps_objects:
                args, kwargs = types.dump(args, kwargs, skip=Standing if in_flow else None)
        if call is not NO_OPTIONS:
            given = {**given, **call.options.given()}
        elif not (given or secrets or in_flow):
            return Task(
                id=self._clock.new_id(),
                func_path=path,
                args=args,
                kwargs=kwargs,
                max_retries=self._plain_retries,
                created_at=now,
            )
        given = {**given, "secrets": secrets}
        if in_flow:
            given.pop("unique", None)
        return self._with_options(path, (args, kwargs), passed, call, given, now)

    def call_options(self, options: Mapping[str, Any]) -> CallOptions:
        """Check the options of a call. Raises `InvalidTask` for wrong ones."""
        return call_options(**options)

    def types_of(self, func: Callable[..., Any] | str) -> FunctionTypes | None:
        """Return the types of a function; None of one that is given by its path."""
        known = self._known.get(func)
        if known is not None:
            return known[3]
        return None if isinstance(func, str) else FunctionTypes(func, path_of(func))

    def _look_up(self, func: Callable[..., Any] | str) -> _FunctionFacts:
        """Return what does not depend on the arguments."""
        try:
            known = self._known.get(func)
        except TypeError as error:
            raise InvalidTask(not_a_function(func)) from error
        if known is None:
            path = path_of(func)
            pass_to_queue(func, path)
            if isinstance(func, str):
                known = path, self._for_all, (), None
            else:
                types = FunctionTypes(func, path)
                given = {**_stored_options(func), **self._for_all}
                known = path, given, secret_parameters(func), types
            self._known[func] = known
        return known

    def _with_options(
        self,
        path: str,
        stored: _Call,
        passed: _Call,
        call: CallOptions,
        given: Mapping[str, Any],
        now: datetime,
    ) -> Task:
        """Keys are made of the arguments as they were passed, not as they are stored."""
        cron, interval, tz = given.get("cron"), given.get("interval"), given.get("tz")
        eta = call.eta if call.delay is None else now + timedelta(seconds=call.delay)
        if cron is not None and eta is None:
            eta = next_run(interval=None, cron=cron, tz=tz, after=now)
        expires_at = call.expires_at
        if expires_at is None and "expires" in given:
            expires_at = now + timedelta(seconds=given["expires"])
        repeats = cron is not None or interval is not None
        if call.options.reschedule_on_failure and not repeats:
            raise InvalidTask(
                "reschedule_on_failure: the task does not repeat; give interval or cron as well"
            )
        queue = given.get("queue", "default")
        most, policy = self._retries.get(queue, self._other_retries)
        retry = given.get("retry", policy)
        return Task(
            id=call.task_id or self._clock.new_id(),
            func_path=path,
            args=stored[0],
            kwargs=stored[1],
            queue=queue,
            priority=given.get("priority", 0),
            eta=eta,
            interval=interval,
            cron=cron,
            tz=tz,
            reschedule_on_failure=repeats and given.get("reschedule_on_failure", False),
            max_retries=given.get("max_retries", most),
            max_crashes=given.get("max_crashes"),
            retry=None if isinstance(retry, tuple) else retry,
            retry_delays=retry if isinstance(retry, tuple) else (),
            timeout=given.get("timeout"),
            unique=self._unique_key(path, stored, passed, given.get("unique")),
            expires=expires_at,
            result_ttl=given.get("result_ttl"),
            on_conflict=given.get("on_conflict", "keep"),
            max_wait=_max_wait(call, given),
            unique_for=given.get("unique_for"),
            limits=_limits(path, passed, given),
            fair=_share(passed, given),
            ageing=self._ageing(queue, given),
            breakers=given.get("breaker", ()),
            task_type=given.get("task_type"),
            version=given.get("version", 1),
            workflow=_workflow(call.workflow, passed, given),
            metadata=dict(given.get("metadata", {})),
            secrets=given["secrets"],
            created_at=now,
        )

    def _ageing(self, queue: str, given: Mapping[str, Any]) -> float | None:
        ageing: float | None = given.get("ageing")
        if ageing is None and "fair_key" not in given:
            return self._settings.ageing_of(queue)
        return ageing

    def _unique_key(self, path: str, stored: _Call, passed: _Call, unique: Any) -> str | None:
        if unique is None or isinstance(unique, str):
            return unique
        if callable(unique):
            return _make_key("unique", unique, passed)
        return f"{path}:{self.digest(path, *stored)}"

    def digest(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return a text for a call. Equal calls have the same, in any order of their keywords."""
        canonical = Task(
            id="0",
            func_path=path,
            args=args,
            kwargs=dict(sorted(kwargs.items())),
            created_at=_BEGINNING,
        )
        return hashlib.sha256(self._codec.encode_task(canonical)).hexdigest()


def _stored_options(func: Callable[..., Any]) -> dict[str, Any]:
    """The options of `@task` that decide what is stored; the others are for the worker."""
    given = options_of(func).given()
    return {name: value for name, value in given.items() if name not in _FOR_WORKERS}


def _workflow(
    given: TaskWorkflow | None, passed: _Call, options: Mapping[str, Any]
) -> TaskWorkflow | None:
    """What the call waits for, and the sequence that it is in."""
    key = options.get("sequence")
    if key is None:
        return given
    if callable(key):
        key = _make_key("sequence", key, passed)
    return msgspec.structs.replace(
        given or TaskWorkflow(),
        sequence=key,
        halts=options.get("sequence_on_failure") == "halt",
    )


def _max_wait(call: CallOptions, given: Mapping[str, Any]) -> float | None:
    max_wait: float | None = given.get("max_wait")
    if max_wait is not None and call.delay is not None and call.delay > max_wait:
        raise InvalidTask(
            f"max_wait={max_wait:g} is shorter than delay={call.delay:g}: no call would wait that long"
        )
    return max_wait


def _limits(path: str, passed: _Call, given: Mapping[str, Any]) -> tuple[Limit, ...]:
    more = given.get("limits", ())
    if callable(more):
        more = check_limits("limits", _made("limits", more, passed))
    rate, max_running = given.get("rate"), given.get("max_running")
    if rate is None and max_running is None:
        if "cost" in given and "fair_key" not in given:
            raise InvalidTask(
                "cost: give rate, max_running or fair_key as well, or nothing counts it"
            )
        return tuple(more)
    cost = _number("cost", passed, given)
    units = None if cost is None else math.ceil(cost)
    key = given.get("limit_key", path)
    if callable(key):
        key = _make_key("limit_key", key, passed)
    limits = []
    if max_running is not None:
        limits.append(Limit(key=key, max_running=max_running, cost=units))
    if rate is not None:
        limits.append(Limit(key=key, rate=rate[0], per=rate[1], cost=units))
    return (*limits, *more)


def _share(passed: _Call, given: Mapping[str, Any]) -> FairShare | None:
    key = given.get("fair_key")
    if key is None:
        return None
    if callable(key):
        key = _make_key("fair_key", key, passed)
    cost, weight = _number("cost", passed, given), _number("fair_weight", passed, given)
    return FairShare(
        key=key, weight=1.0 if weight is None else weight, cost=1.0 if cost is None else cost
    )


def _number(name: str, passed: _Call, given: Mapping[str, Any]) -> float | None:
    """A number above 0, or what a function makes of the arguments."""
    number = given.get(name)
    if callable(number):
        number = _made(name, number, passed)
        check_above_zero(name, number)
    return cast(float | None, number)


def _make_key(name: str, make: Callable[..., str], passed: _Call) -> str:
    key: str = _made(name, make, passed)
    check_key(name, key)
    return key


def _made(name: str, make: Callable[..., Any], passed: _Call) -> Any:
    """What a function of the author makes of the arguments."""
    args, kwargs = passed
    what = "key" if name in ("unique", "limit_key", "fair_key") else name
    try:
        return make(*args, **kwargs)
    except Exception as error:
        # The function is user code, called with the user's arguments.
        raise InvalidTask(
            f"{name}: the function that makes the {what} failed: {error!r}"
        ) from error
