"""Tasks, results and statistics are JSON for web frameworks."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import httpx
import pydantic
import pytest
from fastapi import FastAPI

from omniq import QueueStats, Schedule, Task, TaskError, TaskResult, TaskStatus
from omniq.gate_rules import BreakerState
from omniq.operations.health import BreakerInfo

TASK = Task(
    id="t1",
    func_path="shop.ship",
    args=(1, "4111"),
    kwargs={"password": "pw", "at": datetime(2026, 1, 2, tzinfo=UTC)},
    secrets=(1, "card"),
)
RESULT = TaskResult(
    task_id="t1", status=TaskStatus.FAILED, result={"a": (1, b"x")}, error=TaskError("broken")
)
STATS = QueueStats(
    by_status={TaskStatus.PENDING: 1}, by_queue={"mail": 1}, oldest_due_age=0.5, dead=2
)

app = FastAPI()


@app.get("/task")
async def task() -> Task | None:
    return TASK


@app.get("/results")
async def results() -> list[TaskResult]:
    return [RESULT]


@app.get("/stats")
async def stats() -> QueueStats:
    return STATS


@app.get("/untyped", response_model=None)
async def untyped():
    return {"task": TASK, "results": [RESULT], "stats": STATS}


@app.get("/operations", response_model=None)
async def operations():
    return {
        "schedules": [Schedule(id="nightly", task=TASK, cron="0 3 * * *")],
        "breakers": [
            BreakerInfo(
                name="stripe", state=BreakerState.OPEN, opened_at=datetime(2026, 1, 2, tzinfo=UTC)
            )
        ],
    }


@pytest.fixture
async def client():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_an_endpoint_returns_them_with_and_without_an_annotation(client):
    task, results, stats = [
        (await client.get(path)).json() for path in ("/task", "/results", "/stats")
    ]

    assert (task["id"], task["status"], task["func_path"]) == ("t1", "pending", "shop.ship")
    assert task["kwargs"]["at"] == "2026-01-02T00:00:00+00:00"
    assert results[0]["result"] == {"a": [1, "eA=="]}
    assert results[0]["error"]["message"] == "broken"
    assert stats["by_status"] == {"pending": 1}
    assert (await client.get("/untyped")).json() == {
        "task": task,
        "results": results,
        "stats": stats,
    }


async def test_secrets_among_the_arguments_are_hidden(client):
    task = (await client.get("/task")).json()

    assert task["args"] == [1, "[redacted]"]
    assert task["kwargs"]["password"] == "[redacted]"


async def test_schedules_and_breakers_are_json_too_without_secrets(client):
    found = (await client.get("/operations")).json()

    assert found["schedules"][0]["cron"] == "0 3 * * *"
    assert found["schedules"][0]["task"]["args"] == [1, "[redacted]"]
    assert found["breakers"][0]["opened_at"] == "2026-01-02T00:00:00+00:00"


async def test_the_schema_of_the_application_is_made(client):
    schema = (await client.get("/openapi.json")).json()

    assert "/stats" in schema["paths"]


def test_a_model_may_contain_them():
    class Answer(pydantic.BaseModel):
        result: TaskResult
        stats: QueueStats | None = None

    answer = Answer(result=RESULT)

    assert json.loads(answer.model_dump_json())["result"]["task_id"] == "t1"
    with pytest.raises(pydantic.ValidationError):
        Answer(result={"task_id": "t1"})  # type: ignore[arg-type]


def test_a_dictionary_is_made_of_one():
    assert dict(STATS) == STATS.as_dict()
    assert json.loads(json.dumps(dict(TASK)))["id"] == "t1"
