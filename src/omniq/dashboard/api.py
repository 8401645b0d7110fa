"""The JSON API: the same answers and the same actions as the pages, for programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omniq.dashboard import actions, queries
from omniq.dashboard.app_state import AppState, state_of
from omniq.dashboard.authorization import TOKEN_HEADER, body_of, change
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.operations.task_detail import task_detail
from omniq.storage.health import breakers_of
from omniq.to_json import plain


class Endpoint(msgspec.Struct, frozen=True):
    """Something a program can ask. `takes` are its query parameters."""

    path: str
    summary: str
    takes: type[msgspec.Struct]
    answer: Callable[[AppState, Any, dict[str, str]], Awaitable[Any]]


async def overview(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    look = await state.sampler.current()
    shown = plain(look.overview)
    shown["failures"] = [queries.dead_letter_json(letter) for letter in look.overview.failures]
    return shown


async def tasks(state: AppState, asked: queries.TasksQuery, path: dict[str, str]) -> Any:
    page = await queries.list_tasks_page(state, asked)
    return {
        "tasks": [queries.task_json(task) for task in page.tasks],
        "cursor": page.cursor,
        "is_cut": page.is_cut,
    }


async def task(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return queries.detail_json(await task_detail(state.storage, path["task_id"]))


async def explanation(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return plain(await explain(state.storage, path["task_id"]))


async def dead(state: AppState, asked: queries.DeadQuery, path: dict[str, str]) -> Any:
    letters = await queries.list_dead_page(state, asked)
    return {
        "dead": [queries.dead_letter_json(letter) for letter in letters],
        "after": letters[-1].task_id if len(letters) == asked.limit else None,
    }


async def groups(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return plain(await queries.list_dead_groups(state))


async def workers(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await queries.list_workers(state)
    return {"workers": [queries.worker_json(view) for view in found]}


async def queues(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    look = (await state.sampler.current()).overview
    return {"queues": plain(look.queues), "counted_at": plain(look.counted_at)}


async def schedules(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await queries.list_schedules(state)
    return {"schedules": [queries.schedule_json(view) for view in found]}


async def breakers(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await state.once("breakers", lambda: breakers_of(state.storage))
    return {"breakers": plain(found)}


async def storage(state: AppState, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await state.once("promises", lambda: check_storage(state.storage))
    return {"promises": plain(found), "settings": state.storage.settings.shown()}


_ALL = queries.Nothing

ENDPOINTS = (
    Endpoint("/api/overview", "How it goes", _ALL, overview),
    Endpoint("/api/tasks", "A page of tasks, newest first", queries.TasksQuery, tasks),
    Endpoint("/api/tasks/{task_id}", "All that is known of a task", _ALL, task),
    Endpoint("/api/tasks/{task_id}/explanation", "Why it does not run", _ALL, explanation),
    Endpoint("/api/dead", "A page of dead letters", queries.DeadQuery, dead),
    Endpoint("/api/dead/groups", "Dead letters by function and reason", _ALL, groups),
    Endpoint("/api/workers", "Workers and what they run", _ALL, workers),
    Endpoint("/api/queues", "Queues", _ALL, queues),
    Endpoint("/api/schedules", "Schedules and their next times", _ALL, schedules),
    Endpoint("/api/breakers", "Circuit breakers", _ALL, breakers),
    Endpoint("/api/storage", "What this storage promises", _ALL, storage),
)


def asking(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The handler of an endpoint."""

    async def handle(request: Request) -> Response:
        asked = queries.parse_query(endpoint.takes, request.query_params.multi_items())
        return as_json(await endpoint.answer(state_of(request), asked, request.path_params))

    return handle


def acting(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The handler of an action that a program asks for."""

    async def handle(request: Request) -> Response:
        body = await body_of(request)
        token = request.headers.get(TOKEN_HEADER, "")
        done = await change(request, action, lambda: actions.parse_json(action, body), token)
        return as_json(plain(done))

    return handle


def as_json(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
