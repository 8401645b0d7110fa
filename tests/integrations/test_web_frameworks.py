"""Each web framework example is started and serves a request that runs a task."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integrations.conftest import Start
from tests.integrations.programs import fetch, fetch_json, free_port

pytestmark = pytest.mark.timeout(120)

URL = r"(http://127\.0\.0\.1:\d+)"


def test_fastapi_runs_tasks_that_its_handlers_enqueue(start: Start) -> None:
    server = start("web", "-m", "uvicorn", "fastapi_app:app", "--port", "0")
    url = server.wait_for(URL)[1]

    created = fetch_json(f"{url}/thumbnails?picture=cat.png", method="POST")
    finished = fetch_json(f"{url}/thumbnails/{created['id']}")

    assert finished == {"status": "success", "name": "cat-200.png"}
    assert fetch(f"{url}/thumbnails/unknown")[0] == 404
    server.stop()
    assert "Application shutdown complete" in "".join(server.output)


def test_starlette_enqueues_and_mounts_the_dashboard(start: Start) -> None:
    start("web", "-m", "omniq", "worker", "web_tasks")
    secret = "0123456789abcdef0123456789abcdef"
    server = start(
        "web",
        *("-m", "uvicorn", "starlette_app:app", "--port", "0"),
        OMNIQ_DASHBOARD_OPERATOR=secret,
    )
    url = server.wait_for(URL)[1]

    greeted = fetch_json(f"{url}/greet/ann", method="POST")
    status, page = fetch(f"{url}/omniq/tasks/{greeted['id']}", Authorization=f"Bearer {secret}")

    assert greeted["said"] == "welcome, ann"
    assert (status, "web_tasks.welcome" in page) == (200, True)


def test_flask_enqueues_a_task_that_a_worker_runs(start: Start) -> None:
    start("web", "-m", "omniq", "worker", "web_tasks")
    server = start("web", "-m", "flask", "--app", "flask_app", "run", "--port", "0")
    url = server.wait_for(URL)[1]

    welcomed = fetch_json(f"{url}/welcome/ann", method="POST")

    assert welcomed["said"] == "welcome, ann"


def test_django_enqueues_its_tasks_and_a_worker_runs_them(start: Start, tmp_path: Path) -> None:
    shop = {"SHOP_DB": str(tmp_path / "shop.db")}
    worker = start("django_shop", "manage.py", "omniq_worker", "--processes", "2", **shop)
    worker.wait_for("worker.started")
    port = free_port()
    server = start("django_shop", "manage.py", "runserver", "--noreload", str(port), **shop)
    server.wait_for("Quit the server")

    url = f"http://127.0.0.1:{port}"
    ids = fetch_json(f"{url}/parcels/7", method="POST")
    for _ in ids:
        worker.wait_for("task.succeeded")
    results = {name: fetch_json(f"{url}/results/{task_id}") for name, task_id in ids.items()}

    assert results["parcel"] == {
        "status": "SUCCESSFUL",
        "value": "parcel for order 7",
        "attempts": 1,
    }
    assert results["count"]["value"] == 8


def test_the_django_worker_has_the_options_of_omniq_worker(start: Start, tmp_path: Path) -> None:
    shop = {"SHOP_DB": str(tmp_path / "shop.db")}
    options = ("--burst", "--shutdown-timeout", "7", "--metrics-port", "0", "--log-level", "info")
    worker = start("django_shop", "manage.py", "omniq_worker", *options, **shop)
    worker.wait_for("running tasks have 7 s to finish")
    worker.wait_for("left=0")

    reloading = start("django_shop", "manage.py", "omniq_worker", "--reload", "--burst", **shop)
    reloading.wait_for("either burst or reload")


ROLLED_BACK = """
import django
django.setup()
from django.db import transaction
from shop.tasks import send_parcel
backend = send_parcel.get_backend()
try:
    with transaction.atomic():
        rolled_back = send_parcel.enqueue(1)
        raise KeyError
except KeyError:
    stored = send_parcel.using(priority=9).enqueue(2)
print([task.id == stored.id for task in backend.queue.list_tasks()])
found = send_parcel.get_result(stored.id)
print(found.status, found.task.priority, found.args, found.attempts, found.errors)
print(backend.queue.get_task(stored.id).max_retries, found == stored)
try:
    send_parcel.get_result(rolled_back.id)
except Exception as error:
    print(type(error).__name__)
backend.queue.close()
"""


def test_a_django_task_of_a_rolled_back_transaction_is_not_stored(
    start: Start, tmp_path: Path
) -> None:
    shop = {"SHOP_DB": str(tmp_path / "shop.db"), "DJANGO_SETTINGS_MODULE": "shop.settings"}
    script = start("django_shop", "-c", ROLLED_BACK, **shop)

    script.wait_for("TaskResultDoesNotExist")
    assert script.output[:3] == ["[True]\n", "READY 9 [2] 0 []\n", "5 True\n"]


NOT_JSON = """
import django
django.setup()
from omniq.integrations.django.backend import signals
from odd import odd
finished = []
def note(task_result, **_):
    finished.append(task_result.status)
signals.task_finished.connect(note)
queue = odd.get_backend().queue
result = odd.enqueue()
with queue.worker(allow=["odd"]):
    try:
        queue.handle(result.id).result(timeout=20)
    except Exception as error:
        print(type(error).__name__)
result.refresh()
print(result.status, result.attempts, [str(status) for status in finished])
print(result.errors[0].exception_class, result.errors[0].traceback.splitlines()[-1])
queue.close()
"""


def test_a_django_task_that_returns_no_json_fails_once_and_its_signal_says_so(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(
        "from shop.tasks import task\n\n\n@task\ndef odd():\n    return {1, 2}\n"
    )
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shop = {"SHOP_DB": str(tmp_path / "shop.db"), "DJANGO_SETTINGS_MODULE": "shop.settings"}
    script = start("django_shop", "-c", NOT_JSON, PYTHONPATH=python_path, **shop)

    script.wait_for("TaskFailed")
    script.wait_for("FAILED 1 .*'FAILED'")
    script.wait_for("TypeError.*TypeError: Unsupported type")


PLANTED = """
import sys
import django
django.setup()
from omniq.integrations.django import backend
from omniq.models import Task
framework = __import__(backend.FRAMEWORK, fromlist=["task_backends"])
queue = framework.task_backends["default"].queue
paths = ["unittest.__main__.main", "antigravity.geohash", "planted.f", "shop.tasks", "os.system"]
ids = [queue._portal.run(queue.storage.enqueue(Task(func_path=path))) for path in paths]
for task_id in ids:
    try:
        framework.task_backends["default"].get_result(task_id)
    except backend._exceptions.TaskResultDoesNotExist:
        print("unknown")
# The class of a stored error, which Django imports when it is asked for.
names = ["antigravity.geohash", "planted.Error", "ValueError", "json.decoder.JSONDecodeError", "Own"]
print([backend._exception_path(name) for name in names])
print([name for name in ("unittest.__main__", "antigravity", "planted") if name in sys.modules])
queue.close()
"""


@pytest.mark.security("S34")
def test_django_imports_no_module_that_a_row_names(start: Start, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    shop = {
        "SHOP_DB": str(tmp_path / "shop.db"),
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(tmp_path)]),
    }
    script = start("django_shop", "-c", PLANTED, **shop)

    script.wait_for(r"\[\]")
    assert script.output[:5] == ["unknown\n"] * 5
    assert eval(script.output[5]) == [
        *("builtins.Exception", "builtins.Exception"),
        *("builtins.ValueError", "json.decoder.JSONDecodeError", "Own"),
    ]
