"""What `omniq worker` says when it starts: where its tasks are, what it runs, and likely mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import FunctionType

from omniq.errors import FunctionNotFound
from omniq.storage import BaseStorage
from omniq.storage.urls import local_path
from omniq.tasks.function_lookup import MARKED, is_refused
from omniq.tasks.functions import FunctionCache, options_of
from omniq.text.masking import mask_url

_MOST_NAMES = 10


def address(url: str) -> str:
    """The URL of a storage as people may see it: without passwords, and with an absolute path.

    >>> address("redis://me:secret@host/0"), address("sqlite:////srv/tasks.db?durability=os")
    ('redis://me:***@host/0', 'sqlite:////srv/tasks.db?durability=os')
    """
    shown = mask_url(url)
    path = local_path(url)
    if path is None:
        return shown
    slashes = "///" if url.lower().startswith("sqlite") else "//"
    query = shown.partition("?")[2]
    return f"{url.partition(':')[0]}:{slashes}{path.absolute()}" + (f"?{query}" if query else "")


def functions_of(modules: Sequence[str]) -> dict[str, list[str]]:
    """The paths of the functions that a worker of these modules can run, by module."""
    cache = FunctionCache(modules)
    marked = MARKED.search()
    return {
        name: sorted(
            path
            for path in {*_public_functions(name), *_below(name, marked)}
            if _can_run(cache, path)
        )
        for name in modules
    }


def queues_of(paths: Iterable[str], modules: Sequence[str]) -> set[str]:
    """The queues that the options of these functions name."""
    cache = FunctionCache(modules)
    return {options_of(cache.resolve(path)).queue or "default" for path in paths}


def names_of(paths: Iterable[str], modules: Sequence[str]) -> list[str]:
    """The names of these functions, where they have one: the log and dead letters show that."""
    cache = FunctionCache(modules)
    return [options_of(cache.resolve(path)).name or path for path in paths]


def summary(names: Sequence[str]) -> str:
    """How many there are, and the first of them.

    >>> summary(["b.f", "a.f"]), summary([])
    ('2 (a.f, b.f)', 'none')
    """
    shown = sorted(names)[:_MOST_NAMES]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{len(names)} ({', '.join(shown)}{more})" if names else "none"


def how_to_stop(timeout: float) -> str:
    """What a person does to end the worker."""
    return (
        f"Ctrl-C or SIGTERM: running tasks have {timeout:g} s to finish; a second one ends it now"
    )


def module_advice(functions: dict[str, list[str]]) -> list[str]:
    """A sentence for each module without a function that can run."""
    return [
        f"functions of {name} are never run, since it is not written for tasks; name your own module"
        if is_refused(name)
        else f"module {name} has no function that a worker can run; mark one with @task, or name "
        "another module"
        for name, paths in functions.items()
        # Integrations name a module of omniq that sets them up.
        if not paths and not name.startswith("omniq.")
    ]


async def queue_advice(
    storage: BaseStorage, queues: Sequence[str] | None, filled: set[str]
) -> list[str]:
    """A sentence for each queue that nothing seems to fill: no task on record, no function, no schedule."""
    advice = []
    for name in queues or ():
        if name in filled or await storage.list_tasks(queue=name, limit=1):
            continue
        known = {*filled, *(await storage.stats()).by_queue}
        near = get_close_matches(name, sorted(known), n=1)
        hint = f"did you mean {near[0]}?" if near else "check its name"
        advice.append(
            f"queue {name}: nothing fills it yet; no task on record, no schedule and no function of "
            f"this worker names it; {hint}"
        )
    return advice


def _public_functions(name: str) -> list[str]:
    contents = vars(sys.modules[name]) if name in sys.modules else {}
    return [
        f"{name}.{attribute}"
        for attribute, value in list(contents.items())
        if type(value) is FunctionType and value.__module__ == name
    ]


def _below(name: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.startswith(f"{name}.")]


def _can_run(cache: FunctionCache, path: str) -> bool:
    try:
        cache.resolve(path)
    except FunctionNotFound:
        return False
    return True
