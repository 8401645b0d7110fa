"""The examples of other queues, ported: each does the same in no more code, with a real worker."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import asyncpg
import pytest

from tests.integrations.programs import TIMEOUT, Program, fetch_json

PORTS = Path(__file__).parents[2] / "examples" / "ports"

LINES = {
    "celery_first_steps": 15,
    "celery_next_steps": 40,
    "arq_main": 25,
    "rq_main": 15,
    "dramatiq_guide": 73,
    "huey_guide": 42,
    "fastapi_pool": 36,
    "django_project": 40,
}
"""The lines of code of each original, counted as in `lines_of_code`; `examples/ports/README.md` says what of."""

pytestmark = pytest.mark.timeout(120)


def lines_of_code(source: str) -> int:
    """Lines that have code: blank lines, comments and docstrings do not count."""
    tree = ast.parse(source)
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in texts
        for number, line in lines
    )


@pytest.mark.parametrize("name", LINES)
def test_a_port_is_no_longer_than_its_original(name: str) -> None:
    files = sorted((PORTS / name).rglob("*.py"))

    written = sum(lines_of_code(file.read_text(encoding="utf-8")) for file in files)

    assert 0 < written <= LINES[name]


def test_every_port_is_listed_with_its_length() -> None:
    page = (PORTS / "README.md").read_text(encoding="utf-8")

    assert {folder.name for folder in PORTS.iterdir() if folder.is_dir()} == LINES.keys()
    for name, lines in LINES.items():
        assert f"`{name}`" in page
        assert f"| {lines} |" in page


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"four words of text")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    """The address of a web site whose pages have four words."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@dataclass
class Port:
    """A copy of a port, in which a local web site stands for example.org."""

    folder: Path
    worker: Program | None = None

    def start_worker(self, *command: str, **environment: str) -> Program:
        self.worker = Program(command, self.folder, **environment)
        return self.worker

    def run(self, script: str, **environment: str) -> list[str]:
        program = Program([script], self.folder, **environment)
        code = program.wait()
        assert code == 0, "".join(program.output)
        return [line.rstrip("\n") for line in program.output]


@pytest.fixture
def port(request: pytest.FixtureRequest, tmp_path: Path, site: str) -> Iterator[Port]:
    folder = tmp_path / "port"
    shutil.copytree(PORTS / request.param, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text().replace("https://example.org", site))
    made = Port(folder)
    yield made
    if made.worker is not None:
        assert made.worker.stop() == 0, "".join(made.worker.output)


IN_MAKE_TEST = {"celery_first_steps", "arq_main"}


def on(name: str) -> pytest.MarkDecorator:
    marks = () if name in IN_MAKE_TEST else pytest.mark.deep
    port = pytest.param(name, marks=marks, id=name)
    return pytest.mark.parametrize("port", [port], indirect=True)


@on("celery_first_steps")
def test_celery_first_steps(port: Port) -> None:
    port.start_worker("-m", "omniq", "worker", "tasks", "--queues", "low-priority")

    status, result = port.run("main.py")

    assert status in ("pending", "running", "success")
    assert result == "8"


@on("celery_next_steps")
def test_celery_next_steps(port: Port) -> None:
    port.start_worker("-m", "omniq", "worker", "proj.tasks")

    assert port.run("main.py") == [
        "4 26 pending",
        "failed TypeError",
        str([2 * i for i in range(10)]),
        "64",
        "90",
    ]


@on("arq_main")
def test_arq_main_example(port: Port) -> None:
    worker = port.start_worker("-m", "omniq", "worker", "demo", "--lifespan", "demo.lifespan")

    port.run("demo.py")

    for _ in range(3):
        worker.wait_for("four words of text")


@on("rq_main")
def test_rq_main_page(port: Port) -> None:
    worker = port.start_worker("-m", "omniq", "worker", "my_module")

    port.run("main.py")

    for _ in range(3):  # the other two are due later
        worker.wait_for("task.succeeded")


@on("dramatiq_guide")
def test_dramatiq_guide(port: Port) -> None:
    worker = port.start_worker("-m", "omniq", "worker", "count_words")

    printed = port.run("main.py")

    assert printed[:2] == ["[4, 4, 4] 3", "0"]
    assert "KeyError: 'coffee'" in printed[2]
    assert "TaskTimeout" in printed[3]
    said = "".join(worker.output)
    assert said.count("There are 4 words at") >= 3
    assert "dropped: 'foo' is not a URL" in said
    assert "taken down in time" in said


@on("dramatiq_guide")
def test_the_unit_test_of_the_dramatiq_guide(port: Port) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"],
        cwd=port.folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )

    assert "1 passed" in done.stdout, done.stdout + done.stderr


@on("huey_guide")
def test_huey_guide(port: Port) -> None:
    worker = port.start_worker("-m", "omniq", "worker", "demo")

    assert port.run("main.py") == ["3", "7", "9", "OK", "18", "hello, ann", "True cancelled"]
    schedules = Program(["-m", "omniq", "schedules", "list"], port.folder)
    assert schedules.wait() == 0
    assert "*/3 * * * *" in "".join(schedules.output)
    assert worker.is_running


async def make_users(database: str, schema: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.execute("CREATE TABLE users (id serial PRIMARY KEY, name text UNIQUE)")
    await connection.close()


@on("fastapi_pool")
def test_fastapi_with_a_pool_and_a_session_for_each_task(port: Port, postgres_url: str) -> None:
    schema = f"port_{os.getpid()}"
    database = re.sub(r"\bschema=\w+", f"search_path={schema}", postgres_url)
    assert "search_path" in database
    environment = {"DATABASE_URL": database, "OMNIQ_URL": postgres_url}
    asyncio.run(make_users(database, schema))
    worker = port.start_worker("-m", "omniq", "worker", "app", **environment)
    server = Program(["-m", "uvicorn", "app:app", "--port", "0"], port.folder, **environment)
    url = server.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]

    made = [fetch_json(f"{url}/users/{name}", method="POST")["id"] for name in ("ann", "bob")]

    assert made == [1, 2]
    assert server.stop() in (0, -15)
    # Before the fixture removes the tables.
    assert worker.stop() == 0


@on("django_project")
def test_a_django_project(port: Port) -> None:
    import django

    if django.VERSION < (6,):
        # The same framework before it was part of Django.
        for file in port.folder.rglob("*.py"):
            file.write_text(file.read_text().replace("django.tasks", "django_tasks"))
    environment = {"OMNIQ_URL": f"sqlite:///{port.folder}/tasks.db"}
    worker = port.start_worker("manage.py", "omniq_worker", **environment)

    assert port.run("main.py", **environment)[-1] == "SUCCESSFUL 1 1"
    worker.wait_for("Subject: welcome")
    worker.wait_for("attempt 1")
