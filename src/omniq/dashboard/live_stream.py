"""The live stream: one server-sent event for each look, to a bounded number of listeners."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from omniq.dashboard.app_state import state_of
from omniq.dashboard.sampler import Sampler, Snapshot
from omniq.to_json import plain

MAX_STREAMS = 32


async def stream(request: Request) -> Response:
    """Counts and rates as they change. Past the bound, a listener is told to poll instead."""
    sampler = state_of(request).sampler
    if sampler.watchers >= MAX_STREAMS:
        return JSONResponse(
            {"error": "too many listeners: ask /api/overview now and then instead"},
            503,
            {"retry-after": "10"},
        )
    # Told to proxies that would otherwise keep the events until there are many.
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(_events(sampler), media_type="text/event-stream", headers=headers)


async def _events(sampler: Sampler) -> AsyncIterator[bytes]:
    yield b"retry: 5000\n\n"
    async for look in sampler.watch():
        yield _event(look, sampler.error)


def _event(look: Snapshot | None, error: str) -> bytes:
    if look is None:
        return b"event: trouble\ndata: " + msgspec.json.encode({"error": error}) + b"\n\n"
    told = {
        "version": look.version,
        "at": look.overview.at,
        "by_status": look.overview.by_status,
        "dead": look.overview.dead,
        "rates": look.overview.rates,
    }
    return b"event: look\ndata: " + msgspec.json.encode(plain(told)) + b"\n\n"
