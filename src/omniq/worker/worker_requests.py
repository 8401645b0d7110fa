"""What a worker does about the requests that operators have stored for it: `queue.workers.stop`, `.set_slots` and `.ping`."""

from __future__ import annotations

from omniq.errors import FunctionNotFound
from omniq.storage.base import BaseStorage
from omniq.storage.types import WorkerAnswer
from omniq.tasks.functions import FunctionCache
from omniq.worker.pool_events import PoolEvents

_LONGEST_ANSWER = 4_000
"""Characters of the names in an answer."""


class WorkerRequests:
    """Follows the requests to one worker. In the heartbeat's thread, over its connection."""

    def __init__(self, functions: FunctionCache, pool: PoolEvents) -> None:
        self._functions = functions
        self._pool = pool

    async def follow(self, storage: BaseStorage) -> None:
        """Read the requests to the owner of this storage, and do what they ask for."""
        pings = []
        for request in await storage.take_requests():
            if request.action == "ping":
                pings.append(request)
            elif request.action == "slots":
                self._pool.on_slots_request(request.slots)
            else:
                self._pool.on_stop_request(restart=request.action == "restart")
        # Last: an answer that cannot be stored must not cost a stop, since requests are read once.
        for request in pings:
            await storage.answer_request(request, answer_of(self._functions))


def answer_of(functions: FunctionCache) -> WorkerAnswer:
    """The modules and functions of a worker, as many names as an answer may have."""
    # It searches modules, and is needed for an answer only.
    from omniq.worker.process.start_report import functions_of

    functions.refresh_sometimes()
    runnable = functions.runnable
    modules = None if functions.is_open else runnable.modules
    found = {path for paths in functions_of(modules or ()).values() for path in paths}
    found.update(name for name in runnable.names if _is_here(functions, name))
    names, size = sorted(found), 0
    shown = 0
    for name in names:
        size += len(name)
        if size > _LONGEST_ANSWER:
            break
        shown += 1
    return WorkerAnswer(modules, tuple(names[:shown]), len(names) - shown)


def _is_here(functions: FunctionCache, name: str) -> bool:
    try:
        functions.resolve(name)
    except FunctionNotFound:
        return False
    return True
