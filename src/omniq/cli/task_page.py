"""Everything about one task, for people."""

from __future__ import annotations

from datetime import datetime

from omniq.cli import output
from omniq.cli.parsing import count_of, format_duration, format_instant, relative_time
from omniq.models import Attempt, DeadLetter, Task, TaskStatus
from omniq.operations.formatting import as_argument, timeout_text
from omniq.operations.redaction import without_secrets
from omniq.operations.task_detail import UNVERIFIED, UNVERIFIED_LETTER, TaskDetail
from omniq.retry import policy_text


def task_page(detail: TaskDetail, now: datetime) -> list[output.Renderable]:
    """Everything about a task, for people."""
    task, result = detail.task, detail.result
    page: list[output.Renderable] = [
        output.key_values([*_identity(task, detail.dead, now), *_running(detail)])
    ]
    if task.status is TaskStatus.SUCCESS and result is not None:
        page += ["", output.key_values([("result", output.value_text(result.result))])]
        if result.warnings:
            page.append(output.key_values([("warning", warning) for warning in result.warnings]))
    elif result is not None and result.reason:
        page += ["", output.key_values([("because", result.reason)])]
    if detail.steps:
        done = [(step.name, output.value_text(step.result)) for step in detail.steps]
        page += ["", output.Listing(("step done", "result"), done)]
    for attempt in detail.attempts:
        page += ["", *_attempt(attempt)]
    rows = [(format_instant(each.at), each.what, each.detail) for each in detail.timeline]
    page += ["", output.Listing(("time", "what", ""), rows)]
    if detail.dead is not None:
        page += ["", f"Run it again: omniq dead retry {as_argument(task.id)}"]
    elif not task.status.is_final:
        page += ["", f"Why it has not ended: omniq explain {as_argument(task.id)}"]
    return page


def _identity(
    task: Task, letter: DeadLetter | None, now: datetime
) -> list[tuple[str, output.Cell]]:
    safe = without_secrets(task)
    return [
        ("id", task.id),
        ("status", output.status_text(task.status)),
        ("function", task.func_path),
        ("queue", task.queue),
        ("priority", task.priority),
        ("call", "" if task.is_verified else UNVERIFIED),
        ("dead letter", "" if letter is None or letter.is_verified else UNVERIFIED_LETTER),
        ("arguments", output.value_text(safe.args) if task.args else ""),
        ("keywords", output.value_text(safe.kwargs) if task.kwargs else ""),
        ("metadata", output.value_text(task.metadata) if task.metadata else ""),
        ("enqueued", f"{format_instant(task.created_at)} ({relative_time(task.created_at, now)})"),
        ("type", task.task_type or ""),
        ("failures", f"{task.failures} of {count_of(task.max_retries + 1, 'attempt')} at most"),
        ("retry", _retry_text(task)),
        ("crashes", task.crashes or ""),
        ("timeout", timeout_text(task)),
        ("expires", format_instant(task.expires)),
        ("repeats", _repeats_text(task)),
        ("unique", task.unique or ""),
        ("schedule", task.schedule_id or ""),
        ("limits", output.value_text(task.limits) if task.limits else ""),
        ("breakers", ", ".join(rule.name for rule in task.breakers)),
    ]


def _retry_text(task: Task) -> str:
    policy = task.retry_delays or task.retry
    return policy_text(policy) if policy else ""


def _repeats_text(task: Task) -> str:
    text = task.cron or (f"every {format_duration(task.interval)}" if task.interval else "")
    return f"{text}, also after a failure" if task.reschedule_on_failure else text


def _running(detail: TaskDetail) -> list[tuple[str, output.Cell]]:
    task, progress = detail.task, detail.progress
    return [
        ("worker", task.owner or ""),
        ("claim", task.token if task.owner else ""),
        ("progress", "" if progress is None else f"{progress.fraction:.0%} {progress.message}"),
        ("cancelled", "requested, not done yet" if task.cancel_requested and task.owner else ""),
        ("on_dead", _hook_text(detail)),
    ]


def _hook_text(detail: TaskDetail) -> str:
    hook = detail.pending_hook
    if hook is None:
        return ""
    return f"not ended yet, worker {hook.owner}" if hook.owner else "waits for a worker"


def _attempt(attempt: Attempt) -> list[output.Renderable]:
    error = attempt.error
    head = f"attempt {attempt.number} {attempt.outcome} at {format_instant(attempt.finished_at)}"
    if error is None:
        return [output.text(head, "bold")]
    line = f"{head}: {error.error_type}: {error.message}"
    # A traceback ends with the message; without one, this line alone has it.
    shown: list[output.Renderable] = (
        [output.text(line, "bold"), output.block(error.traceback)]
        if error.traceback
        else [output.block(line)]
    )
    if error.recovery_hint:
        shown.append(output.block(f"hint: {error.recovery_hint}"))
    return shown
