"""A gate that others empty while a step is about to park a task under it."""

from __future__ import annotations

from typing import Any

import pytest

from omniq.models import Limit
from omniq.storage.backend import Changes, Section
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, some_tasks


async def claimed_beside_an_emptied_gate(
    storage: BaseStorage,
    another: BaseStorage,
    section: type[Section],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Have `another` empty the gate just before `storage` writes; returns what is claimed then."""
    one = (Limit(key="k", max_running=1),)
    await storage.enqueue_many(some_tasks("ab", limits=one))
    (first,) = await another.reserve(2)
    await storage.enqueue(a_task("c", limits=one))
    write: Any = section.write

    async def delayed(opened: Section, changes: Changes) -> Any:
        monkeypatch.undo()
        await another.mark_done("a", a_result(first))
        (second,) = await another.reserve(1)
        await another.mark_done("b", a_result(second))
        return await write(opened, changes)

    monkeypatch.setattr(section, "write", delayed)
    claimed = [*await storage.reserve(5), *await another.reserve(5)]
    return [task.id for task in claimed]
