"""Reads of tasks and dead letters that may take long: a page shows what is there after a short time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

import msgspec

from omniq.dashboard.app_state import AppState
from omniq.dashboard.queries import DeadQuery, TasksQuery, search_of
from omniq.models import DeadLetter
from omniq.operations.dead_groups import DeadGroups, dead_groups, group_of
from omniq.operations.find_tasks import PATIENCE, find_tasks
from omniq.operations.newest import dead_newest_first, newest_tasks, position_of
from omniq.operations.run_history import known_names
from omniq.operations.search_query import TaskSearch
from omniq.operations.task_match import TaskPage
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import OTHERS

_SAMPLED_TASKS = 300
_FUNCTIONS_MAX_AGE = 30.0
_GROUPS_MAX_AGE = 10.0


class DeadPage(msgspec.Struct, frozen=True):
    """Some dead letters. `after` starts the next page; `is_cut`: the search stopped early, at `reached`."""

    letters: tuple[DeadLetter, ...]
    after: str | None
    is_cut: bool
    reached: datetime | None


async def list_tasks_page(state: AppState, query: TasksQuery) -> TaskPage:
    """A page of tasks."""
    wanted = search_of(state, query)

    return await state.cached(query, _task_search(state, query, wanted))


async def search_tasks(
    state: AppState, query: TasksQuery, patience: float
) -> tuple[TaskPage, bool]:
    """A page of tasks, and whether the search still runs after `patience` seconds."""
    read = _task_search(state, query, search_of(state, query))
    return await state.soon(query, read, TaskPage((), None, False), patience=patience)


def _task_search(
    state: AppState, query: TasksQuery, wanted: TaskSearch
) -> Callable[[], Awaitable[TaskPage]]:
    async def read() -> TaskPage:
        async with state.searches.use() as storage:
            exact = await _exact_function(state, wanted)
            return await find_tasks(storage, exact, limit=query.limit, cursor=query.cursor)

    return read


async def _exact_function(state: AppState, wanted: TaskSearch) -> TaskSearch:
    """The search with the full path, if one known function matches: storages find that much faster."""
    if not wanted.function or wanted.func_path is not None:
        return wanted
    part = wanted.function.lower()
    names = await known_functions(state)
    return (
        msgspec.structs.replace(wanted, func_path=wanted.function)
        if [name for name in names if part in name.lower()] == [wanted.function]
        else wanted
    )


async def list_dead_page(state: AppState, query: DeadQuery) -> DeadPage:
    """A page of dead letters, latest failure first."""
    return await state.cached(query, lambda: _search_dead(state, query))


async def search_dead(state: AppState, query: DeadQuery, patience: float) -> tuple[DeadPage, bool]:
    """A page of dead letters, and whether the search still runs after `patience` seconds."""
    empty = DeadPage((), None, False, None)
    return await state.soon(query, lambda: _search_dead(state, query), empty, patience=patience)


async def _search_dead(state: AppState, query: DeadQuery) -> DeadPage:
    async with state.searches.use() as storage:
        return await _read_dead_page(storage, query)


async def _read_dead_page(storage: BaseStorage, query: DeadQuery) -> DeadPage:
    deadline, found, read = storage.clock.monotonic() + PATIENCE, list[DeadLetter](), 0
    letters = dead_newest_first(
        storage,
        func_path=query.function,
        task_type=query.type,
        reason=query.reason,
        before=query.after or "",
    )
    async for letter in letters:
        read += 1
        if dead_matches(letter, query):
            found.append(letter)
        is_late = storage.clock.monotonic() >= deadline
        if len(found) == query.limit or is_late:
            is_cut = len(found) < query.limit
            return DeadPage(tuple(found), position_of(letter), is_cut, letter.last_failure)
    return DeadPage(tuple(found), None, False, None)


def dead_matches(letter: DeadLetter, query: DeadQuery) -> bool:
    """Whether a dead letter belongs to the group and has the text."""
    return (query.group is None or group_of(letter) == query.group) and (
        query.error.lower() in letter.error_details.lower()
    )


async def list_dead_groups(state: AppState) -> DeadGroups:
    """The dead letters by error, read every few seconds."""
    return await state.cached("groups", lambda: _read_groups(state), max_age=_GROUPS_MAX_AGE)


async def groups_soon(state: AppState, patience: float) -> tuple[DeadGroups, bool]:
    """The dead letters by error, and whether they are still read after `patience` seconds."""
    empty = DeadGroups((), 0, False)
    return await state.soon(
        "groups", lambda: _read_groups(state), empty, max_age=_GROUPS_MAX_AGE, patience=patience
    )


async def _read_groups(state: AppState) -> DeadGroups:
    async with state.searches.use() as storage:
        return await dead_groups(storage)


async def functions_soon(state: AppState, patience: float) -> list[str]:
    """The known functions; none if they are still read."""
    names, _ = await state.soon(
        "functions",
        lambda: _read_functions(state),
        list[str](),
        max_age=_FUNCTIONS_MAX_AGE,
        patience=patience,
    )
    return names


async def known_functions(state: AppState) -> list[str]:
    """The functions that had a run in the last 30 days, and those of the newest tasks; cached."""
    return await state.cached(
        "functions", lambda: _read_functions(state), max_age=_FUNCTIONS_MAX_AGE
    )


async def _read_functions(state: AppState) -> list[str]:
    async with state.searches.use() as storage:
        functions, _ = await known_names(storage)
        tasks = await newest_tasks(storage, _SAMPLED_TASKS)
    return sorted({*functions, *(task.func_path for task in tasks)} - {OTHERS})
