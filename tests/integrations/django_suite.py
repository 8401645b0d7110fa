"""Django's own tests of its tasks framework, run against omniq's backend.

    python -m tests.integrations.django_suite PATH

PATH is an unpacked source distribution of Django 6 (`pip download --no-binary :all: --no-deps django`);
nothing of it is copied. Its tests name Django's two backends: `DummyBackend`, which stores tasks and
runs none, and `ImmediateBackend`, which runs a task while it is enqueued. Here both names stand for
omniq's backend: `StoredTasks` has no worker, and `FinishedTasks` waits until a worker has run the task.
A test that states what Django's own backend cannot do is skipped, with its reason printed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import unittest
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from omniq.errors import TaskFailed

MODULES = ("test_tasks", "test_dummy_backend", "test_immediate_backend")
FRAMEWORK = "django.tasks.backends"
TIMEOUT = 10.0

SKIPPED = {
    "test_custom_backend": "tests Django's base class with two backends that it defines itself",
    "DummyBackendTestCase.test_refresh_result": "changes the dummy's list in memory",
    "DummyBackendTestCase.test_refresh_result_async": "changes the dummy's list in memory",
    "ImmediateBackendTestCase.test_cannot_get_result": "omniq can",
    "ImmediateBackendTestCase.test_cannot_refresh_result": "omniq can",
    "ImmediateBackendTestCase.test_cannot_pass_run_after": "omniq can",
    "ImmediateBackendTestCase.test_throws_keyboard_interrupt": "no task runs in the caller's thread",
}


def prepare(source: Path) -> None:
    """Set up Django from its source, with a storage in memory and without retries."""
    os.environ |= {"OMNIQ_URL": "memory://", "OMNIQ_DEFAULT_MAX_RETRIES": "0"}
    os.environ["OMNIQ_DEFAULT_TIMEOUT"] = str(TIMEOUT)
    sys.path[:0] = [str(source), str(source / "tests")]
    settings = import_module("django.conf").settings
    settings.configure(
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["omniq.integrations.django"],
        # The decorator asks the default backend for the class of a task.
        TASKS={"default": {"BACKEND": f"{FRAMEWORK}.dummy.DummyBackend", "QUEUES": []}},
    )
    backends = omniq_backends()
    for module, name in (("dummy", "DummyBackend"), ("immediate", "ImmediateBackend")):
        setattr(import_module(f"{FRAMEWORK}.{module}"), name, backends[name])
    import_module("django").setup()


def omniq_backends() -> dict[str, Any]:
    """Omniq's backend with what the tests use of Django's two."""
    backend = import_module("omniq.integrations.django.backend")

    class StoredTasks(backend.OmniqBackend):  # type: ignore[name-defined, misc]
        """Has what the tests use of `DummyBackend`: its list of stored tasks."""

        @property
        def results(self) -> list[Any]:
            return [self.get_result(task.id) for task in self.queue.list_tasks()]

        def clear(self) -> None:
            """Forget the storage in memory; the next use makes another."""
            for queue in backend._queues.values():
                queue.close()
            backend._queues.clear()

    class FinishedTasks(backend.OmniqBackend):  # type: ignore[name-defined, misc]
        """Returns from `enqueue` when a worker has run the task, as `ImmediateBackend` does."""

        def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
            result = super().enqueue(task, args, kwargs)
            with self.queue.worker(allow=["tasks"]), suppress(TaskFailed):
                self.queue.handle(result.id).result(timeout=TIMEOUT)
            result.refresh()
            return result

        async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
            # Not in asgiref's one thread, which asynchronous tasks need while this waits for them.
            return await asyncio.to_thread(self.enqueue, task, args, kwargs)

    return {"DummyBackend": StoredTasks, "ImmediateBackend": FinishedTasks}


def load(module: ModuleType) -> tuple[unittest.TestSuite, list[str]]:
    """The tests of a module that are about backends in general, and a line for each other one."""
    chosen, lines = unittest.TestSuite(), []
    for case in unittest.defaultTestLoader.loadTestsFromModule(module):
        assert isinstance(case, unittest.TestSuite)
        for test in case:
            assert isinstance(test, unittest.TestCase)
            name = test.id().partition(f"{module.__name__}.")[2]
            if name in SKIPPED:
                lines.append(f"skipped: {name}: {SKIPPED[name]}")
            else:
                chosen.addTest(test)
    return chosen, lines


def main(source: Path) -> int:
    """Run the tests; returns 1 if one fails."""
    prepare(source)
    suite, lines = (
        unittest.TestSuite(),
        [f"skipped: test_custom_backend: {SKIPPED['test_custom_backend']}"],
    )
    for name in MODULES:
        tests, skipped = load(import_module(f"tasks.{name}"))
        suite.addTest(tests)
        lines += skipped
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    lines.append(f"{result.testsRun} run, {len(result.failures) + len(result.errors)} failed")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
