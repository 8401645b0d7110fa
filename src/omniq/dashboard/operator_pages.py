"""The pages on which operators act: bulk changes, jobs, limits and breakers, new tasks, the audit log."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omniq.dashboard import bulk_jobs, queries, schedule_form, searches
from omniq.dashboard.app_state import state_of
from omniq.dashboard.jobs import VERBS, Verb
from omniq.dashboard.rendering import page
from omniq.operations.limits import limits_of

_TASK_VERBS: tuple[Verb, ...] = ("retry", "cancel", "run-now", "delete")
_DEAD_VERBS: tuple[Verb, ...] = ("retry-dead", "delete-dead")


async def bulk_tasks(request: Request) -> Response:
    """The number of tasks that match, and the actions on all of them."""
    query = queries.parse_query(queries.TasksQuery, request.query_params.multi_items())
    return await _bulk(
        request, query, _TASK_VERBS, "/tasks", {"q": query.q, "status": query.status}
    )


async def bulk_dead(request: Request) -> Response:
    """The number of dead letters that match, and the actions on all of them."""
    query = queries.parse_query(queries.DeadQuery, request.query_params.multi_items())
    fields = {
        "group": query.group,
        "function": query.function,
        "type": query.type,
        "reason": query.reason,
        "error": query.error,
    }
    return await _bulk(request, query, _DEAD_VERBS, "/dead", fields)


async def _bulk(
    request: Request,
    query: bulk_jobs.Query,
    verbs: tuple[Verb, ...],
    path: str,
    fields: dict[str, Any],
) -> Response:
    state = state_of(request)
    await state.sampler.current()
    given = {name: str(value) for name, value in fields.items() if value}
    matches = await bulk_jobs.count_matches(state, query) if given else bulk_jobs.Matches(0, True)
    prefix = "bulk" if path == "/tasks" else "dead"
    return page(
        request,
        "bulk.html",
        matches=matches,
        fields=given,
        path=path,
        noun="task" if path == "/tasks" else "dead letter",
        buttons=[
            (
                f"{prefix}/{verb.removesuffix('-dead')}",
                VERBS[verb][0],
                verb.startswith("delete"),
            )
            for verb in verbs
        ],
    )


async def jobs(request: Request) -> Response:
    """The changes that run in the background, and those that have ended."""
    state = state_of(request)
    await state.sampler.current()
    return page(request, "jobs.html", jobs=state.jobs.list())


async def job(request: Request) -> Response:
    """One change: its progress, and why tasks were refused."""
    state = state_of(request)
    await state.sampler.current()
    found = state.jobs.get(request.path_params["job_id"])
    if found is None:
        raise HTTPException(
            404, "this dashboard has no such job; a restart deletes the list of jobs"
        )
    return page(request, "jobs.html", jobs=[found])


async def limits(request: Request) -> Response:
    """Running limits, rate limits and circuit breakers, with the tasks that hold them."""
    state = state_of(request)
    snapshot = await state.sampler.current()
    found = await state.cached("limits", lambda: limits_of(state.storage))
    return page(request, "limits.html", limits=found, breakers=snapshot.overview.breakers)


async def enqueue(request: Request) -> Response:
    """The form for a new task."""
    state = state_of(request)
    await state.sampler.current()
    functions = await searches.known_functions(state)
    return page(
        request,
        "enqueue.html",
        functions=functions,
        chosen=request.query_params.get("function", ""),
    )


async def audit(request: Request) -> Response:
    """The actions of operators, newest first."""
    state = state_of(request)
    await state.sampler.current()
    query = queries.parse_query(queries.AuditQuery, request.query_params.multi_items())
    entries, after = await state.storage.audit_log(query.after, query.limit)
    return page(request, "audit.html", entries=entries, after=after)


ROUTES = tuple(
    Route(path, handler, methods=["GET"])
    for path, handler in (
        ("/tasks/matching", bulk_tasks),
        ("/tasks/new", enqueue),
        ("/dead/matching", bulk_dead),
        ("/jobs", jobs),
        ("/jobs/{job_id}", job),
        ("/limits", limits),
        ("/schedules/new", schedule_form.edit_schedule),
        ("/schedules/{schedule_id}/edit", schedule_form.edit_schedule),
        ("/audit", audit),
    )
)
