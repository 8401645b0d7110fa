"""`Cron` and `Interval`: the schedules of `@task(schedules=[…])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any

from omniq.cron import check_cron
from omniq.errors import InvalidTask
from omniq.models import MissedPolicy, OverlapPolicy, check_name
from omniq.tasks.durations import Duration, seconds_of

_POLICIES = ("start", "end", "missed", "max_missed", "overlap", "jitter")


@dataclass(frozen=True, slots=True)
class _Declared:
    """What both kinds have in common: the call, and the policies of `schedules.add`."""

    _: KW_ONLY
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    id: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    missed: MissedPolicy | None = None
    max_missed: int | None = None
    overlap: OverlapPolicy | None = None
    jitter: Duration | None = None

    def __post_init__(self) -> None:
        if isinstance(self.args, str) or not isinstance(self.args, Sequence):
            raise InvalidTask(f"args={self.args!r}: expected a list, such as [{self.args!r}]")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            raise InvalidTask(f"kwargs={self.kwargs!r}: expected a dictionary")
        if self.id is not None:
            check_name("id", self.id)
        object.__setattr__(self, "args", tuple(self.args))

    def policies(self) -> dict[str, Any]:
        """The policies that were given, by name."""
        values = {name: getattr(self, name) for name in _POLICIES}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Cron(_Declared):
    """Call the function at the times of a cron expression, in the zone `tz` or in UTC.

        @task(schedules=[Cron("0 3 * * *", tz="Europe/Berlin", args=["eu"])])

    The other options are those of `schedules.add`. Without an `id`, the id of the schedule is made of the
    function's name and the arguments.
    """

    expression: str
    _: KW_ONLY
    tz: str | None = None

    def __post_init__(self) -> None:
        # Not `super()`: the class that `slots=True` makes is not the one of this text.
        _Declared.__post_init__(self)
        if not isinstance(self.expression, str):
            raise InvalidTask(f"Cron({self.expression!r}): expected text such as '0 3 * * *'")
        check_cron(self.expression, self.tz, error=InvalidTask)

    def timing(self) -> dict[str, Any]:
        """The options of `schedules.add` for these times."""
        return {"cron": self.expression, "tz": self.tz}


@dataclass(frozen=True, slots=True)
class Interval(_Declared):
    """Call the function repeatedly, with this time between calls, counted from `start`, or from a time that all workers share.

        @task(schedules=[Interval(60, args=["eu"])])

    The other options are those of `schedules.add`, as for `Cron`.
    """

    every: Duration

    def __post_init__(self) -> None:
        _Declared.__post_init__(self)
        seconds_of("Interval", self.every, above_zero=True)

    def timing(self) -> dict[str, Any]:
        """The options of `schedules.add` for these times."""
        return {"interval": self.every}


DeclaredSchedule = Cron | Interval
