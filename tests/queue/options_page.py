"""The page about task options, made from the table in `omniq.tasks.options`.

python -m tests.queue.options_page    writes it again
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from omniq.tasks.options import OPTIONS, Face, Option

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"

HEAD = """# Task options

Options decide how a task is enqueued and run. `@task(…)` sets options for a function, `queue.options(…)` for the calls that follow, and
`queue.schedules.add(…)` for the tasks of a schedule; `omniq enqueue` and `omniq schedules add` have them as flags. Durations are
seconds or `timedelta`, and `30s`, `5m`, `2h` or `7d` on the command line. A wrong value raises `InvalidTask` before anything is stored.

An option of a call overrides `@task`, which overrides the settings. Options are stored with the task when it is enqueued, so a
later deploy changes only new tasks. Options that only `@task` takes are not stored: a worker reads them from its code.

This page is generated from the table in `omniq.tasks.options` by `python -m tests.queue.options_page`; a test compares the two, and
runs the examples.

"""

EXAMPLES: Mapping[str, str] = {
    "queue": '@task(queue="mail")',
    "priority": "queue.options(priority=10)",
    "max_retries": "@task(max_retries=0)",
    "max_crashes": "@task(max_crashes=0)",
    "retry": "@task(retry=[10, 30, 60])",
    "timeout": "@task(timeout=None)",
    "executor": '@task(executor="process")',
    "breaker": '@task(breaker="smtp")',
    "rate": '@task(rate="100/m")',
    "max_running": "@task(max_running=1)",
    "limit_key": '@task(max_running=1, limit_key=lambda user, text: f"user {user}")',
    "cost": '@task(rate="90000/m", limit_key="llm", cost=lambda prompt: len(prompt) // 4)',
    "limits": '@task(limits=[Limit(key="gpu", max_running=8, cost=2), Limit(key="api", rate=50)])',
    "sequence": '@task(sequence=lambda user, text: f"user {user}")',
    "sequence_on_failure": '@task(sequence="ledger", sequence_on_failure="halt")',
    "fair_key": "@task(fair_key=lambda tenant, text: tenant)",
    "fair_weight": "@task(fair_key=lambda tenant, text: tenant, fair_weight=3)",
    "ageing": "@task(ageing=60)",
    "cron": '@task(cron="0 3 * * MON-FRI")',
    "tz": '@task(cron="0 3 * * *", tz="Europe/Berlin")',
    "interval": "@task(interval=30)",
    "reschedule_on_failure": "queue.options(interval=60, reschedule_on_failure=True)",
    "expires": "queue.options(expires=3600)",
    "result_ttl": "@task(result_ttl=timedelta(days=7))",
    "unique": "queue.options(unique=True)",
    "on_conflict": '@task(unique=lambda form, *rest: f"form {form}", on_conflict="replace")',
    "max_wait": 'queue.options(unique="form 1", on_conflict="replace", delay=5, max_wait=60)',
    "unique_for": "@task(unique=True, unique_for=30)",
    "errors": "@task(errors=ErrorRules(http=True))",
    "on_success": "@task(on_success=log_result)",
    "on_failure": "@task(on_failure=count_failure)",
    "on_dead": "@task(on_dead=call_someone)",
    "name": '@task(name="mail.send")',
    "aliases": '@task(aliases=["app.old_module.send"])',
    "version": 'queue.options(version=2).enqueue("shop.order")',
    "upcasters": "@task(version=2, upcasters={1: None})",
    "task_type": 'queue.options(task_type="summarize")',
    "schedules": '@task(schedules=[Cron("0 3 * * *", args=("eu",))])',
    "metadata": 'queue.options(metadata={"tenant": "acme"})',
    "connection": "queue.options(connection=connection)",
    "after": "queue.options(after=[handle])",
    "after_any": "queue.options(after_any=[handle])",
    "eta": "queue.options(eta=datetime(2100, 1, 31, 12, tzinfo=UTC))",
    "delay": "queue.options(delay=30)",
    "task_id": 'queue.options(task_id="invoice-4711")',
    "at": 'queue.schedules.add("party", send, at=datetime(2100, 1, 31, tzinfo=UTC))',
    "start": 'queue.schedules.add("later", send, interval=60, start=datetime(2100, 1, 1, tzinfo=UTC))',
    "end": 'queue.schedules.add("season", send, interval=60, end=datetime(2100, 1, 1, tzinfo=UTC))',
    "missed": 'queue.schedules.add("hourly", send, interval=3600, missed="skip")',
    "max_missed": 'queue.schedules.add("bills", send, interval=3600, missed="all", max_missed=24)',
    "overlap": 'queue.schedules.add("slow", send, interval=60, overlap="skip")',
    "jitter": 'queue.schedules.add("spread", send, interval=3600, jitter=300)',
}
"""One for each option."""

DETAILS: Mapping[str, str] = {
    "unique": """\
The key belongs to the whole storage: two functions or two queues that use the same text share it. A task holds its key from the enqueue
until it has ended; a repeating task, as long as it repeats. The step that records the end also frees the key. Until then, a second enqueue
raises no error and stores nothing: it returns the handle of the task that holds the key, whatever its arguments are.

| value | key |
|---|---|
| `unique="import"` | that text |
| `unique=lambda user, *rest: f"import {user}"` | what the function returns for the arguments |
| `unique=True` | the function and all its arguments: equal calls, in any order of keyword arguments, are the same |

A dead letter holds no key. If another task holds it when you retry the dead letter, `dead.retry` raises `DuplicateTask`. To limit how
many tasks run at the same time, use `max_running`.""",
    "on_conflict": """\
| value | the holder waits | the holder runs |
|---|---|---|
| `"keep"` | nothing is stored; the holder stays as it is | the same |
| `"replace"` | it takes the arguments, the metadata and the eta of the new call, and begins again if it had failed | the new task waits for its end, and is the one that the next calls replace |
| `"extend"` | it keeps its arguments, and takes the eta of the new call | nothing is stored |

The holder keeps its id and its other options. With `delay=5, max_wait=60` this is a debounce: the task runs when no call has come for five
seconds, and at most a minute after the first. See [Breakers and limits](../guides/breakers-and-limits.md). A task of a schedule keeps the holder.""",
    "unique_for": """\
A throttle: `unique_for=30` runs one task in 30 seconds with the same key, however soon that ends. Until then an enqueue returns its handle.""",
    "retry": """\
`retry=[10, 30, 60]` waits 10 seconds before the first retry, then 30, then 60. The list also sets the number of retries, here three; a
different `max_retries` beside it is an error. `ExponentialBackoff(base=1, cap=600)` waits 1, 2, 4 … seconds plus a jitter of up to 10 %, and
`LinearBackoff(step=5)` waits 5, 10, 15 …; with these, `max_retries` sets the number. [Retries](../guides/retries.md#delays) says which
takes precedence: the call, `@task`, the queue or the settings.

If `max_retries` comes from one level and a shorter list from another, the last delay of the list is repeated. On the command line and in
settings, write `10s,30s,1m`, `linear(step=5s)` or `exponential(base=1s, cap=10m)`.""",
    "timeout": """\
A run that takes longer is stopped and counts as failed, with the error `TaskTimeout`. Without the option, the setting `default_timeout`
applies (300 seconds). `timeout=None` means no limit: such a run counts as stuck in `health()` only after `endless_after`, and `ctx.timeout`
is None.""",
    "executor": """\
`async def` functions run on the event loop of the worker, others in a thread. `executor="process"` runs the function in a child process:
use it for work that needs much CPU time, and for code that must be stopped at its timeout, since a thread cannot be stopped.""",
    "expires": """\
A task that no worker has started by then ends as CANCELLED with the reason `expired`. `expires` does not stop a run that has started;
`timeout` does.""",
    "result_ttl": """\
A task that has ended is stored for this long with its result, and is then deleted, so that its id is free again. With 0 nothing is stored:
`handle.result()` raises `TaskNotFound`. Dead letters stay until they are retried or deleted.""",
    "limit_key": """\
`rate` and `max_running` apply across all workers, to all tasks with the same key; without a key, to all tasks of the function.
`limit_key="smtp"` in several functions makes them share one limit; a function of the arguments makes one limit for each user, host or tenant.""",
    "cost": """\
A number, or a function that makes one of the arguments; it is rounded up to whole units. `rate="90000/m"` with `cost` then allows 90,000
units in a minute, and `max_running=8` with `cost=2` four such tasks. A task that costs more than the whole limit runs alone. A task
that needs more units than are free keeps the tasks behind it waiting until it starts; one of higher priority may pass. Give all
tasks with one key a cost, or none. See [Breakers and limits](../guides/breakers-and-limits.md).""",
    "limits": """\
`Limit(key=…, max_running=…)` or `Limit(key=…, rate=…, per=seconds)`, each with a `cost` if it counts units. A task starts when all of its
limits have room, and enters none before. A function of the arguments returns such a list.""",
    "sequence": """\
The next task of the key can be claimed with the step that ends the one before: whatever its priority, its eta and its retries. Tasks of
different functions and queues may share a key. See [Fairness and order](../guides/fairness-and-order.md#events-of-one-customer-in-order).""",
    "sequence_on_failure": """\
With `halt`, a task that has failed for good holds the others of its key until its dead letter is retried or deleted.""",
    "fair_key": """\
A tenant that has enqueued 100,000 tasks keeps another one that has a single task waiting for one round, and not for all of them. Give
all tasks of a queue a `fair_key`, or none. See [Fairness and order](../guides/fairness-and-order.md#one-tenant-that-floods-the-queue).""",
    "fair_weight": """\
A key of weight 3 runs three tasks while a key of weight 1 runs one. With `cost`, a task takes as many turns as it costs. A weight holds
for the tasks that are enqueued with it.""",
    "ageing": """\
With `ageing=60`, a task of priority 2 passes those of priority 0 that have waited less than two minutes longer. Not together with
`fair_key`. See [Fairness and order](../guides/fairness-and-order.md#priorities-without-starvation).""",
    "interval": """\
In `options(…)`, `interval` and `cron` make one task that repeats under one id: with `interval`, the next run is due one interval after the
last one ended. `get_result` returns the newest result. In `@task(…)` and `schedules.add(…)` they make a
[schedule](../guides/scheduling.md), which enqueues a new task each time.""",
    "reschedule_on_failure": """\
A repeating task whose run fails and is not retried becomes a dead letter and ends. With `reschedule_on_failure=True` it continues with its
next run instead, without a dead letter. See [Retries](../guides/retries.md#repeating-tasks). The tasks of a schedule are independent of
each other and do not need it.""",
    "version": """\
Raise it when you change the parameters of a function in a way that stored calls do not fit: see
[Deploying changes](../guides/deploying-changes.md). A function without it has version 1. A task that is enqueued by the path of a function
has version 1 too, or the version that the call names. A worker with an older version leaves the task to other workers, and reports that.""",
    "upcasters": """\
One for each older version, without a gap: a function with the parameters of that version that returns `Args(…)` for the next one, or
`None` if the arguments still fit. It gets the arguments as they are stored, and must not do anything else.""",
    "task_type": """\
Use it when one function does different kinds of work. The type is in log lines and events (`task_type`), in metrics (`type`) and in dead
letters (`letter.task_type`, `dead.list(task_type="summarize")`, `omniq dead list --type summarize`). It never decides what runs. Without
`task_type`, the type of a task is the path of its function.""",
    "metadata": """\
Plain data for your own use, such as a tenant or a trace id. Tasks read it from `ctx.metadata`, and the dashboard filters by it. It is shown
to operators, so do not store secrets in it.""",
    "task_id": """\
An id is taken as long as there is a record of the task, also after the task has ended: a second enqueue raises `DuplicateTask`. With
`unique`, a second enqueue returns the handle of the first task instead.""",
    "max_crashes": """\
A crash of a worker uses no retry. Crashes are counted separately, so that a task that kills its workers comes to an end. With 0 or 1, the
first crash makes the task a dead letter with the reason `crashed`. A task that must run at most once also needs `max_retries=0`.""",
    "on_dead": """\
The worker calls `on_success`, `on_failure` and `on_dead` after it has recorded the outcome. An exception in a hook is logged and changes
nothing. `on_dead` is called at least once, even if its worker is lost; the others at most once. See
[Dead letters](../guides/dead-letters.md#hooks).""",
}
"""What one line cannot say."""


def page() -> str:
    """The whole page."""
    faces = get_args(Face)
    heads = ["option", "type", "default", "meaning", "example"]
    lines = [_line(heads), _line(["---"] * len(heads)), *map(_row, OPTIONS.values())]
    places = [_line(["option", *(f"`{face}`" for face in faces)])]
    places += [_line(["---", *[":-:"] * len(faces)]), *map(_places, OPTIONS.values())]
    details = [f"### {name}\n\n{text}\n" for name, text in DETAILS.items()]
    parts = ["\n".join(lines), "## Where each can be given", "\n".join(places), "## In detail"]
    return HEAD + "\n\n".join([*parts, *details])


def _row(option: Option) -> str:
    example = f"`{EXAMPLES[option.name]}`" if option.name in EXAMPLES else ""
    return _line([f"`{option.name}`", option.type, option.default, option.help, example])


def _places(option: Option) -> str:
    marks = ["✓" if face in option.faces else "" for face in get_args(Face)]
    return _line([f"`{option.name}`", *marks])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
