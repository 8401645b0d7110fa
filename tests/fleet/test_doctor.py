"""`omniq doctor` reports the guarantees of a storage, and warns of servers that weaken them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from omniq import __version__
from omniq.storage import open_storage
from omniq.testing.servers import PostgresServer, RedisServer
from tests.acceptance.command import clean_environment
from tests.cli.in_process import CommandResult, run_command

pytestmark = pytest.mark.timeout(120)

needs_postgres = pytest.mark.usefixtures("postgres_backend")
needs_redis = pytest.mark.usefixtures("redis_backend")


@pytest.fixture
def postgres_backend() -> None:
    pytest.importorskip("omniq.storage.postgres")


@pytest.fixture
def redis_backend() -> None:
    pytest.importorskip("omniq.storage.redis")


class Doctor:
    """Runs the command in a separate folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str, **environ: str) -> CommandResult:
        for name, value in environ.items():
            self._monkeypatch.setenv(name, value)
        return run_command(self._capsys, "doctor", *arguments)

    def findings(self, url: str, code: int = 0) -> dict[str, tuple[str, str]]:
        """Return the findings of `--json`: the value and verdict of each name."""
        done = self.run("--url", url, "--json")
        assert done.code == code, done.err
        report: dict[str, Any] = json.loads(done.out)
        assert report["healthy"] is (code == 0)
        return {each["name"]: (each["value"], each["verdict"]) for each in report["findings"]}

    def error_line(self, url: str) -> str:
        """Return the only line of a doctor that could not open the storage."""
        done = self.run("--url", url)
        assert (done.code, done.out) == (1, "")
        (line,) = done.err.splitlines()
        assert line.startswith("omniq: ")
        return line


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - clean_environment().keys():
        if name != "OMNIQ_TEST_POSTGRES_TEMPLATES":
            monkeypatch.delenv(name)
    return Doctor(monkeypatch, capsys)


async def stored_tasks(url: str) -> tuple[int, int]:
    """Open the storage, which creates it; return how many tasks it lists and counts."""
    async with open_storage(url) as storage:
        listed = await storage.list_tasks()
        return len(listed), sum((await storage.stats()).by_status.values())


@pytest.mark.parametrize(
    ("url", "survives"),
    [
        ("memory://", "nothing"),
        ("sqlite:///tasks.db", "a power cut"),
        ("sqlite:///tasks.db?durability=os", "the end of the process"),
        ("file:tasks", "a power cut"),
    ],
)
def test_the_doctor_reports_the_guarantees_of_a_local_storage(doctor, url, survives):
    findings = doctor.findings(url)

    assert findings["survives"][0].startswith(survives)
    assert findings["versions"][0].startswith(f"omniq {__version__}, Python 3.")
    assert findings["write and read"][1] == "ok"
    assert {verdict for _, verdict in findings.values()} == {"ok"}


@pytest.mark.parametrize("url", ["sqlite:///tasks.db", "file:tasks"])
def test_the_doctor_says_where_a_local_storage_is_and_does_not_create_it(doctor, tmp_path, url):
    name = url.removeprefix("sqlite:///").removeprefix("file:")
    path = tmp_path / name
    missing = f"{path}: does not exist yet; the first task or worker creates it"

    assert doctor.findings(url)["place"] == (missing, "ok")
    assert not path.exists()
    assert [each for each in os.listdir(tmp_path) if "doctor" in each or name in each] == []
    asyncio.run(stored_tasks(url.replace(name, str(path))))
    assert doctor.findings(url)["place"] == (str(path), "ok")


def test_the_doctor_leaves_no_files_behind(doctor, tmp_path):
    url = f"sqlite:///{tmp_path}/tasks.db"
    assert doctor.run("--url", url).code == 0
    assert asyncio.run(stored_tasks(url)) == (0, 0)


def test_the_doctor_names_the_source_of_each_setting_and_hides_secrets(doctor, tmp_path):
    (tmp_path / "omniq.toml").write_text("lease = 7\n")
    done = doctor.run("--json", OMNIQ_CONCURRENCY="5", OMNIQ_SIGNING_KEY="open-sesame-open")
    assert done.code == 0
    settings = {each.pop("name"): each for each in json.loads(done.out)["settings"]}

    assert settings["lease"] == {"value": "7.0", "source": "omniq.toml"}
    assert settings["concurrency"] == {"value": "5", "source": "OMNIQ_CONCURRENCY"}
    assert settings["poll_interval"] == {"value": "1.0", "source": "default"}
    assert settings["signing_key"] == {"value": "***", "source": "OMNIQ_SIGNING_KEY"}
    assert "open-sesame" not in done.out + done.err


def test_control_characters_are_escaped(doctor):
    done = doctor.run("--url", "file:tasks\x1b[2J")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\\x1b[2J" in done.out


@needs_postgres
def test_the_doctor_reports_the_guarantees_of_a_durable_postgresql(doctor):
    with PostgresServer(durable=True) as server:
        findings = doctor.findings(server.url)

    assert findings["survives"] == ("a power cut", "ok")
    assert findings["fsync"] == ("on", "ok")
    assert findings["synchronous_commit"] == ("on", "ok")
    assert findings["clock"][0].startswith("the server's, differs by ")
    assert findings["clock"][1] == "ok"
    assert any("18" in value for value, _ in findings.values())


@pytest.mark.deep
@needs_postgres
@pytest.mark.parametrize("setting", ["fsync", "synchronous_commit"])
def test_the_doctor_warns_of_a_postgresql_that_may_lose_acknowledged_tasks(doctor, setting):
    with PostgresServer(durable=True, options={setting: "off"}) as server:
        done = doctor.run("--url", server.url, "--json")
        shown = doctor.run("--url", server.url)
    report = {each["name"]: each["verdict"] for each in json.loads(done.out)["findings"]}

    assert report[setting] != "ok"
    assert report["survives"] != "ok"
    assert server.password not in done.out + shown.out


@needs_redis
def test_the_doctor_reports_the_guarantees_of_a_durable_redis(doctor):
    with RedisServer(durable=True) as server:
        findings = doctor.findings(server.url)

    assert findings["survives"] == ("a power cut", "ok")
    assert findings["appendonly"] == ("yes", "ok")
    assert findings["appendfsync"] == ("always", "ok")
    assert findings["maxmemory-policy"] == ("noeviction", "ok")


@needs_redis
@pytest.mark.parametrize(
    ("options", "setting"),
    [({"appendonly": "no"}, "appendonly"), ({"appendfsync": "everysec"}, "appendfsync")],
)
@pytest.mark.fault("F39")
def test_the_doctor_warns_of_a_redis_that_may_lose_acknowledged_tasks(doctor, options, setting):
    with RedisServer(durable=True, options=options) as server:
        done = doctor.run("--url", server.url, "--json")
    report = {each["name"]: each["verdict"] for each in json.loads(done.out)["findings"]}

    assert report[setting] != "ok"
    assert report["survives"] != "ok"


@needs_redis
def test_a_redis_that_evicts_keys_is_refused_in_one_line(doctor):
    with RedisServer(options={"maxmemory-policy": "allkeys-lru"}) as server:
        assert "noeviction" in doctor.error_line(server.url)


def test_an_absent_server_and_a_wrong_password_are_reported_in_one_line(doctor, start_server):
    server = start_server()
    wrong = doctor.error_line(server.url.replace(server.password, "wrong-secret"))
    server.stop()
    away = doctor.error_line(server.url)

    assert "wrong-secret" not in wrong
    assert server.password not in away
    assert wrong != away
