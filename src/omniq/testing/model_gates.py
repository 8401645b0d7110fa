"""The model's gates: concurrency limits, rate limits and circuit breakers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omniq.models import BreakerRule, Limit, Task
from omniq.outcomes import Failed, Outcome, Retried, Succeeded
from omniq.testing.clock import ManualClock

BreakerResult = Literal["success", "failure", "neither"]


def breaker_result(outcome: Outcome, is_first_report: bool) -> BreakerResult:
    """How an outcome counts for a circuit breaker. Only the first report of a failure counts."""
    if isinstance(outcome, Succeeded):
        return "success"
    if isinstance(outcome, Failed) and outcome.reason == "crashed":
        return "neither"
    return "failure" if isinstance(outcome, Retried | Failed) and is_first_report else "neither"


@dataclass
class Breaker:
    """A circuit breaker. Closed while `opened_at` is None; `probe` is the one claim it let through."""

    failures: int = 0
    opened_at: int | None = None
    probe: tuple[str, int] | None = None


class ModelGates:
    """The state of all limits and breakers: checked at a claim, updated at each start and end of a run."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._starts: dict[str, list[int]] = {}
        self._breakers: dict[str, Breaker] = {}

    def may_start(self, task: Task, running: Sequence[Task]) -> bool:
        """Whether all gates of the task let it start while `running` run."""
        return all(self._is_closed(rule) for rule in task.breakers) and all(
            self._has_room(limit, running) for limit in task.limits
        )

    def _is_closed(self, rule: BreakerRule) -> bool:
        breaker = self._breakers.setdefault(rule.name, Breaker())
        if breaker.opened_at is None:
            return True
        may_probe = self._clock.micros() >= breaker.opened_at + _micros(rule.reset_timeout)
        return breaker.probe is None and may_probe

    def _has_room(self, limit: Limit, running: Sequence[Task]) -> bool:
        if limit.max_running is not None:
            return sum(limit in task.limits for task in running) < limit.max_running
        since = self._clock.micros() - _micros(limit.per)
        recent = [start for start in self._starts.get(limit.key, []) if start > since]
        return limit.rate is None or len(recent) < limit.rate

    def start_run(self, task: Task, token: int) -> None:
        """Count the start of a run."""
        for limit in task.limits:
            if limit.rate is not None:
                self._starts.setdefault(limit.key, []).append(self._clock.micros())
        for rule in task.breakers:
            if self._breakers[rule.name].opened_at is not None:
                self._breakers[rule.name].probe = (task.id, token)

    def close_breaker(self, name: str) -> None:
        """Close a breaker; a probe counts as any other run from then on."""
        self._breakers[name] = Breaker()

    def end_run(self, task: Task, token: int, result: BreakerResult) -> None:
        """Count the result of a run that ended, or a later report about it."""
        now = self._clock.micros()
        for rule in task.breakers:
            breaker = self._breakers.setdefault(rule.name, Breaker())
            was_probe = breaker.probe == (task.id, token)
            if breaker.opened_at is not None and not was_probe:
                continue
            breaker.probe = None
            if result == "success":
                breaker.failures, breaker.opened_at = 0, None
            elif result == "failure":
                breaker.failures += 1
                if was_probe or breaker.failures >= rule.max_failures:
                    breaker.opened_at = now
            elif was_probe:
                # The probe ended without a result: the next claim may probe immediately.
                breaker.opened_at = now - _micros(rule.reset_timeout)


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)
