"""The HTML pages. Each works without JavaScript; a script only refreshes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from omniq.dashboard import actions, queries, searches
from omniq.dashboard.app_state import AppState, state_of
from omniq.dashboard.authorization import perform_authorized, read_form
from omniq.dashboard.charts import (
    Chart,
    Series,
    TimeChart,
    bars_of,
    chart,
    nice_ceiling,
    outcome_chart,
    percentile_chart,
    stacked,
)
from omniq.dashboard.cookies import set_notice
from omniq.dashboard.middleware import user_of
from omniq.dashboard.operator_notes import about, last_of, muted_groups, newest_entries
from omniq.dashboard.problems import problems
from omniq.dashboard.refused_forms import refused_fields
from omniq.dashboard.rendering import own_path, page, patience_of
from omniq.dashboard.sampler import Point, Snapshot
from omniq.dashboard.sorting import DEAD_SORTS, QUEUE_SORTS, WORKER_SORTS, chosen_sort, names_of
from omniq.dashboard.waterfall import waterfall
from omniq.errors import DuplicateTask, InvalidValue, QueueFull, SerializationError
from omniq.models import Schedule, TaskStatus
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.operations.flow_view import flow_that_has
from omniq.operations.output_view import OutputPart, newest_output, parts_of
from omniq.operations.overview import QueueInfo
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.run_history import History, range_of
from omniq.operations.search_query import QUALIFIERS
from omniq.operations.task_detail import UNVERIFIED, UNVERIFIED_LETTER, TaskDetail, task_detail
from omniq.operations.task_match import TaskPage
from omniq.text.to_json import plain

_WINDOWS = (60.0, 180.0, 300.0, 600.0, 900.0)
_MAX_STEPS = 100
_ENDINGS_PATIENCE = 0.05
_MAX_CHUNKS = 500
_MAX_UPCOMING = 6


async def overview(request: Request) -> Response:
    """Problems, key numbers, the history of a range, queues, failures, breakers and next schedules."""
    state = state_of(request)
    query = queries.parse_query(queries.HistoryQuery, request.query_params.multi_items())
    snapshot = await state.sampler.current()
    history = await queries.history_of(state, query.range)
    points = list(state.sampler.points)
    overview = snapshot.overview
    window = _window(points)
    live = [status for status in TaskStatus if not status.is_final]
    sparks, spark_top = queue_sparks(snapshot, points)
    return page(
        request,
        "overview.html",
        overview=overview,
        problems=problems(snapshot, state.clock.now()),
        slices=stacked([(str(status), overview.by_status[status]) for status in live]),
        waiting=_waiting(snapshot),
        slots=sum(worker.concurrency for worker in overview.workers),
        busy=sum(len(worker.running) for worker in overview.workers),
        history=history,
        range_text=range_of(history.range).text,
        charts=history_charts(history),
        sparks={
            "finished": _spark([(point.at, point.finished) for point in points], window),
            "waiting": _spark([(point.at, float(point.waiting)) for point in points], window),
        },
        queues=worst_first(overview.queues),
        queue_sparks=sparks,
        spark_top=spark_top,
        window_text=window_text(points),
        upcoming=_upcoming(snapshot),
    )


def history_charts(history: History) -> list[TimeChart]:
    """The charts that every page of a history shows."""
    return [
        outcome_chart(history, "Runs", ("succeeded", "retried", "failed")),
        outcome_chart(history, "Failed runs", ("retried", "failed")),
        percentile_chart(history, "Wait", "wait"),
        percentile_chart(history, "Run time", "run"),
    ]


def _upcoming(snapshot: Snapshot) -> list[tuple[datetime, Schedule]]:
    """The schedules that fire next, in order of time."""
    times = [
        (each.next_at, each) for each in snapshot.schedules if each.next_at and not each.paused
    ]
    return sorted(times, key=lambda pair: pair[0])[:_MAX_UPCOMING]


def _waiting(snapshot: Snapshot) -> int:
    by_status = snapshot.overview.by_status
    return by_status[TaskStatus.PENDING] + by_status[TaskStatus.RETRYING]


def worst_first(queues: Sequence[QueueInfo]) -> list[QueueInfo]:
    """The queues, first those whose oldest task has waited longest, then those with the most tasks."""
    return sorted(queues, key=lambda line: (-line.oldest_due_age, -line.waiting, line.name))


def _window(points: list[Point]) -> float:
    """The seconds that the sparklines show: the smallest window that holds all points."""
    known = points[-1].at - points[0].at if points else 0.0
    return next((each for each in _WINDOWS if each >= known), _WINDOWS[-1])


def window_text(points: list[Point]) -> str:
    """The time that the sparklines show."""
    return f"{_window(points) / 60:.0f} min"


def _spark(series: Series, window: float, top: float | None = None) -> Chart:
    return chart(series, span=window, width=120, height=28, top=top)


def queue_sparks(snapshot: Snapshot, points: list[Point]) -> tuple[dict[str, Chart], float]:
    """The backlog of each queue, all on one scale, and its top."""
    most = max((max(each.by_queue.values(), default=0) for each in points), default=0)
    top = nice_ceiling(most)
    sparks = {
        line.name: _spark(
            [(each.at, float(each.by_queue.get(line.name, 0))) for each in points],
            _window(points),
            top,
        )
        for line in snapshot.overview.queues
    }
    return sparks, top


async def tasks(request: Request) -> Response:
    """Tasks, searched and paged, with actions on the selected ones."""
    state = state_of(request)
    given = request.query_params.multi_items()
    query = queries.parse_query(queries.TasksQuery, given)
    patience = patience_of(request)
    error, found, searching = "", TaskPage((), None, False), False
    try:
        found, searching = await searches.search_tasks(state, query, patience)
    except InvalidValue as invalid:
        error = str(invalid)
    snapshot, functions = await asyncio.gather(
        state.sampler.current(), searches.functions_soon(state, patience)
    )
    endings = await state.endings.of(found.tasks, min(patience, _ENDINGS_PATIENCE))
    kept = {name: text for name, text in given if text and name != "cursor"}
    text = queries.search_text(query)
    tab = {"q": text} if text else {}
    return page(
        request,
        "tasks.html",
        400 if error else 200,
        filters=query,
        found=found,
        searching=searching,
        error=error,
        text=text,
        is_filtered=bool(kept.keys() - {"limit"}),
        older=None if found.cursor is None else urlencode({**kept, "cursor": found.cursor}),
        newest=urlencode(kept),
        tabs=[
            ("", "all", urlencode(tab)),
            *((str(each), str(each), urlencode({**tab, "status": each})) for each in TaskStatus),
        ],
        overview=snapshot.overview,
        by_status=snapshot.overview.by_status,
        suggestions=[
            *(f"fn:{name}" for name in functions),
            *(f"queue:{line.name}" for line in snapshot.overview.queues),
        ],
        qualifiers=QUALIFIERS,
        bulk=urlencode({**tab, **({"status": query.status} if query.status else {})}),
        rows=[queries.task_row(task, endings.get(task.id)) for task in found.tasks],
    )


async def task(request: Request) -> Response:
    """One task: its details, its history, and why it does not run."""
    state = state_of(request)
    task_id = request.path_params["task_id"]

    async def read() -> tuple[TaskDetail, Any, str | None, list[OutputPart]]:
        detail = await task_detail(state.storage, task_id)
        flow_id = await flow_that_has(state.storage, detail.task)
        output = await _output(state, task_id)
        return detail, await explain(state.storage, task_id), flow_id, output

    detail, explanation, flow_id, output = await state.cached(("task", task_id), read)
    await state.sampler.current()
    safe = without_secrets(detail.task)
    times = _times(detail, state.clock.now())
    return page(
        request,
        "task.html",
        detail=detail,
        task=detail.task,
        explanation=explanation,
        flow_id=flow_id,
        output=output,
        args=list(safe.args),
        kwargs=safe.kwargs,
        metadata=safe.metadata,
        steps=[(step.name, redacted(step.result)) for step in detail.steps[:_MAX_STEPS]],
        result=None if detail.result is None else redacted(detail.result.result),
        editable=_editable(detail),
        waiting=not detail.task.status.is_final and detail.task.owner is None,
        hosts=await _hosts(state),
        notes=about(await newest_entries(state), f"/tasks/{task_id}", task_id),
        spans=waterfall(detail, times["started"], times["finished"], state.clock.now()),
        **times,
        unverified=None if detail.task.is_verified else UNVERIFIED,
        unverified_letter=_unverified_letter(detail),
    )


async def _output(state: AppState, task_id: str) -> list[OutputPart]:
    """The end of the task's output."""
    try:
        return parts_of(await newest_output(state.storage, task_id, _MAX_CHUNKS))
    except SerializationError:
        why = "not verified: it was stored with another key, or was changed"
        return [OutputPart(kind="missed", text=why, at=state.clock.now())]


def _times(detail: TaskDetail, now: datetime) -> dict[str, Any]:
    """When the last run started and ended, how long the task had waited, and how long the run took."""
    task, result = detail.task, detail.result
    is_final = task.status.is_final
    started = result.started_at if result is not None and is_final else task.started_at
    finished = result.finished_at if result is not None and is_final else None
    end = finished or (now if task.owner is not None else None)
    waited = None
    if started is not None:
        waited = max(0.0, (started - (task.eta or task.created_at)).total_seconds())
    took = None if started is None or end is None else max(0.0, (end - started).total_seconds())
    return {"started": started, "finished": finished, "waited": waited, "took": took}


async def _hosts(state: AppState) -> dict[str, str]:
    """The hosts of the workers that are alive or ended in the last 24 hours, by id."""
    snapshot = await state.sampler.current()
    ended = await state.cached("ended", state.storage.ended_workers)
    workers = [*snapshot.overview.workers, *(each.worker for each in ended)]
    return {worker.id: f"{worker.host} process {worker.pid}" for worker in workers}


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
    """Dead letters, latest failure first, and their groups by error."""
    state = state_of(request)
    query = queries.parse_query(queries.DeadQuery, request.query_params.multi_items())
    await state.sampler.current()
    patience = patience_of(request)
    (groups, grouping), (found, searching) = await asyncio.gather(
        searches.groups_soon(state, patience), searches.search_dead(state, query, patience)
    )
    given = {
        name: text
        for name, text in request.query_params.items()
        if text and name not in ("after", "sort")
    }
    entries = await newest_entries(state)
    muted = muted_groups(entries, state.clock.now())
    sort, order = chosen_sort(DEAD_SORTS, query.sort)
    shown = sorted(groups.groups, key=lambda each: (each.id in muted, order(each)))
    group_path = f"/dead?group={query.group}"
    chosen = next((each for each in groups.groups if each.id == query.group), None)
    return page(
        request,
        "dead.html",
        filters=query,
        groups=groups,
        shown=shown,
        sort=sort,
        sorts=names_of(DEAD_SORTS),
        muted=muted,
        notes=about(entries, group_path, query.group) if query.group else [],
        chosen=chosen,
        is_filtered=bool(given.keys() - {"limit"}),
        found=found,
        searching=searching,
        grouping=grouping,
        letters=found.letters,
        newest=urlencode(given),
        more=urlencode({**given, "after": found.after}) if found.after else None,
        bulk=urlencode({name: text for name, text in given.items() if name != "limit"}),
        sparks={each.id: bars_of(each.last_day) for each in groups.groups},
    )


async def workers(request: Request) -> Response:
    """The live workers with their running tasks, and the workers that ended in the last 24 hours."""
    state = state_of(request)
    await state.sampler.current()
    ended = await state.cached("ended", state.storage.ended_workers)
    query = queries.parse_query(queries.SortQuery, request.query_params.multi_items())
    sort, order = chosen_sort(WORKER_SORTS, query.sort)
    views = sorted(await queries.list_workers(state), key=order)
    return page(
        request,
        "workers.html",
        views=views,
        ended=ended[:50],
        sort=sort,
        sorts=names_of(WORKER_SORTS),
    )


async def schedules(request: Request) -> Response:
    """The schedules with their next times and last runs."""
    state = state_of(request)
    await state.sampler.current()
    older = await state.cached("older", lambda: state.storage.older_documents(max_pages=0))
    views = await queries.list_schedules(state)
    return page(request, "schedules.html", views=views, older=older)


async def queues(request: Request) -> Response:
    """The queues: waiting and running tasks, age, runs, workers, paused or active."""
    state = state_of(request)
    snapshot = await state.sampler.current()
    points = list(state.sampler.points)
    history = await queries.history_of(state, "1h", parts=True)
    sparks, spark_top = queue_sparks(snapshot, points)
    query = queries.parse_query(queries.SortQuery, request.query_params.multi_items())
    sort, order = chosen_sort(QUEUE_SORTS, query.sort)
    lines = [(line, history.queues.get(line.name)) for line in snapshot.overview.queues]
    entries = await newest_entries(state)
    pauses = await state.cached("pauses", state.storage.pauses)
    return page(
        request,
        "queues.html",
        overview=snapshot.overview,
        queues=[line for line, _ in sorted(lines, key=order)],
        sort=sort,
        sorts=names_of(QUEUE_SORTS),
        paused_by={
            line.name: entry
            for line, _ in lines
            if line.paused and (entry := last_of(entries, "queues/pause", line.name))
        },
        pauses={each.queue: each for each in pauses if each.queue},
        figures=history.queues,
        sparks=sparks,
        spark_top=spark_top,
        window_text=window_text(points),
    )


async def storage(request: Request) -> Response:
    """The guarantees of the storage, checked, and the settings."""
    state = state_of(request)
    await state.sampler.current()
    findings = await state.cached("promises", lambda: check_storage(state.storage))
    settings = state.storage.settings
    shown = [(name, text, settings.sources[name]) for name, text in settings.shown().items()]
    return page(request, "storage.html", findings=findings, settings=shown, alerts=state.alerts)


async def reference(request: Request) -> Response:
    """The list of API endpoints."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "reference.html", document=request.app.state.document)


def form_handler(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The request handler of an action that a form submits: performs it, then redirects back."""

    async def handle(request: Request) -> Response:
        fields = await read_form(request)
        given = dict(fields)
        token, back = given.get("token", ""), own_path(given.get("back", ""))
        try:
            result = await perform_authorized(
                request, action, lambda: actions.parse_form(action, fields), token
            )
        except (InvalidValue, DuplicateTask, QueueFull) as error:
            code = 400 if isinstance(error, InvalidValue) else 409
            shown = refused_fields(fields, str(error))
            return page(
                request,
                "refused_form.html",
                code,
                action=action,
                error=str(error),
                fields=shown,
                back=back,
            )
        back = result.path or back
        response = RedirectResponse(request.scope.get("root_path", "") + own_path(back), 303)
        session = user_of(request).session
        if session is not None:
            set_notice(response, request.scope, session, result.message)
        return response

    return handle
