"""What operators stop and change: pauses of queues and functions, limits, breakers.

A part of the contract. Each change holds for the whole fleet from the step that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial

from omniq.clock import seconds_to_micros, to_micros
from omniq.errors import InvalidValue
from omniq.gate_rules import FOREVER, Special
from omniq.models import (
    check_func_path,
    check_instant,
    check_int,
    check_key,
    check_name,
    check_seconds,
)
from omniq.storage.inspection import Inspection
from omniq.storage.pauses import key_of
from omniq.storage.wakeups import LocalWakeups

_LONGEST_REASON = 500


class Controls(Inspection):
    """The verbs by which operators stop and change what the fleet runs."""

    _local_wakeups: LocalWakeups

    # Queues

    async def pause_queue(
        self, queue: str, *, until: datetime | None = None, reason: str = ""
    ) -> None:
        """Stop all claims from the queue, on every worker, until it is resumed.

        G1. A paused queue accepts tasks, and none is claimed from it; running tasks continue.
        G13. A pause with `until` ends by the first `resume_due` at or after that time, and not before.
        """
        check_name("queue", queue, error=InvalidValue)
        await self._pause(key_of(queue=queue), until, reason)

    async def pause_function(
        self, function: str, *, until: datetime | None = None, reason: str = ""
    ) -> None:
        """Stop all claims of the function's tasks, from all queues and on every worker, until it is resumed.

        G12. No task of a paused function is claimed, and no other task waits for that; its running tasks
             continue.
        """
        check_func_path(function)
        await self._pause(key_of(function=function), until, reason)

    async def _pause(self, key: str, until: datetime | None, reason: str) -> None:
        check_instant("until", until, error=InvalidValue)
        _check_reason(reason)
        await self._opened.pause(key, reason, None if until is None else to_micros(until))

    async def resume_queue(self, queue: str) -> None:
        """Allow claims from the queue again."""
        check_name("queue", queue, error=InvalidValue)
        await self._opened.resume(key_of(queue=queue))
        self._local_wakeups.notify_work()

    async def resume_function(self, function: str) -> None:
        """Allow claims of the function's tasks again."""
        check_func_path(function)
        await self._opened.resume(key_of(function=function))
        self._local_wakeups.notify_work()

    async def resume_due(self) -> int:
        """End the pauses whose `until` has passed; returns how many. For the maintenance of workers."""
        ended = await self._opened.resume_due()
        if ended:
            self._local_wakeups.notify_work()
        return ended

    # Limits

    async def set_limit(
        self, key: str, *, max_running: int | None = None, rate: tuple[int, float] | None = None
    ) -> None:
        """Give a limit other numbers than its tasks say, until it is reset. `rate`: units, and seconds.

        G10. From that step on the limit admits what it says, also of tasks that were enqueued before. Tasks
             that hold more than it allows continue.
        """
        check_key("limit", key)
        edits: dict[str, Callable[[Special], None]] = {}
        if max_running is not None:
            check_int("max_running", max_running, low=1, error=InvalidValue)
            edits[f"running:{key}"] = partial(_resize, size=max_running, span=0)
        if rate is not None:
            count, seconds = rate
            check_int("rate", count, low=1, error=InvalidValue)
            check_seconds("per", seconds, above_zero=True, error=InvalidValue)
            edits[f"rate:{key}"] = partial(_resize, size=count, span=seconds_to_micros(seconds))
        if not edits:
            raise InvalidValue("give max_running or rate")
        await self._edit_limits(edits)

    async def reset_limit(self, key: str) -> None:
        """Have a limit admit what its tasks say again."""
        check_key("limit", key)
        await self._edit_limits(_both(key, partial(_resize, size=0, span=0)))

    async def hold_limit(
        self, key: str, *, until: datetime | None = None, reason: str = ""
    ) -> None:
        """Have a limit admit nothing, until then or until it is released.

        G14. Nothing enters a limit that is held; what runs continues. Then its tasks are claimed in order.
        """
        check_key("limit", key)
        check_instant("until", until, error=InvalidValue)
        _check_reason(reason)
        at = FOREVER if until is None else to_micros(until)
        await self._edit_limits(_both(key, partial(_hold, until=at, reason=reason)))

    async def release_limit(self, key: str) -> None:
        """Have a limit that is held admit tasks again."""
        check_key("limit", key)
        await self._edit_limits(_both(key, partial(_hold, until=0, reason="")))

    async def _edit_limits(self, edits: Mapping[str, Callable[[Special], None]]) -> None:
        await self._opened.edit_limits(edits)
        self._local_wakeups.notify_work()

    # Breakers

    async def close_breaker(self, name: str) -> bool:
        """Close a circuit breaker without waiting for a probe; returns False when none has that name.

        G9. Its tasks are claimed again, in order, and its failures are counted from 0. A probe that still
            runs counts as any other run.
        """
        check_key("breaker", name)
        is_known = await self._opened.close_breaker(name)
        if is_known:
            self._local_wakeups.notify_work()
        return is_known


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str) or len(reason) > _LONGEST_REASON:
        raise InvalidValue(f"reason: expected text of at most {_LONGEST_REASON} characters")


def _both(key: str, change: Callable[[Special], None]) -> dict[str, Callable[[Special], None]]:
    return {f"running:{key}": change, f"rate:{key}": change}


def _resize(special: Special, *, size: int, span: int) -> None:
    special.size, special.span = size, span


def _hold(special: Special, *, until: int, reason: str) -> None:
    special.held_until, special.reason = until, reason
