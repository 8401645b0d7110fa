"""The OpenAPI document, generated from the tables of actions and endpoints."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from omniq.dashboard.action_requests import ActionResult
from omniq.dashboard.actions import ACTIONS
from omniq.dashboard.api import ENDPOINTS, Endpoint
from omniq.dashboard.authorization import TOKEN_HEADER
from omniq.dashboard.cookies import COOKIE
from omniq.models import TaskStatus

_ID = {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"}
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "the request is invalid",
    "401": "the request is not authenticated",
    "403": "the role, host, origin or token does not allow it",
    "404": "no such record",
    "409": "the queue is full, or the key is taken",
    "429": "too many wrong secrets",
    "503": "the storage does not respond",
}


def document(server: str) -> dict[str, Any]:
    """The document. `server` is the path that the dashboard is mounted at."""
    types = [ActionResult, *dict.fromkeys(action.request_type for action in ACTIONS.values())]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {endpoint.path: {"get": _endpoint(endpoint)} for endpoint in ENDPOINTS}
    paths["/api/stream"] = {"get": _stream()}
    for action in ACTIONS.values():
        body = {"application/json": {"schema": schema_of[action.request_type]}}
        paths.setdefault(f"/api/{action.path}", {})["post"] = {
            "summary": action.summary,
            "requestBody": {"required": True, "content": body},
            "responses": _responses({"application/json": {"schema": schema_of[ActionResult]}}),
            "security": [{"secret": []}, {"session": [], "token": []}],
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "omniq", "version": "1", "description": "Inspect and manage tasks."},
        "servers": [{"url": server or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _security()},
        "security": [{"secret": []}, {"session": []}],
    }


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    schema = next(iter(msgspec.json.schema(endpoint.query_type)["$defs"].values()))
    query = [
        {"name": name, "in": "query", "required": False, "schema": _parameter(shape)}
        for name, shape in schema["properties"].items()
    ]
    path = [
        {"name": name, "in": "path", "required": True, "schema": _ID}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    return {
        "summary": endpoint.summary,
        "parameters": path + query,
        "responses": _responses({"application/json": {"schema": {"type": "object"}}}),
    }


def _parameter(shape: dict[str, Any]) -> dict[str, Any]:
    """The schema of a query parameter, without null: a parameter that is not given is absent."""
    kinds = [kind for kind in shape.get("anyOf", [shape]) if kind.get("type") != "null"]
    kind: dict[str, Any] = kinds[0]
    # The only type with a schema name is the status.
    return {"type": "string", "enum": [*TaskStatus]} if "$ref" in kind else kind


def _stream() -> dict[str, Any]:
    return {
        "summary": "Counts and rates as they change, as server-sent events",
        "responses": _responses({"text/event-stream": {"schema": {"type": "string"}}}),
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"type": "object"}}}
    refusals = {code: {"description": why, "content": error} for code, why in _REFUSALS.items()}
    return {"200": {"description": "success", "content": content}, **refusals}


def _security() -> dict[str, Any]:
    return {
        "secret": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
        "token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
    }
