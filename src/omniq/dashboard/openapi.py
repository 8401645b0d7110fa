"""The OpenAPI document, made from the same tables as the routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from omniq.dashboard.actions import ACTIONS, Done
from omniq.dashboard.api import ENDPOINTS, Endpoint
from omniq.dashboard.authorization import TOKEN_HEADER
from omniq.dashboard.middleware import COOKIE
from omniq.models import TaskStatus

_ID = {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"}
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "what was asked for makes no sense",
    "401": "nobody is signed in",
    "403": "this role, host, origin or token may not do it",
    "404": "no such record",
    "409": "the queue is full, or the key is taken",
    "429": "too many wrong secrets",
    "503": "the storage does not answer",
}


def document(server: str) -> dict[str, Any]:
    """All of the API. `server` is where it is mounted."""
    kinds = [Done, *dict.fromkeys(action.takes for action in ACTIONS.values())]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    names = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {endpoint.path: {"get": _asking(endpoint)} for endpoint in ENDPOINTS}
    paths["/api/stream"] = {"get": _streaming()}
    for action in ACTIONS.values():
        body = {"application/json": {"schema": names[action.takes]}}
        paths.setdefault(f"/api/{action.path}", {})["post"] = {
            "summary": action.summary,
            "requestBody": {"required": True, "content": body},
            "responses": _answers({"application/json": {"schema": names[Done]}}),
            "security": [{"secret": []}, {"session": [], "token": []}],
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "omniq", "version": "1", "description": "Tasks, seen and put right."},
        "servers": [{"url": server or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _security()},
        "security": [{"secret": []}, {"session": []}],
    }


def _asking(endpoint: Endpoint) -> dict[str, Any]:
    schema = next(iter(msgspec.json.schema(endpoint.takes)["$defs"].values()))
    query = [
        {"name": name, "in": "query", "required": False, "schema": _plain(shape)}
        for name, shape in schema["properties"].items()
    ]
    path = [
        {"name": name, "in": "path", "required": True, "schema": _ID}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    return {
        "summary": endpoint.summary,
        "parameters": path + query,
        "responses": _answers({"application/json": {"schema": {"type": "object"}}}),
    }


def _plain(shape: dict[str, Any]) -> dict[str, Any]:
    """The shape of a query parameter: one that is left out is not null but absent."""
    kinds = [kind for kind in shape.get("anyOf", [shape]) if kind.get("type") != "null"]
    kind: dict[str, Any] = kinds[0]
    # The only kind with a name is that of a status.
    return {"type": "string", "enum": [*TaskStatus]} if "$ref" in kind else kind


def _streaming() -> dict[str, Any]:
    return {
        "summary": "Counts and rates as they change, as server-sent events",
        "responses": _answers({"text/event-stream": {"schema": {"type": "string"}}}),
    }


def _answers(content: dict[str, Any]) -> dict[str, Any]:
    problem = {"application/json": {"schema": {"type": "object"}}}
    refusals = {code: {"description": why, "content": problem} for code, why in _REFUSALS.items()}
    return {"200": {"description": "the answer", "content": content}, **refusals}


def _security() -> dict[str, Any]:
    return {
        "secret": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
        "token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
    }
