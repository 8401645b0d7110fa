"""A circuit breaker for any code: it stops calls to a failing service, then probes it with one call.

The rules are those of the breakers that all workers share through the storage
(`@task(breaker=…)`); this one belongs to the process that created it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, overload

from omniq import gate_rules, log
from omniq.clock import SYSTEM_CLOCK, Clock, seconds_to_micros
from omniq.errors import CircuitOpen, InvalidValue
from omniq.events import BreakerClosed, BreakerHalfOpened, BreakerOpened, Dispatcher, Event
from omniq.gate_rules import BreakerState as BreakerState
from omniq.gate_rules import Effect, Gate, GateState
from omniq.models import check_int, check_seconds

P = ParamSpec("P")
R = TypeVar("R")


class CircuitBreaker:
    """Opens after `max_failures` consecutive failures; after `reset_timeout` seconds one call probes.

    While it is open, and while the probe runs, other calls raise `CircuitOpen` without calling the
    function. A successful probe closes the breaker, a failed one opens it again. A failure is an
    `Exception`; a cancelled call does not count. Safe to use from all threads and event loops at
    once: no lock is held during a call. `events` emits every change of state.
    """

    def __init__(
        self,
        max_failures: int = 5,
        reset_timeout: float = 30.0,
        *,
        name: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_int("max_failures", max_failures, low=1, error=InvalidValue)
        check_seconds("reset_timeout", reset_timeout, error=InvalidValue)
        self.name = name
        self.events = Dispatcher()
        self._clock = clock
        self._gate = Gate(name, "breaker", max_failures, seconds_to_micros(reset_timeout))
        self._shared = GateState()
        self._lock = threading.Lock()
        self._calls = 0
        log.attach(self.events)

    @property
    def state(self) -> BreakerState:
        """CLOSED, OPEN, or HALF_OPEN while a call probes. Stays OPEN until the next call, even when due."""
        return self._shared.breaker

    @property
    def failures(self) -> int:
        """The number of failed calls since the last success."""
        return self._shared.failures

    @property
    def reason(self) -> str:
        """The type of the error that opened it; empty while it is closed."""
        return self._shared.reason

    @overload
    async def call(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result; an awaitable result is awaited first.

        Raises `CircuitOpen` if the function was not called, else what the function raises. A sync
        function runs in this thread: pass a blocking one to `asyncio.to_thread`.
        """
        with self.guard():
            value = func(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Protect a block of code, sync or async: `with breaker.guard(): …`."""
        number = self._enter()
        try:
            yield
        except Exception as error:
            self._leave(number, "failure", type(error).__qualname__)
            raise
        except BaseException:
            self._leave(number, "neither")
            raise
        self._leave(number, "success")

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Protect every call of a function: `@breaker` as its decorator."""
        if inspect.iscoroutinefunction(func):

            @wraps(func)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self.guard():
                    return await func(*args, **kwargs)

            return cast(Callable[P, R], awaited)

        @wraps(func)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.guard():
                return func(*args, **kwargs)

        return called

    def _enter(self) -> int:
        with self._lock:
            now, was = self._clock.boot_micros(), self._shared.breaker
            if gate_rules.room(self._gate, self._shared, now) == 0:
                raise CircuitOpen(self.name)
            self._calls += 1
            number = self._calls
            gate_rules.enter(self._gate, self._shared, "", number, now)
            event = self._change_from(was)
        self._emit(event)
        return number

    def _leave(self, number: int, effect: Effect, reason: str = "") -> None:
        with self._lock:
            now, was = self._clock.boot_micros(), self._shared.breaker
            gate_rules.leave(self._gate, self._shared, "", number, effect, now, reason)
            event = self._change_from(was)
        self._emit(event)

    def _change_from(self, was: BreakerState) -> Event | None:
        shared = self._shared
        return change_of(self.name, was, shared.breaker, shared.failures, shared.reason)

    def _emit(self, event: Event | None) -> None:
        if event is not None:
            self.events.emit(event)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.state})"


def change_of(
    name: str, was: BreakerState, state: BreakerState, failures: int, reason: str
) -> Event | None:
    """The event of a breaker that was in one state and is now in the other; None if it is the same."""
    if state is was:
        return None
    match state:
        case BreakerState.CLOSED:
            return BreakerClosed(breaker=name)
        case BreakerState.HALF_OPEN:
            return BreakerHalfOpened(breaker=name)
        case BreakerState.OPEN:
            return BreakerOpened(breaker=name, failures=failures, reason=reason)
