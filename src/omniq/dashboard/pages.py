"""The pages. Each can be read without a script; a script only keeps them up to date."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from omniq.dashboard import actions, queries
from omniq.dashboard.app_state import state_of
from omniq.dashboard.authorization import change, form_of
from omniq.dashboard.charts import Chart, Series, chart, stacked
from omniq.dashboard.middleware import user_of
from omniq.dashboard.rendering import page
from omniq.dashboard.sampler import Point, Snapshot
from omniq.models import Schedule, TaskStatus
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.operations.formatting import count_of
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.task_detail import TaskDetail, task_detail
from omniq.to_json import plain

_SPANS = (60.0, 180.0, 300.0, 600.0, 900.0)
_STEPS_SHOWN = 100
_SOONEST = 6


async def overview(request: Request) -> Response:
    """How it goes, at one look."""
    state = state_of(request)
    look = await state.sampler.current()
    points = list(state.sampler.points)
    return page(
        request,
        "overview.html",
        look_now=look,
        overview=look.overview,
        problems=problems(look),
        slices=stacked([(str(status), look.overview.by_status[status]) for status in TaskStatus]),
        waiting=_waiting(look),
        slots=sum(worker.concurrency for worker in look.overview.workers),
        busy=sum(len(worker.running) for worker in look.overview.workers),
        charts=_charts(points),
        sparks=_sparks(look, points),
        span_text=f"{_window(points) / 60:.0f} min",
        upcoming=_upcoming(look),
    )


def _upcoming(look: Snapshot) -> list[tuple[datetime, Schedule]]:
    """The schedules that fire next, the first one first."""
    times = [(each.next_at, each) for each in look.schedules if each.next_at and not each.paused]
    return sorted(times, key=lambda pair: pair[0])[:_SOONEST]


def _waiting(look: Snapshot) -> int:
    by_status = look.overview.by_status
    return by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING]


def _window(points: list[Point]) -> float:
    """How far back the charts go: far enough for what is known, and no further."""
    known = points[-1].at - points[0].at if points else 0.0
    return next((each for each in _SPANS if each >= known), _SPANS[-1])


def _charts(points: list[Point]) -> dict[str, Chart]:
    finished = [(point.at, point.finished) for point in points]
    failed = [(point.at, point.failed) for point in points]
    waiting = [(point.at, float(point.waiting)) for point in points]
    window = _window(points)
    throughput = _large(finished, window)
    return {
        "finished": throughput,
        "failed": _large(failed, window, throughput.top),
        "waiting": _large(waiting, window),
        "spark_finished": _spark(finished, window),
        "spark_failed": _spark(failed, window),
        "spark_waiting": _spark(waiting, window),
    }


def _large(series: Series, window: float, top: float | None = None) -> Chart:
    return chart(series, span=window, width=640, height=150, top=top)


def _spark(series: Series, window: float) -> Chart:
    return chart(series, span=window, width=120, height=28)


def _sparks(look: Snapshot, points: list[Point]) -> dict[str, Chart]:
    return {
        line.name: _spark(
            [(each.at, float(each.by_queue.get(line.name, 0))) for each in points], _window(points)
        )
        for line in look.overview.queues
    }


def problems(look: Snapshot) -> list[tuple[str, str]]:
    """What needs somebody, each with the page where it can be put right; empty when all is well."""
    seen = look.overview
    found = [
        (f"worker {worker.id} on {worker.host} is stalled", "/workers")
        for worker in seen.workers
        if worker.stalled
    ]
    found += [
        (f"breaker {breaker.name} is {breaker.state}: {breaker.reason}", "/#breakers")
        for breaker in seen.breakers
        if breaker.state != "closed"
    ]
    found += [
        (f"queue {line.name} is paused and holds {count_of(line.waiting, 'task')}", "/queues")
        for line in seen.queues
        if line.paused and line.waiting
    ]
    found += [
        (
            f"queue {line.name} holds {count_of(line.waiting, 'task')} and no worker takes from it",
            "/queues",
        )
        for line in seen.queues
        if line.waiting and not line.workers
    ]
    if seen.dead:
        found.append((f"{count_of(seen.dead, 'dead letter')} to look at", "/dead"))
    return found


async def tasks(request: Request) -> Response:
    """Tasks, filtered and paged, to act on some of them."""
    state = state_of(request)
    question = queries.parse_query(queries.TasksQuery, request.query_params.multi_items())
    found, look, functions = await asyncio.gather(
        queries.list_tasks_page(state, question),
        state.sampler.current(),
        queries.known_functions(state),
    )
    given = {name: text for name, text in request.query_params.items() if text and name != "cursor"}
    return page(
        request,
        "tasks.html",
        question=question,
        found=found,
        is_filtered=bool(given.keys() - {"limit"}),
        older=None if found.cursor is None else urlencode({**given, "cursor": found.cursor}),
        statuses=list(TaskStatus),
        overview=look.overview,
        by_status=look.overview.by_status,
        queues=[line.name for line in look.overview.queues],
        functions=functions,
        spans=(("15m", "15 minutes"), ("1h", "hour"), ("24h", "day"), ("7d", "week")),
    )


async def task(request: Request) -> Response:
    """One task: what it is, what happened to it, and why it does not run."""
    state = state_of(request)
    task_id = request.path_params["task_id"]

    async def ask() -> tuple[TaskDetail, Any]:
        return await task_detail(state.storage, task_id), await explain(state.storage, task_id)

    detail, explanation = await state.once(("task", task_id), ask)
    safe = without_secrets(detail.task)
    return page(
        request,
        "task.html",
        detail=detail,
        task=detail.task,
        explanation=explanation,
        args=list(safe.args),
        kwargs=safe.kwargs,
        metadata=safe.metadata,
        steps=[(step.name, redacted(step.result)) for step in detail.steps[:_STEPS_SHOWN]],
        result=None if detail.result is None else redacted(detail.result.result),
        editable=_editable(detail),
    )


def _editable(detail: TaskDetail) -> tuple[str, str] | None:
    """The arguments as JSON, to be edited; None when JSON cannot hold them as they are."""
    parts = (list(detail.task.args), detail.task.kwargs)
    safe = without_secrets(detail.task)
    texts = [
        json.dumps(plain(part), indent=2, ensure_ascii=False)
        for part in (list(safe.args), safe.kwargs)
    ]
    if any(_through_json(part) != part for part in parts):
        return None
    return texts[0], texts[1]


def _through_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


async def dead(request: Request) -> Response:
    """Dead letters by what killed them, and the letters of one group."""
    state = state_of(request)
    question = queries.parse_query(queries.DeadQuery, request.query_params.multi_items())
    letters = await queries.list_dead_page(state, question)
    given = {name: text for name, text in request.query_params.items() if text and name != "after"}
    is_full = len(letters) == question.limit
    return page(
        request,
        "dead.html",
        question=question,
        groups=await queries.list_dead_groups(state),
        letters=letters,
        more=urlencode({**given, "after": letters[-1].task_id}) if is_full else None,
    )


async def workers(request: Request) -> Response:
    """Who works, on what, and who does not get on."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "workers.html", views=await queries.list_workers(state))


async def schedules(request: Request) -> Response:
    """What fires when."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "schedules.html", views=await queries.list_schedules(state))


async def queues(request: Request) -> Response:
    """The queues: how deep, how old, paused or not."""
    state = state_of(request)
    look = await state.sampler.current()
    points = list(state.sampler.points)
    return page(request, "queues.html", look_now=look, sparks=_sparks(look, points))


async def storage(request: Request) -> Response:
    """What this storage promises."""
    state = state_of(request)
    await state.sampler.current()
    findings = await state.once("promises", lambda: check_storage(state.storage))
    settings = state.storage.settings
    shown = [(name, text, settings.sources[name]) for name, text in settings.shown().items()]
    return page(request, "storage.html", findings=findings, settings=shown)


async def reference(request: Request) -> Response:
    """The API, for people."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "reference.html", document=request.app.state.document)


def acting(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a form that asks for an action: does it, and goes back to the page."""

    async def handle(request: Request) -> Response:
        fields = await form_of(request)
        token = next((text for name, text in fields if name == "token"), "")
        done = await change(request, action, lambda: actions.parse_form(action, fields), token)
        session = user_of(request).session
        if session is not None:
            session.notice = done.message
        back = next((text for name, text in fields if name == "back"), "")
        return RedirectResponse(request.scope.get("root_path", "") + own_path(back), 303)

    return handle


def own_path(text: str) -> str:
    """A path of the dashboard to go to; anything else becomes the overview.

    >>> own_path("/tasks?status=failed"), own_path("//evil.example/"), own_path("https://evil")
    ('/tasks?status=failed', '/', '/')
    """
    is_path = text.startswith("/") and not text.startswith(("//", "/\\"))
    return text if is_path and text.isascii() and text.isprintable() and "\\" not in text else "/"
