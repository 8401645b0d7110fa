"""The live stream: one server-sent event per snapshot, for a limited number of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from omniq.dashboard.app_state import state_of
from omniq.dashboard.sampler import Sampler, Snapshot
from omniq.text.to_json import plain

MAX_STREAMS = 32


async def stream(request: Request) -> Response:
    """Stream counts and rates as they change; 503 if too many streams are open."""
    sampler = state_of(request).sampler
    if sampler.watchers >= MAX_STREAMS:
        return JSONResponse(
            {"error": "too many streams are open: poll /api/overview instead"},
            503,
            {"retry-after": "10"},
        )
    # Without it, some proxies buffer the events.
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(_events(sampler), media_type="text/event-stream", headers=headers)


async def _events(sampler: Sampler) -> AsyncIterator[bytes]:
    yield b"retry: 5000\n\n"
    async for snapshot in sampler.watch():
        yield _event(sampler, snapshot)


def _event(sampler: Sampler, snapshot: Snapshot | None) -> bytes:
    if snapshot is None:
        error = {"error": sampler.error, "age": sampler.age}
        return b"event: storage_error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    data = {
        "version": snapshot.version,
        "age": sampler.age,
        "stale_after": sampler.stale_after,
        "at": snapshot.overview.at,
        "by_status": snapshot.overview.by_status,
        "dead": snapshot.overview.dead,
        "rates": snapshot.overview.rates,
    }
    return b"event: snapshot\ndata: " + msgspec.json.encode(plain(data)) + b"\n\n"
