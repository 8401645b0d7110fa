"""Fixtures: servers that a test may kill, and workers as real processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import NatsServer, PostgresServer, RedisServer, Server
from tests.acceptance.command import WorkerCommand

collect_ignore = ["wrong_clock"]
"""Importing it sets the clock of the process."""


ROOT = Path(__file__).parents[2]
TASKS = "tests.fleet.fleet_tasks"

_ALL: dict[str, type[PostgresServer | RedisServer | NatsServer]] = {
    "postgres": PostgresServer,
    "redis": RedisServer,
    "nats": NatsServer,
}
KINDS = {
    name: kind
    for name, kind in _ALL.items()
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
}

StartServer = Callable[..., Server]
StartWorker = Callable[..., WorkerCommand]


@pytest.fixture(params=KINDS)
def start_server(request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """Start a dedicated server; each test runs with each kind."""
    servers: list[Server] = []

    def start(**options: object) -> Server:
        try:
            server = KINDS[request.param](**options)  # type: ignore[arg-type]
        except ServerMissing as missing:
            pytest.skip(str(missing))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(params=KINDS)
def place_on_server(request: pytest.FixtureRequest) -> str:
    """The URL of a store on a server that all tests share."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Start `omniq worker` for the tasks of this folder; it ends with the test."""
    commands: list[WorkerCommand] = []

    def start(url: str, *arguments: str) -> WorkerCommand:
        quiet = () if "--log-level" in arguments else ("--log-level", "WARNING")
        command = WorkerCommand(ROOT, *arguments, *quiet, modules=(TASKS,), OMNIQ_URL=url)
        commands.append(command)
        return command

    yield start
    for command in commands:
        command.kill()
        print(command.text)  # noqa: T201 - pytest shows it when the test has failed
