"""The JSON API: the same answers and the same actions as the pages, for programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omniq.dashboard import actions, queries
from omniq.dashboard.app_state import Desk, desk_of
from omniq.dashboard.authorization import TOKEN_HEADER, body_of, change
from omniq.operations.doctor import promises_of
from omniq.operations.explain import explain
from omniq.operations.task_detail import task_detail
from omniq.storage.health import breakers_of
from omniq.to_json import plain


class Endpoint(msgspec.Struct, frozen=True):
    """Something a program can ask. `takes` are its query parameters."""

    path: str
    summary: str
    takes: type[msgspec.Struct]
    answer: Callable[[Desk, Any, dict[str, str]], Awaitable[Any]]


async def overview(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    look = await desk.sampler.current()
    shown = plain(look.overview)
    shown["failures"] = [queries.shown_letter(letter) for letter in look.overview.failures]
    return shown


async def tasks(desk: Desk, asked: queries.TasksQuestion, path: dict[str, str]) -> Any:
    page = await queries.answer_tasks(desk, asked)
    return {
        "tasks": [queries.shown_task(task) for task in page.tasks],
        "cursor": page.cursor,
        "is_cut": page.is_cut,
    }


async def task(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return queries.shown_detail(await task_detail(desk.storage, path["task_id"]))


async def explanation(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return plain(await explain(desk.storage, path["task_id"]))


async def dead(desk: Desk, asked: queries.DeadQuestion, path: dict[str, str]) -> Any:
    letters = await queries.answer_dead(desk, asked)
    return {
        "dead": [queries.shown_letter(letter) for letter in letters],
        "after": letters[-1].task_id if len(letters) == asked.limit else None,
    }


async def groups(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    return plain(await queries.answer_groups(desk))


async def workers(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await queries.answer_workers(desk)
    return {"workers": [queries.shown_worker(view) for view in found]}


async def queues(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    look = (await desk.sampler.current()).overview
    return {"queues": plain(look.queues), "counted_at": plain(look.counted_at)}


async def schedules(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await queries.answer_schedules(desk)
    return {"schedules": [queries.shown_schedule(view) for view in found]}


async def breakers(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await desk.once("breakers", lambda: breakers_of(desk.storage))
    return {"breakers": plain(found)}


async def storage(desk: Desk, asked: queries.Nothing, path: dict[str, str]) -> Any:
    found = await desk.once("promises", lambda: promises_of(desk.storage))
    return {"promises": plain(found), "settings": desk.storage.settings.shown()}


_ALL = queries.Nothing

ENDPOINTS = (
    Endpoint("/api/overview", "How it goes", _ALL, overview),
    Endpoint("/api/tasks", "A page of tasks, newest first", queries.TasksQuestion, tasks),
    Endpoint("/api/tasks/{task_id}", "All that is known of a task", _ALL, task),
    Endpoint("/api/tasks/{task_id}/explanation", "Why it does not run", _ALL, explanation),
    Endpoint("/api/dead", "A page of dead letters", queries.DeadQuestion, dead),
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
        asked = queries.asked(endpoint.takes, request.query_params.multi_items())
        return as_json(await endpoint.answer(desk_of(request), asked, request.path_params))

    return handle


def acting(action: actions.Action) -> Callable[[Request], Awaitable[Response]]:
    """The handler of an action that a program asks for."""

    async def handle(request: Request) -> Response:
        body = await body_of(request)
        token = request.headers.get(TOKEN_HEADER, "")
        done = await change(request, action, lambda: actions.told_by_json(action, body), token)
        return as_json(plain(done))

    return handle


def as_json(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
