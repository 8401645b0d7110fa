"""The JSON API: the same reads and the same actions as the pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omniq.dashboard import actions, flow_queries, queries, searches
from omniq.dashboard.app_state import AppState, state_of
from omniq.dashboard.authorization import TOKEN_HEADER, perform_authorized, read_body
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.operations.flow_view import flow_json
from omniq.operations.health import breakers_of
from omniq.operations.limits import limits_of
from omniq.operations.task_detail import task_detail
from omniq.text.to_json import plain


class Endpoint(msgspec.Struct, frozen=True):
    """A GET endpoint. `query_type` defines its query parameters."""

    path: str
    summary: str
    query_type: type[msgspec.Struct]
    handler: Callable[[AppState, Any, dict[str, str]], Awaitable[Any]]


async def overview(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    snapshot = await state.sampler.current()
    shown = plain(snapshot.overview)
    shown["failures"] = [queries.dead_letter_json(letter) for letter in snapshot.overview.failures]
    return shown


async def tasks(state: AppState, query: queries.TasksQuery, path: dict[str, str]) -> Any:
    page = await searches.list_tasks_page(state, query)
    return {
        "tasks": [queries.task_json(task) for task in page.tasks],
        "cursor": page.cursor,
        "is_cut": page.is_cut,
        "reached": plain(page.reached),
        "read": page.read,
    }


async def task(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return queries.detail_json(await task_detail(state.storage, path["task_id"]))


async def explanation(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return plain(await explain(state.storage, path["task_id"]))


async def dead(state: AppState, query: queries.DeadQuery, path: dict[str, str]) -> Any:
    found = await searches.list_dead_page(state, query)
    return {
        "dead": [queries.dead_letter_json(letter) for letter in found.letters],
        "after": found.after,
        "is_cut": found.is_cut,
    }


async def groups(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return plain(await searches.list_dead_groups(state))


async def workers(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    views = await queries.list_workers(state)
    return {"workers": [queries.worker_json(view) for view in views]}


async def queues(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    overview = (await state.sampler.current()).overview
    return {"queues": plain(overview.queues), "counted_at": plain(overview.counted_at)}


async def history(state: AppState, query: queries.HistoryQuery, path: dict[str, str]) -> Any:
    chosen = {"function": query.function, "queue": query.queue, "worker": query.worker}
    given = {name: text for name, text in chosen.items() if text is not None}
    return plain(await queries.history_of(state, query.range, parts=True, workers=True, **given))


async def audit(state: AppState, query: queries.AuditQuery, path: dict[str, str]) -> Any:
    entries, after = await state.storage.audit_log(query.after, query.limit)
    return {"entries": plain(entries), "after": after or None}


async def jobs(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return {"jobs": [job.as_json() for job in state.jobs.list()]}


async def limits(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return {"limits": plain(await state.cached("limits", lambda: limits_of(state.storage)))}


async def flows(state: AppState, query: flow_queries.FlowsQuery, path: dict[str, str]) -> Any:
    return {"flows": plain((await flow_queries.flows_of(state, query))[0])}


async def flow(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return flow_json(*await flow_queries.flow_of(state, path["flow_id"]))


async def events(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    return {"events": plain((await flow_queries.events_of(state))[0])}


async def schedules(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    views = await queries.list_schedules(state)
    return {"schedules": [queries.schedule_json(view) for view in views]}


async def breakers(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    found = await state.cached("breakers", lambda: breakers_of(state.storage))
    return {"breakers": plain(found)}


async def storage(state: AppState, query: queries.NoQuery, path: dict[str, str]) -> Any:
    findings = await state.cached("promises", lambda: check_storage(state.storage))
    return {"promises": plain(findings), "settings": state.storage.settings.shown()}


_NO_QUERY = queries.NoQuery

ENDPOINTS = (
    Endpoint("/api/overview", "Counts, rates, queues, workers and failures", _NO_QUERY, overview),
    Endpoint("/api/tasks", "A page of tasks, newest first", queries.TasksQuery, tasks),
    Endpoint("/api/tasks/{task_id}", "All details of a task", _NO_QUERY, task),
    Endpoint("/api/tasks/{task_id}/explanation", "Why a task does not run", _NO_QUERY, explanation),
    Endpoint("/api/dead", "A page of dead letters", queries.DeadQuery, dead),
    Endpoint("/api/dead/groups", "Dead letters by error", _NO_QUERY, groups),
    Endpoint("/api/flows", "The newest flows", flow_queries.FlowsQuery, flows),
    Endpoint("/api/flows/{flow_id}", "A flow with its nodes and edges", _NO_QUERY, flow),
    Endpoint("/api/events", "The events that tasks wait for", _NO_QUERY, events),
    Endpoint("/api/workers", "Workers and their running tasks", _NO_QUERY, workers),
    Endpoint("/api/queues", "Queues", _NO_QUERY, queues),
    Endpoint("/api/schedules", "Schedules and their next times", _NO_QUERY, schedules),
    Endpoint("/api/breakers", "Circuit breakers", _NO_QUERY, breakers),
    Endpoint(
        "/api/history",
        "Runs in a time range, by function, queue and worker",
        queries.HistoryQuery,
        history,
    ),
    Endpoint("/api/jobs", "Bulk changes and their progress", _NO_QUERY, jobs),
    Endpoint("/api/limits", "Limits and the tasks that hold them", _NO_QUERY, limits),
    Endpoint("/api/audit", "Actions of operators", queries.AuditQuery, audit),
    Endpoint("/api/storage", "The guarantees and settings of the storage", _NO_QUERY, storage),
)


def endpoint_handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The request handler of an endpoint."""

    async def handle(request: Request) -> Response:
        query = queries.parse_query(endpoint.query_type, request.query_params.multi_items())
        return json_response(await endpoint.handler(state_of(request), query, request.path_params))

    return handle


def action_handler(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The request handler of an action that is sent as JSON."""

    async def handle(request: Request) -> Response:
        body = await read_body(request)
        token = request.headers.get(TOKEN_HEADER, "")
        result = await perform_authorized(
            request, action, lambda: actions.parse_json(action, body), token
        )
        return json_response(plain(result))

    return handle


def json_response(value: Any, status: int = 200) -> Response:
    """A response with the value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
