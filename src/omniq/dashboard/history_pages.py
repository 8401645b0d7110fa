"""The pages about one queue, function or worker, with its history, and the list of functions."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omniq.dashboard import queries
from omniq.dashboard.app_state import state_of
from omniq.dashboard.operator_notes import about, last_of, newest_entries
from omniq.dashboard.pages import history_charts
from omniq.dashboard.rendering import page, patience_of
from omniq.operations.overview import QueueInfo
from omniq.operations.run_history import RANGES, RunFigures, range_of
from omniq.operations.waiting_reasons import WaitingReasons, waiting_reasons

_SORTS: dict[str, tuple[str, Callable[[RunFigures], float]]] = {
    "runs": ("most runs", lambda each: each.runs),
    "errors": ("most failed runs", lambda each: each.errors),
    "share": ("highest failure rate", lambda each: each.error_share),
    "slow": ("slowest", lambda each: each.run_p95 or 0.0),
    "wait": ("longest wait", lambda each: each.wait_p95 or 0.0),
    "busy": ("most time", lambda each: each.busy_seconds),
}


async def functions(request: Request) -> Response:
    """All functions that had a run in the range, with their figures."""
    state = state_of(request)
    query = queries.parse_query(queries.HistoryQuery, request.query_params.multi_items())
    await state.sampler.current()
    history = await queries.history_of(state, query.range, parts=True)
    sort = query.sort if query.sort in _SORTS else "runs"
    measure = _SORTS[sort][1]
    return page(
        request,
        "functions.html",
        pauses=await state.queue.functions.paused(),
        history=history,
        range_text=range_of(history.range).text,
        rows=sorted(history.functions.items(), key=lambda pair: -measure(pair[1])),
        sort=sort,
        sorts=[(name, text) for name, (text, _) in _SORTS.items()],
    )


async def function(request: Request) -> Response:
    """One function: outcomes, waiting times and durations over a range, by queue."""
    state, name = state_of(request), request.path_params["name"]
    query = queries.parse_query(queries.HistoryQuery, request.query_params.multi_items())
    await state.sampler.current()
    history = await queries.history_of(state, query.range, function=name, parts=True)
    pauses = await state.queue.functions.paused()
    entries = await newest_entries(state)
    return page(
        request,
        "function.html",
        name=name,
        pause=next((each for each in pauses if each.function == name), None),
        paused_by=last_of(entries, "functions/pause", name),
        notes=about(entries, f"/functions/{name}", name),
        history=history,
        range_text=range_of(history.range).text,
        charts=history_charts(history),
    )


async def queue(request: Request) -> Response:
    """One queue: what waits and why, and its history by function."""
    state, name = state_of(request), request.path_params["name"]
    query = queries.parse_query(queries.HistoryQuery, request.query_params.multi_items())
    snapshot = await state.sampler.current()
    idle = QueueInfo(name=name, waiting=0, running=0, workers=0, paused=False)
    known = {line.name: line for line in snapshot.overview.queues}
    history = await queries.history_of(state, query.range, queue=name, parts=True)
    if name not in known and not history.total.runs and snapshot.overview.counted_at:
        raise HTTPException(404, f"no queue {name} has tasks, is paused, or had a run recently")

    async def read_reasons() -> WaitingReasons:
        async with state.searches.use() as storage:
            return await waiting_reasons(storage, name)

    entries = await newest_entries(state)
    pauses = await state.cached("pauses", state.storage.pauses)
    reasons, searching = await state.soon(
        ("reasons", name),
        read_reasons,
        WaitingReasons({}, 0),
        max_age=5.0,
        patience=patience_of(request),
    )
    return page(
        request,
        "queue.html",
        notes=about(entries, f"/queues/{name}", name),
        paused_by=last_of(entries, "queues/pause", name),
        pause=next((each for each in pauses if each.queue == name), None),
        name=name,
        line=known.get(name, idle),
        history=history,
        range_text=range_of(history.range).text,
        charts=history_charts(history),
        reasons=reasons,
        searching=searching,
    )


async def worker(request: Request) -> Response:
    """One worker, alive or ended in the last 24 hours: its tasks and its history."""
    state, worker_id = state_of(request), request.path_params["name"]
    query = queries.parse_query(queries.HistoryQuery, request.query_params.multi_items())
    await state.sampler.current()
    views = {view.worker.id: view for view in await queries.list_workers(state)}
    ended = await state.cached("ended", state.storage.ended_workers)
    gone = next((each for each in ended if each.worker.id == worker_id), None)
    view = views.get(worker_id)
    if view is None and gone is None:
        raise HTTPException(
            404, f"no worker {worker_id} is alive or has ended in the last 24 hours"
        )
    # Counts per hour are not stored by worker.
    span = "24h" if RANGES[range_of(query.range).name].hours else query.range
    history = await queries.history_of(state, span, worker=worker_id)
    return page(
        request,
        "worker.html",
        notes=about(await newest_entries(state), f"/workers/{worker_id}", worker_id),
        worker=view.worker if view is not None else gone.worker if gone else None,
        ended=None if view is not None else gone,
        tasks=() if view is None else view.tasks,
        requests=() if view is None else view.requests,
        history=history,
        range_text=range_of(history.range).text,
        charts=history_charts(history),
    )


ROUTES = (
    Route("/functions", functions, methods=["GET"]),
    Route("/functions/{name:path}", function, methods=["GET"]),
    Route("/queues/{name:path}", queue, methods=["GET"]),
    Route("/workers/{name:path}", worker, methods=["GET"]),
)
