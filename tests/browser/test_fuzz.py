"""Hostile requests generated from the OpenAPI document never cause a server error (S30)."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import quote

import pytest

from omniq import AsyncTaskQueue
from tests.browser.served import bearer, dashboard_client
from tests.security.attacks import ATTACKS

NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 1.5, -0.0, 1e308)
TEXTS = (
    "",
    "default",
    "some-id",
    "nightly",
    "2026-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999-23:59",
    "1h",
    "999999w",
    "\x00",
    "\ud83d",
    "a" * 600,
    "=",
    "~~",
    "8!~9999999999999999999999~x",
)


class Fuzzer:
    """Generates requests for every operation of the document; most are invalid in some way."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._draw = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._operations = [
            (method, path, operation)
            for path, found in document["paths"].items()
            for method, operation in found.items()
            if path != "/api/stream"
        ]

    def request(self) -> tuple[str, str, dict[str, Any]]:
        """A method, a path, and the other options of the request."""
        method, path, operation = self._draw.choice(self._operations)
        query = []
        for parameter in operation.get("parameters", ()):
            value = str(self.value(parameter["schema"], 0))
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", quote(_sendable(value), safe=""))
            elif self._draw.random() < 0.4:
                query.append((parameter["name"], _sendable(value)))
        if self._draw.random() < 0.05:
            query.append((_sendable(str(self.anything(0))), "x"))
        options: dict[str, Any] = {"params": query}
        if method == "post":
            options |= self._body(operation)
        return method.upper(), path, options

    def _body(self, operation: dict[str, Any]) -> dict[str, Any]:
        roll = self._draw.random()
        if roll < 0.1:
            return {"content": self._draw.randbytes(self._draw.randrange(200))}
        if roll < 0.15:
            return {"content": b"[" * 20_000}
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        value = self.value(schema, 0) if roll < 0.9 else self.anything(0)
        return {"json": _clean(value)}

    def value(self, schema: dict[str, Any], depth: int) -> Any:
        """A value that mostly fits the schema, and sometimes does not."""
        if self._draw.random() < 0.15 or depth > 5:
            return self.anything(depth)
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(self._draw.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return self._draw.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return {
                    name: self.value(shape, depth + 1)
                    for name, shape in schema.get("properties", {}).items()
                    if self._draw.random() < 0.9
                }
            case "array":
                count = self._draw.choice((0, 1, 2, 3, 501))
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "integer":
                return self._draw.choice((1, 2, 50, *NUMBERS))
            case "boolean":
                return self._draw.random() < 0.5
            case "string":
                return self._draw.choice((*TEXTS, self._draw.choice(ATTACKS)))
            case _:
                return self.anything(depth)

    def anything(self, depth: int) -> Any:
        kinds: list[Any] = [None, True, *NUMBERS, *TEXTS, self._draw.choice(ATTACKS)]
        if depth < 4:
            kinds += [[self.anything(depth + 1)], {"id": self.anything(depth + 1)}]
        return self._draw.choice(kinds)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:2_000] or "x"


def _clean(value: Any) -> Any:
    match value:
        case str():
            return _sendable(value)
        case list():
            return [_clean(item) for item in value]
        case dict():
            return {_sendable(str(key)): _clean(item) for key, item in value.items()}
        case _:
            return value


async def fuzz(url: str, seed: int, count: int) -> dict[int, int]:
    """Send `count` requests; returns the number of responses by status."""
    codes: dict[int, int] = {}
    async with AsyncTaskQueue(url) as queue, dashboard_client(queue) as client:
        await queue.options(task_id="some-id").enqueue("shop.say", "x")
        await queue.schedules.add("nightly", "shop.refresh_prices", cron="0 3 * * *")
        document = (await client.get("/api/openapi.json", headers=bearer())).json()
        fuzzer = Fuzzer(document, seed)
        for _ in range(count):
            method, path, options = fuzzer.request()
            answer = await client.request(method, path, headers=bearer(), **options)
            codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (method, path, options, answer.text)
            assert answer.headers["content-type"].startswith(("application/json", "text/"))
    return codes


@pytest.mark.timeout(120)
async def test_no_request_causes_a_server_error():
    codes = await fuzz("memory://", seed=1, count=2_000)

    assert {200, 400, 404} <= codes.keys()


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_s30_five_thousand_requests_cause_no_server_error(kind, tmp_path):
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/tasks.db?durability=os"
    codes = await fuzz(url, seed=2, count=5_000)

    assert {200, 400, 404} <= codes.keys()
