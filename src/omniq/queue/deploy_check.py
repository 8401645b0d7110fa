"""`queue.check`: imports modules as a worker does, and compares what is stored with their functions."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.errors import InvalidTask
from omniq.operations.bulk_actions import OnProgress, no_progress
from omniq.operations.check import CheckReport, check_stored
from omniq.scheduling.schedules import AsyncSchedules
from omniq.storage import BaseStorage
from omniq.tasks.functions import FunctionCache
from omniq.worker.process.module_import import import_with_tasks, loaded_below


async def check_deploy(
    storage: BaseStorage,
    schedules: AsyncSchedules,
    modules: Sequence[str] | None,
    *,
    dead: bool = True,
    on_progress: OnProgress = no_progress,
) -> CheckReport:
    """What a worker with these modules cannot run. Without modules, one that runs what is imported here.

    Raises `SettingsError` for a module that cannot be imported, and for a name that two functions have.
    """
    if isinstance(modules, str):
        raise InvalidTask(f"modules={modules!r}: expected a list, such as [{modules!r}]")
    declarations = None
    for name in modules or ():
        import_with_tasks(name)
    functions = FunctionCache(modules)
    functions.refresh()
    functions.check_names()
    if modules is not None:
        # As a worker with these modules does when it starts.
        declarations = await schedules.preview(*loaded_below(modules))
    return await check_stored(
        storage, functions, declarations=declarations, dead=dead, on_progress=on_progress
    )
