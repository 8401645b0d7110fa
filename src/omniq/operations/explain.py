"""Why a task does not run, which worker runs it, or how it ended, as a list of reasons.

Each reason of a waiting task blocks it independently: the task runs when none is left. The first
one is the first to resolve.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from omniq.clock import from_micros, to_micros
from omniq.errors import NotSealed, SerializationError
from omniq.gate_rules import FOREVER, BreakerState, Gate, GateState, ask_again_at, gates_of, room
from omniq.models import Task, TaskResult, TaskStatus, WorkerInfo, timeout_of
from omniq.operations.flow_reasons import flow_reasons
from omniq.operations.formatting import as_argument, count_of
from omniq.operations.health import live_workers
from omniq.operations.reasons import Reason as Reason
from omniq.operations.task_detail import TaskDetail, task_detail
from omniq.storage.base import BaseStorage
from omniq.storage.pauses import Pause
from omniq.tasks.steps import read_checkpoint, task_key

_MAX_COUNTED = 1_000
_MAX_IDS = 5
_ANY_MODULE = "MODULE"

_TIME_LABELS = {
    "held": ("started", "times out"),
    "worker_lost": ("started", "until"),
    "worker_stalled": ("last heartbeat", "until"),
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons why a task is in its `state`."""

    task_id: str
    func_path: str
    queue: str
    status: TaskStatus
    state: Literal["waiting", "running", "ended"]
    reasons: tuple[Reason, ...]

    def times(self, reason: Reason) -> list[tuple[str, datetime]]:
        """The known times of one of the reasons, each with a label such as "since" or "started"."""
        labels = _TIME_LABELS.get(reason.code, ("since", "until"))
        if self.state == "ended":
            labels = ("at", "expired")
        pairs = zip(labels, (reason.since, reason.until), strict=True)
        return [(label, instant) for label, instant in pairs if instant is not None]


async def explain(storage: BaseStorage, task_id: str) -> Explanation:
    """Why the task does not run, which worker runs it, or how it ended.

    Raises `TaskNotFound` when no record of it is stored.
    """
    detail = await task_detail(storage, task_id)
    task = detail.task
    if task.status.is_final:
        state: Literal["waiting", "running", "ended"] = "ended"
        reasons = [_end_of(detail), *_hook_of(detail)]
    elif task.owner is not None:
        state = "running"
        reasons = await _running_reasons(storage, detail)
    else:
        state = "waiting"
        reasons = await _waiting_reasons(storage, task)
    return Explanation(
        task_id=task.id,
        func_path=task.func_path,
        queue=task.queue,
        status=task.status,
        state=state,
        reasons=tuple(reasons),
    )


# Ended


def _end_of(detail: TaskDetail) -> Reason:
    task, result, letter = detail.task, detail.result, detail.dead
    ended = result.finished_at if result is not None else None
    if letter is not None:
        return Reason(
            code="dead",
            text=f"The task failed permanently after {count_of(letter.attempt_count, 'attempt')}: "
            f"{letter.failure_reason}{_error(result)}",
            since=letter.last_failure,
            hint=f"omniq dead show {as_argument(task.id)}, "
            f"then omniq dead retry {as_argument(task.id)}",
            facts={"reason": letter.failure_reason, "attempts": letter.attempt_count},
        )
    why = (result.reason or "") if result is not None else ""
    match task.status:
        case TaskStatus.SUCCESS:
            attempts = result.attempts if result is not None else task.attempts + task.crashes + 1
            text = f"The task succeeded on attempt {attempts}"
            return Reason(code="succeeded", text=text, since=ended)
        case TaskStatus.CANCELLED if why == "expired":
            return Reason(
                code="expired",
                text="The task was cancelled: it expired before a worker started it",
                since=ended,
                until=task.expires,
                hint="set a longer expires=, or run more workers",
            )
        case TaskStatus.CANCELLED:
            return Reason(
                code="cancelled",
                text=f"The task was cancelled: {why or 'no reason was recorded'}",
                since=ended,
                facts={"reason": why},
            )
        case _:
            return Reason(
                code="failed",
                text=f"The task failed permanently{': ' + why if why else ''}{_error(result)}; "
                "its dead letter was deleted",
                since=ended,
            )


def _hook_of(detail: TaskDetail) -> list[Reason]:
    hook = detail.pending_hook
    if hook is None:
        return []
    if hook.owner:
        text = f"Its on_dead hook has not ended yet: worker {hook.owner} calls it"
        hint = "if that worker is lost, another one that has the function calls the hook"
    else:
        text = "Its on_dead hook waits for a worker that has the function"
        hint = f"start a worker that has {hook.func_path}"
    facts = {"worker": hook.owner, "function": hook.func_path}
    return [Reason(code="hook", text=text, since=hook.died_at, hint=hint, facts=facts)]


def _error(result: TaskResult | None) -> str:
    if result is None or result.error is None:
        return ""
    return f" ({result.error.error_type}: {result.error.message})"


# Running


async def _running_reasons(storage: BaseStorage, detail: TaskDetail) -> list[Reason]:
    task = detail.task
    workers = await live_workers(storage)
    owner = next((worker for worker in workers if worker.id == task.owner), None)
    reasons = [_lost_worker(task, workers) if owner is None else _held_by(task, owner, detail)]
    if task.cancel_requested:
        text = "The task was cancelled and has been asked to stop"
        reasons.append(Reason(code="cancel_requested", text=text))
    if owner is not None and owner.stalled:
        reasons.append(
            Reason(
                code="worker_stalled",
                text=f"Its worker is stalled: the event loop of process {owner.pid} on "
                f"{owner.host} is blocked, or its heartbeat is late",
                since=owner.last_heartbeat,
                hint="find what blocks that process; an async function must not block its event loop",
            )
        )
    return reasons


def _held_by(task: Task, owner: WorkerInfo, detail: TaskDetail) -> Reason:
    verb = "holds" if task.status is TaskStatus.RETRYING else "runs"
    until = None
    # The default is a setting of the worker, which this process may not share.
    timeout = timeout_of(task, None)
    if timeout is not None and task.started_at is not None:
        until = task.started_at + timedelta(seconds=timeout)
    progress = detail.progress
    return Reason(
        code="held",
        text=f"Worker {owner.id} (process {owner.pid} on {owner.host}) {verb} the task"
        + (
            ""
            if progress is None
            else f", {progress.fraction:.0%} done: {progress.message}".rstrip(": ")
        ),
        since=task.started_at,
        until=until,
        facts={"worker": owner.id, "host": owner.host, "pid": owner.pid},
    )


def _lost_worker(task: Task, workers: Sequence[WorkerInfo]) -> Reason:
    return Reason(
        code="worker_lost",
        text=f"Worker {task.owner} ran the task, and its lease has expired; "
        + (
            "another worker will recover the task"
            if workers
            else "no other worker is alive to recover the task"
        ),
        since=task.started_at,
        hint="" if workers else "start one: omniq worker MODULE",
        facts={"worker": task.owner},
    )


# Waiting


async def _waiting_reasons(storage: BaseStorage, task: Task) -> list[Reason]:
    now = storage.clock.now()
    pauses = await storage.pauses()
    paused = frozenset(each.queue for each in pauses if each.queue is not None)
    waits = await flow_reasons(storage, task)
    if waits:
        return waits
    workers = await storage.workers()
    reasons = [
        *await _checkpoint_reasons(storage, task),
        *_time_reasons(task, now),
        *_pause_reasons(task, pauses),
        *_gate_reasons(task, await storage.gates(), to_micros(now)),
        *_worker_reasons(task, workers, storage.capabilities.reach),
    ]
    if task.crashes:
        reasons += await _suspect_reasons(storage, task, workers)
    if not reasons or all(reason.code == "all_busy" for reason in reasons):
        reasons += await _order_reasons(storage, task, paused, now)
    return reasons or [
        Reason(
            code="due",
            text="The task is due and nothing blocks it: the next free worker claims it",
            since=task.eta,
        )
    ]


async def _checkpoint_reasons(storage: BaseStorage, task: Task) -> list[Reason]:
    """A task that has run may have a checkpoint; one of an older omniq waits for an operator."""
    if not task.token:
        return []
    try:
        stored = await storage.load_checkpoint(task.id)
        read_checkpoint(storage.serializer, task_key(task), stored)
    except NotSealed:
        return [
            Reason(
                code="unsealed_checkpoint",
                text="An older omniq stored the task's checkpoint, and it is not signed as a whole: the "
                "task waits before its first step",
                hint="omniq schema upgrade shows what the checkpoint has, and signs it",
            )
        ]
    except SerializationError:
        # The next run says so, and ends.
        return []
    return []


def _time_reasons(task: Task, now: datetime) -> Iterator[Reason]:
    if task.expires is not None and task.expires <= now:
        yield Reason(
            code="expired",
            text="The task expired before a worker started it: the next claim cancels it",
            since=task.expires,
        )
    if task.eta is not None and task.eta > now:
        failed = f" (failed {_times(task.attempts)})" if task.attempts else ""
        yield Reason(code="not_due", text=f"The task is not due yet{failed}", until=task.eta)


def _pause_reasons(task: Task, pauses: Sequence[Pause]) -> Iterator[Reason]:
    for pause in pauses:
        why = f": {pause.reason}" if pause.reason else ""
        if pause.queue == task.queue:
            yield Reason(
                code="queue_paused",
                text=f"Its queue {task.queue} is paused{why}",
                hint=f"omniq queues resume {as_argument(task.queue)}",
                until=pause.until,
            )
        elif pause.function == task.func_path:
            yield Reason(
                code="function_paused",
                text=f"Its function {task.func_path} is paused{why}",
                hint=f"omniq functions resume {as_argument(task.func_path)}",
                until=pause.until,
            )


def _gate_reasons(task: Task, states: dict[str, GateState], now: int) -> Iterator[Reason]:
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
                text=f"The limit {name} allows {count_of(gate.size, 'running task')} at a time: "
                f"{_id_list(holders)}",
                facts={"limit": name, "size": gate.size, "holders": holders},
            )
        case "rate":
            return Reason(
                code="rate",
                text=f"The rate limit {name} allows {count_of(gate.size, 'start')} in "
                f"{gate.span / 1_000_000:g} s, and none is left",
                until=until,
                facts={"limit": name, "size": gate.size},
            )
        case "breaker":
            return _open_breaker(name, state, until, holders)


def _open_breaker(
    name: str, state: GateState, until: datetime | None, holders: list[str]
) -> Reason:
    because = f" because of {state.reason}" if state.reason else ""
    if state.breaker is BreakerState.HALF_OPEN:
        text = f"The breaker {name} is open{because}, and task {_id_list(holders)} probes it"
    else:
        text = f"The breaker {name} is open{because}, after {_failures(state.failures)}"
    return Reason(
        code="breaker_open",
        text=text,
        since=from_micros(state.opened_at),
        until=until,
        hint="it closes automatically when a probe succeeds; "
        f"to close it now: omniq breakers close {shlex.quote(name)}",
        facts={"breaker": name, "reason": state.reason, "failures": state.failures},
    )


def _worker_reasons(task: Task, workers: Sequence[WorkerInfo], reach: str) -> Iterator[Reason]:
    serving = [worker for worker in workers if _serves(worker, task.queue)]
    able = [worker for worker in serving if worker.can_run(task.func_path)]
    if not workers:
        yield Reason(
            code="no_worker",
            text="No worker is alive",
            # A command cannot see a storage in memory.
            hint="start one in this process, with queue.worker()"
            if reach == "process"
            else "start one, with the module of the function: omniq worker MODULE",
        )
    elif not serving:
        served = sorted({queue for worker in workers for queue in worker.queues})
        yield Reason(
            code="no_worker_for_queue",
            text=f"No worker serves its queue {task.queue}; the workers serve {', '.join(served)}",
            hint=f"start one: omniq worker {_module_of(task, workers)} "
            f"--queues={shlex.quote(task.queue)}",
            facts={"queues": served},
        )
    if serving and not able:
        runs = {worker.id: str(worker.runnable or "all") for worker in serving}
        yield Reason(
            code="no_worker_for_function",
            text=f"No live worker can run {task.func_path}: {_runs(serving)}",
            hint=_function_hint(task, workers),
            facts={"workers": runs, "releases": task.releases},
        )
    elif task.releases and not any(worker.runnable for worker in able):
        # The workers have not said what they can run; an older version of omniq cannot.
        yield Reason(
            code="unknown_function",
            text=f"Workers have released the task {_times(task.releases)}, because they do not "
            f"have the function {task.func_path}",
            hint=_function_hint(task, workers),
            facts={"releases": task.releases},
        )
    if able and all(_is_full(worker) for worker in able):
        slots = sum(worker.concurrency for worker in able)
        owners = "the only worker" if len(able) == 1 else f"{len(able)} workers"
        yield Reason(
            code="all_busy",
            text=f"No worker has a free slot: {owners} with {count_of(slots, 'slot')} in use",
            hint="wait, or start more workers",
            facts={"workers": len(able), "slots": slots},
        )


def _function_hint(task: Task, workers: Sequence[WorkerInfo]) -> str:
    if task.func_path.rpartition(".")[2].startswith("_"):
        return "names with a leading underscore are never run: rename the function"
    module = _module_of(task, workers)
    is_gone = any(_lacks(worker, task) for worker in workers) and not any(
        worker.can_run(task.func_path) for worker in workers
    )
    if module != _ANY_MODULE and is_gone:
        return (
            f"restart the worker if its {module} is older; if the function was renamed, mark the "
            f"new one with @task(aliases=[{task.func_path!r}])"
        )
    if module != _ANY_MODULE:
        return f"start a worker that has it: omniq worker {module}"
    return (
        "mark the function with @task in a module that a worker imports, or start a worker with "
        f"its module: omniq worker {module}"
    )


def _lacks(worker: WorkerInfo, task: Task) -> bool:
    """Whether the worker has looked into the module of the function, and did not find the function."""
    return worker.runnable is not None and task.func_path in worker.runnable.excluded


def _module_of(task: Task, workers: Sequence[WorkerInfo]) -> str:
    """The module of the function, for a shell, if a worker has it: a stored path alone is no advice."""
    module = task.func_path.rpartition(".")[0]
    for worker in workers:
        if worker.runnable is not None:
            modules = worker.runnable.modules or ()
            # Beside modules, the other names are those of `@task(name=…)`, which begin with any word.
            of_paths = {path.rpartition(".")[0] for path in modules or worker.runnable.names}
            if module in of_paths or module in modules:
                return as_argument(module)
    return _ANY_MODULE


async def _suspect_reasons(
    storage: BaseStorage, task: Task, workers: Sequence[WorkerInfo]
) -> list[Reason]:
    """Of the tasks that ran when a worker died, each worker runs one at a time."""
    suspects: list[str] = []
    for worker in [worker for worker in workers if _takes(worker, task)]:
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
            text=f"A worker died {_times(task.crashes)} while it ran the task; each worker runs "
            f"one such task at a time, at present {_id_list(suspects)}",
            facts={"crashes": task.crashes, "holders": suspects},
        )
    ]


async def _order_reasons(
    storage: BaseStorage, task: Task, paused: frozenset[str], now: datetime
) -> list[Reason]:
    """The number of due tasks that are claimed first, of all that the same workers claim."""
    workers = [worker for worker in await storage.workers() if _takes(worker, task)]
    ahead, is_exact = 0, True
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        page = await storage.list_tasks(status=status, limit=_MAX_COUNTED)
        is_exact = is_exact and len(page) < _MAX_COUNTED
        ahead += sum(
            other.owner is None
            and other.id != task.id
            and _order(other) < _order(task)
            and _due(other) <= now
            and other.queue not in paused
            and any(_takes(worker, other) for worker in workers)
            for other in page
        )
    if not ahead:
        return []
    count = f"{ahead}" if is_exact else f"at least {ahead}"
    return [
        Reason(
            code="behind",
            text=f"The task waits behind {count} {'task' if ahead == 1 else 'tasks'} with a higher "
            "priority or an earlier due time",
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


def _takes(worker: WorkerInfo, task: Task) -> bool:
    """Whether the worker claims tasks of that queue and function."""
    return _serves(worker, task.queue) and worker.can_run(task.func_path)


def _runs(workers: Sequence[WorkerInfo]) -> str:
    shown = [
        f"worker {worker.id} (process {worker.pid} on {worker.host}) runs {worker.runnable or 'all'}"
        for worker in workers[:_MAX_IDS]
    ]
    more = [f"{len(workers) - _MAX_IDS} more"] if len(workers) > _MAX_IDS else []
    return ", ".join(shown + more)


def _is_full(worker: WorkerInfo) -> bool:
    # A concurrency of 0 means that the worker has not reported its slots.
    return 0 < worker.concurrency <= len(worker.running)


def _id_list(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:_MAX_IDS])
    return f"{shown} and {len(ids) - _MAX_IDS} more" if len(ids) > _MAX_IDS else shown


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _failures(count: int) -> str:
    return "1 failure" if count == 1 else f"{count} failures in a row"
