"""The HTML pages. Each works without JavaScript; a script only refreshes it."""

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
from omniq.dashboard.authorization import perform_authorized, read_form
from omniq.dashboard.charts import Chart, Series, chart, stacked
from omniq.dashboard.cookies import set_notice
from omniq.dashboard.middleware import user_of
from omniq.dashboard.rendering import own_path, page
from omniq.dashboard.sampler import Point, Snapshot
from omniq.models import Schedule, TaskStatus
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.operations.formatting import count_of
from omniq.operations.health import describe_unrunnable
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.task_detail import UNVERIFIED, UNVERIFIED_LETTER, TaskDetail, task_detail
from omniq.to_json import plain

_WINDOWS = (60.0, 180.0, 300.0, 600.0, 900.0)
_MAX_STEPS = 100
_MAX_UPCOMING = 6


async def overview(request: Request) -> Response:
    """Problems, key numbers, charts, queues, failures, breakers and next schedules."""
    state = state_of(request)
    snapshot = await state.sampler.current()
    points = list(state.sampler.points)
    overview = snapshot.overview
    return page(
        request,
        "overview.html",
        overview=overview,
        problems=problems(snapshot),
        slices=stacked([(str(status), overview.by_status[status]) for status in TaskStatus]),
        waiting=_waiting(snapshot),
        slots=sum(worker.concurrency for worker in overview.workers),
        busy=sum(len(worker.running) for worker in overview.workers),
        charts=_charts(points),
        sparks=_sparks(snapshot, points),
        window_text=_window_text(points),
        upcoming=_upcoming(snapshot),
    )


def _upcoming(snapshot: Snapshot) -> list[tuple[datetime, Schedule]]:
    """The schedules that fire next, in order of time."""
    times = [
        (each.next_at, each) for each in snapshot.schedules if each.next_at and not each.paused
    ]
    return sorted(times, key=lambda pair: pair[0])[:_MAX_UPCOMING]


def _waiting(snapshot: Snapshot) -> int:
    by_status = snapshot.overview.by_status
    return by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING]


def _window(points: list[Point]) -> float:
    """The seconds that the charts show: the smallest window that holds all points."""
    known = points[-1].at - points[0].at if points else 0.0
    return next((each for each in _WINDOWS if each >= known), _WINDOWS[-1])


def _window_text(points: list[Point]) -> str:
    return f"{_window(points) / 60:.0f} min"


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


def _sparks(snapshot: Snapshot, points: list[Point]) -> dict[str, Chart]:
    return {
        line.name: _spark(
            [(each.at, float(each.by_queue.get(line.name, 0))) for each in points], _window(points)
        )
        for line in snapshot.overview.queues
    }


def problems(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The problems that need an operator, each with the page where it can be solved."""
    overview = snapshot.overview
    found = [
        (f"worker {worker.id} on {worker.host} is stalled", "/workers")
        for worker in overview.workers
        if worker.stalled
    ]
    found += [
        (f"breaker {breaker.name} is {breaker.state}: {breaker.reason}", "/#breakers")
        for breaker in overview.breakers
        if breaker.state != "closed"
    ]
    found += [
        (f"queue {line.name} is paused and has {count_of(line.waiting, 'task')}", "/queues")
        for line in overview.queues
        if line.paused and line.waiting
    ]
    found += [
        (
            f"queue {line.name} has {count_of(line.waiting, 'task')} and no worker serves it",
            "/queues",
        )
        for line in overview.queues
        if line.waiting and not line.workers
    ]
    found += [
        (describe_unrunnable(each), f"/tasks?{urlencode({'function': each.func_path})}")
        for each in overview.unrunnable
    ]
    if overview.dead:
        found.append((f"{count_of(overview.dead, 'dead letter')} to retry or delete", "/dead"))
    return found


async def tasks(request: Request) -> Response:
    """Tasks, filtered and paged, with actions on the selected ones."""
    state = state_of(request)
    query = queries.parse_query(queries.TasksQuery, request.query_params.multi_items())
    found, snapshot, functions = await asyncio.gather(
        queries.list_tasks_page(state, query),
        state.sampler.current(),
        queries.recent_functions(state),
    )
    given = {name: text for name, text in request.query_params.items() if text and name != "cursor"}
    return page(
        request,
        "tasks.html",
        filters=query,
        found=found,
        is_filtered=bool(given.keys() - {"limit"}),
        older=None if found.cursor is None else urlencode({**given, "cursor": found.cursor}),
        statuses=list(TaskStatus),
        overview=snapshot.overview,
        by_status=snapshot.overview.by_status,
        queues=[line.name for line in snapshot.overview.queues],
        functions=functions,
        spans=(("15m", "15 minutes"), ("1h", "hour"), ("24h", "day"), ("7d", "week")),
    )


async def task(request: Request) -> Response:
    """One task: its details, its history, and why it does not run."""
    state = state_of(request)
    task_id = request.path_params["task_id"]

    async def read() -> tuple[TaskDetail, Any]:
        return await task_detail(state.storage, task_id), await explain(state.storage, task_id)

    detail, explanation = await state.cached(("task", task_id), read)
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
        steps=[(step.name, redacted(step.result)) for step in detail.steps[:_MAX_STEPS]],
        result=None if detail.result is None else redacted(detail.result.result),
        editable=_editable(detail),
        unverified=None if detail.task.is_verified else UNVERIFIED,
        unverified_letter=_unverified_letter(detail),
    )


def _unverified_letter(detail: TaskDetail) -> str | None:
    return None if detail.dead is None or detail.dead.is_verified else UNVERIFIED_LETTER


def _editable(detail: TaskDetail) -> tuple[str, str] | None:
    """The arguments as JSON to edit; None if they are not known, or JSON cannot represent them exactly."""
    if not detail.task.is_verified or (detail.dead is not None and not detail.dead.is_verified):
        return None
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
    """Dead letters grouped by function and reason, and a page of single ones."""
    state = state_of(request)
    query = queries.parse_query(queries.DeadQuery, request.query_params.multi_items())
    letters = await queries.list_dead_page(state, query)
    given = {name: text for name, text in request.query_params.items() if text and name != "after"}
    is_full = len(letters) == query.limit
    return page(
        request,
        "dead.html",
        filters=query,
        groups=await queries.list_dead_groups(state),
        letters=letters,
        more=urlencode({**given, "after": letters[-1].task_id}) if is_full else None,
    )


async def workers(request: Request) -> Response:
    """The live workers, their running tasks, and which ones are stalled or paused."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "workers.html", views=await queries.list_workers(state))


async def schedules(request: Request) -> Response:
    """The schedules with their next times and last runs."""
    state = state_of(request)
    await state.sampler.current()
    older = await state.storage.older_documents(max_pages=0)
    return page(request, "schedules.html", views=await queries.list_schedules(state), older=older)


async def queues(request: Request) -> Response:
    """The queues: waiting and running tasks, age, workers, paused or active."""
    state = state_of(request)
    snapshot = await state.sampler.current()
    points = list(state.sampler.points)
    return page(
        request,
        "queues.html",
        overview=snapshot.overview,
        sparks=_sparks(snapshot, points),
        window_text=_window_text(points),
    )


async def storage(request: Request) -> Response:
    """The guarantees of the storage, checked, and the settings."""
    state = state_of(request)
    await state.sampler.current()
    findings = await state.cached("promises", lambda: check_storage(state.storage))
    settings = state.storage.settings
    shown = [(name, text, settings.sources[name]) for name, text in settings.shown().items()]
    return page(request, "storage.html", findings=findings, settings=shown)


async def reference(request: Request) -> Response:
    """The list of API endpoints."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "reference.html", document=request.app.state.document)


def form_handler(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The request handler of an action that a form submits: performs it, then redirects back."""

    async def handle(request: Request) -> Response:
        fields = await read_form(request)
        token = next((text for name, text in fields if name == "token"), "")
        result = await perform_authorized(
            request, action, lambda: actions.parse_form(action, fields), token
        )
        back = next((text for name, text in fields if name == "back"), "")
        response = RedirectResponse(request.scope.get("root_path", "") + own_path(back), 303)
        session = user_of(request).session
        if session is not None:
            set_notice(response, request.scope, session, result.message)
        return response

    return handle
