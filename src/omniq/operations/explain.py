"""Why a task does not run, or what became of it, as a chain of reasons.

Each reason stands by itself: the task runs when none is left. The first one is what to look at
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.gate_rules import FOREVER, BreakerState, Gate, GateState, ask_again_at, gates_of, room
from omniq.models import Task, TaskResult, TaskStatus, WorkerInfo
from omniq.operations.task_detail import TaskDetail, task_detail
from omniq.storage.base import BaseStorage
from omniq.storage.health import live_workers

_MOST_COUNTED = 1_000
_MOST_NAMED = 5


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason. `code` is for programs, `text` for people; `hint` is what to do about it.

    `since` and `until` say from and to when it holds, as far as that is known.
    """

    code: str
    text: str
    since: datetime | None = None
    until: datetime | None = None
    hint: str = ""
    facts: dict[str, Any] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is and why. `state` is what the reasons explain."""

    task_id: str
    func_path: str
    queue: str
    status: TaskStatus
    state: Literal["waiting", "running", "ended"]
    reasons: tuple[Reason, ...]


async def explain(storage: BaseStorage, task_id: str) -> Explanation:
    """Why the task does not run, or by whom it is run, or how it ended.

    Raises `TaskNotFound` when no record of it is kept.
    """
    detail = await task_detail(storage, task_id)
    task = detail.task
    if task.status.is_final:
        state: Literal["waiting", "running", "ended"] = "ended"
        reasons = [_ending(detail)]
    elif task.owner is not None:
        state = "running"
        reasons = await _holding(storage, detail)
    else:
        state = "waiting"
        reasons = await _waiting(storage, task)
    return Explanation(
        task_id=task.id,
        func_path=task.func_path,
        queue=task.queue,
        status=task.status,
        state=state,
        reasons=tuple(reasons),
    )


def _ending(detail: TaskDetail) -> Reason:
    task, result, letter = detail.task, detail.result, detail.dead
    ended = result.finished_at if result is not None else None
    if letter is not None:
        return Reason(
            code="dead",
            text=f"failed for good after {_runs(letter.attempt_count)}: "
            f"{letter.failure_reason}{_error(result)}",
            since=letter.last_failure,
            hint=f"omniq dead show {task.id}, then omniq dead retry {task.id}",
            facts={"reason": letter.failure_reason, "attempts": letter.attempt_count},
        )
    why = (result.reason or "") if result is not None else ""
    match task.status:
        case TaskStatus.SUCCESS:
            runs = result.attempts if result is not None else task.attempts + 1
            return Reason(code="succeeded", text=f"succeeded in run {runs}", since=ended)
        case TaskStatus.CANCELLED if why == "expired":
            return Reason(
                code="expired",
                text="was cancelled: its time to start had passed before a worker took it",
                since=ended,
                until=task.expires,
                hint="give it more time with expires=, or run more workers",
            )
        case TaskStatus.CANCELLED:
            return Reason(
                code="cancelled",
                text=f"was cancelled: {why or 'no reason is kept'}",
                since=ended,
                facts={"reason": why},
            )
        case _:
            return Reason(
                code="failed",
                text=f"failed for good{': ' + why if why else ''}{_error(result)}; "
                "its dead letter was deleted",
                since=ended,
            )


def _error(result: TaskResult | None) -> str:
    if result is None or result.error is None:
        return ""
    return f" ({result.error.error_type}: {result.error.message})"


async def _holding(storage: BaseStorage, detail: TaskDetail) -> list[Reason]:
    task = detail.task
    workers = await live_workers(storage)
    holder = next((worker for worker in workers if worker.id == task.owner), None)
    reasons = [_held_by_nobody(task, workers) if holder is None else _held_by(task, holder, detail)]
    if task.cancel_requested:
        reasons.append(
            Reason(code="cancel_requested", text="it was cancelled, and has been told to stop")
        )
    if holder is not None and holder.stalled:
        reasons.append(
            Reason(
                code="worker_stalled",
                text=f"its worker is stalled: its event loop does not turn (process {holder.pid} "
                f"on {holder.host})",
                since=holder.last_heartbeat,
                hint="something blocks the loop of that process; an async function must not block",
            )
        )
    return reasons


def _held_by(task: Task, holder: WorkerInfo, detail: TaskDetail) -> Reason:
    doing = "held" if task.status is TaskStatus.RETRYING else "run"
    until = None
    if task.timeout is not None and task.started_at is not None:
        until = task.started_at + timedelta(seconds=task.timeout)
    progress = detail.progress
    return Reason(
        code="held",
        text=f"is being {doing} by worker {holder.id} (process {holder.pid} on {holder.host})"
        + (
            ""
            if progress is None
            else f", {progress.fraction:.0%} done {progress.message}".rstrip()
        ),
        since=task.started_at,
        until=until,
        facts={"worker": holder.id, "host": holder.host, "pid": holder.pid},
    )


def _held_by_nobody(task: Task, workers: Sequence[WorkerInfo]) -> Reason:
    return Reason(
        code="worker_lost",
        text=f"was being run by worker {task.owner}, whose lease has ended; "
        + (
            "the other workers are about to take it back"
            if workers
            else "and no other worker is alive to take it back"
        ),
        since=task.started_at,
        hint="" if workers else "start one: omniq worker MODULE",
        facts={"worker": task.owner},
    )


async def _waiting(storage: BaseStorage, task: Task) -> list[Reason]:
    now = storage.clock.now()
    paused = await storage.paused_queues()
    workers = await storage.workers()
    reasons = [
        *_by_time(task, now),
        *_by_pause(task, paused),
        *_by_gates(task, await storage.gates(), to_micros(now)),
        *_by_workers(task, workers),
    ]
    if task.crashes:
        reasons += await _by_suspicion(storage, task, workers)
    if not reasons or all(reason.code == "all_busy" for reason in reasons):
        reasons += await _by_others(storage, task, paused, now)
    return reasons or [
        Reason(
            code="due",
            text="is due and nothing stands in its way: the next free worker takes it",
            since=task.eta,
        )
    ]


def _by_time(task: Task, now: datetime) -> Iterator[Reason]:
    if task.expires is not None and task.expires <= now:
        yield Reason(
            code="expired",
            text="its time to start has passed: it ends as cancelled when a worker comes to it",
            since=task.expires,
        )
    if task.eta is not None and task.eta > now:
        again = f" (failed {_times(task.attempts)})" if task.attempts else ""
        yield Reason(code="not_due", text=f"is not due yet{again}", until=task.eta)


def _by_pause(task: Task, paused: frozenset[str]) -> Iterator[Reason]:
    if task.queue in paused:
        yield Reason(
            code="queue_paused",
            text=f"its queue {task.queue} is paused",
            hint=f"omniq queues resume {task.queue}",
        )


def _by_gates(task: Task, states: dict[str, GateState], now: int) -> Iterator[Reason]:
    for gate in gates_of(task):
        state = states.get(gate.key, GateState())
        if room(gate, state, now) == 0:
            yield _closed_gate(gate, state, now)


def _closed_gate(gate: Gate, state: GateState, now: int) -> Reason:
    name = gate.key.partition(":")[2]
    again = ask_again_at(gate, state, now)
    until = None if again >= FOREVER else from_micros(again)
    holders = [task_id for task_id, _ in state.holders]
    match gate.kind:
        case "running":
            return Reason(
                code="limit",
                text=f"the limit {name} lets {gate.size} run at once: taken by {_named(holders)}",
                facts={"limit": name, "size": gate.size, "holders": holders},
            )
        case "rate":
            return Reason(
                code="rate",
                text=f"the rate limit {name} lets {gate.size} start in "
                f"{gate.span / 1_000_000:g} s, and so many have",
                until=until,
                facts={"limit": name, "size": gate.size},
            )
        case "breaker":
            return _closed_breaker(name, state, until, holders)


def _closed_breaker(
    name: str, state: GateState, until: datetime | None, holders: list[str]
) -> Reason:
    because = f" because of {state.reason}" if state.reason else ""
    if state.breaker is BreakerState.HALF_OPEN:
        text = f"the breaker {name} is open{because}, and task {_named(holders)} probes it"
    else:
        text = f"the breaker {name} is open{because}, after {_failures(state.failures)}"
    return Reason(
        code="breaker_open",
        text=text,
        since=from_micros(state.opened_at),
        until=until,
        hint="it closes by itself when a probe succeeds; see omniq breakers",
        facts={"breaker": name, "reason": state.reason, "failures": state.failures},
    )


def _by_workers(task: Task, workers: Sequence[WorkerInfo]) -> Iterator[Reason]:
    module = task.func_path.rpartition(".")[0]
    serving = [worker for worker in workers if _serves(worker, task.queue)]
    if not workers:
        yield Reason(
            code="no_worker", text="no worker is alive", hint=f"start one: omniq worker {module}"
        )
    elif not serving:
        taken = sorted({queue for worker in workers for queue in worker.queues})
        yield Reason(
            code="no_worker_for_queue",
            text=f"no worker takes from its queue {task.queue}; they take from {', '.join(taken)}",
            hint=f"start one: omniq worker {module} --queues {task.queue}",
            facts={"queues": taken},
        )
    if task.releases:
        yield Reason(
            code="unknown_function",
            text=f"workers have given it back {_times(task.releases)}, not having the function "
            f"{task.func_path}",
            hint=f"start a worker that has it: omniq worker {module}",
            facts={"releases": task.releases},
        )
    if serving and all(_is_full(worker) for worker in serving):
        slots = sum(worker.concurrency for worker in serving)
        yield Reason(
            code="all_busy",
            text=f"no worker has a free slot: all {slots} of {_workers(len(serving))} are taken",
            hint="wait, or start more workers",
            facts={"workers": len(serving), "slots": slots},
        )


async def _by_suspicion(
    storage: BaseStorage, task: Task, workers: Sequence[WorkerInfo]
) -> list[Reason]:
    """A worker runs one task at a time that was there when another died."""
    serving = [worker for worker in workers if _serves(worker, task.queue)]
    suspects: list[str] = []
    for worker in serving:
        held = [await storage.get_task(task_id) for task_id in worker.running]
        suspect = next((other.id for other in held if other is not None and other.crashes), None)
        if suspect is None:
            return []
        suspects.append(suspect)
    if not suspects:
        return []
    return [
        Reason(
            code="suspect",
            text=f"a worker died {_times(task.crashes)} while it ran; each worker runs one such "
            f"task at a time, and they run {_named(suspects)}",
            facts={"crashes": task.crashes, "holders": suspects},
        )
    ]


async def _by_others(
    storage: BaseStorage, task: Task, paused: frozenset[str], now: datetime
) -> list[Reason]:
    """How many due tasks come first. Those of other queues count where the same worker takes them."""
    workers = [worker for worker in await storage.workers() if _serves(worker, task.queue)]
    ahead, is_exact = 0, True
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        page = await storage.list_tasks(status=status, limit=_MOST_COUNTED)
        is_exact = is_exact and len(page) < _MOST_COUNTED
        ahead += sum(
            other.owner is None
            and other.id != task.id
            and _order(other) < _order(task)
            and _due(other) <= now
            and other.queue not in paused
            and any(_serves(worker, other.queue) for worker in workers)
            for other in page
        )
    if not ahead:
        return []
    count = f"{ahead}" if is_exact else f"at least {ahead}"
    return [
        Reason(
            code="behind",
            text=f"waits behind {count} {'task' if ahead == 1 else 'tasks'} of higher priority or "
            "earlier due time",
            since=task.eta,
            facts={"ahead": ahead, "exact": is_exact},
        )
    ]


def _order(task: Task) -> tuple[int, datetime, str]:
    return (-task.priority, _due(task), task.id)


def _due(task: Task) -> datetime:
    return task.eta or task.created_at


def _serves(worker: WorkerInfo, queue: str) -> bool:
    return not worker.queues or queue in worker.queues


def _is_full(worker: WorkerInfo) -> bool:
    # A concurrency of 0 says that the worker has told nothing of its slots.
    return 0 < worker.concurrency <= len(worker.running)


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:_MOST_NAMED])
    return f"{shown} and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else shown


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _failures(count: int) -> str:
    return "1 failure" if count == 1 else f"{count} failures in a row"


def _workers(count: int) -> str:
    return "the only worker" if count == 1 else f"{count} workers"
