"""`lifespan(worker=[package])` runs the tasks and schedules of the modules below the package."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from omniq import AsyncTaskQueue, SettingsError
from omniq.integrations.asgi import lifespan
from omniq.storage.memory import MemoryStorage

JOBS = """
from omniq import task

@task(name="asgi_shop.work", cron="0 3 * * *")
def work(): return "done"
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    (tmp_path / "asgi_shop").mkdir()
    (tmp_path / "asgi_shop" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "asgi_shop"
    for name in [name for name in sys.modules if name.startswith("asgi_shop")]:
        del sys.modules[name]


async def test_modules_below_a_package_run_with_their_schedules(shop):
    (shop / "jobs.py").write_text(JOBS)
    queue = AsyncTaskQueue(MemoryStorage())
    async with lifespan(queue, worker=["asgi_shop"])(SimpleNamespace(state=SimpleNamespace())):
        handle = await queue.enqueue("asgi_shop.work")
        schedules = [schedule.id for schedule in await queue.schedules.list()]

        assert await handle.result(timeout=20) == "done"
    assert schedules == ["asgi_shop.work"]


async def test_a_module_below_that_cannot_be_imported_stops_the_start(shop):
    (shop / "jobs.py").write_text(JOBS + "\nimport nowhere_to_be_found\n")
    app = SimpleNamespace(state=SimpleNamespace())
    with pytest.raises(SettingsError, match=r"asgi_shop\.jobs cannot be imported"):
        async with lifespan(AsyncTaskQueue(MemoryStorage()), worker=["asgi_shop"])(app):
            pass
