"""The reads of workflows that the pages and the API share."""

from __future__ import annotations

from math import inf

import msgspec

from omniq.dashboard.app_state import AppState
from omniq.dashboard.queries import Size
from omniq.operations.flow_view import (
    EventInfo,
    FlowInfo,
    NodeInfo,
    list_flows,
    list_open_events,
    show_flow,
)

_MAX_AGE = 3.0
"""Seconds: a flow may have very many records."""

_MAX_EVENTS = 500


class FlowsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many flows to list."""

    limit: Size = 100


async def flows_of(
    state: AppState, query: FlowsQuery, patience: float = inf
) -> tuple[list[FlowInfo], bool]:
    """The newest flows, newest first, and whether they are still read after `patience` seconds."""

    async def read() -> list[FlowInfo]:
        async with state.searches.use() as storage:
            return await list_flows(storage, query.limit)

    none: list[FlowInfo] = []
    key = ("flows", query.limit)
    return await state.soon(key, read, none, max_age=_MAX_AGE, patience=patience)


async def flow_of(state: AppState, flow_id: str) -> tuple[FlowInfo, list[NodeInfo]]:
    """A flow and its nodes. Raises `TaskNotFound`."""

    async def read() -> tuple[FlowInfo, list[NodeInfo]]:
        async with state.searches.use() as storage:
            return await show_flow(storage, flow_id)

    return await state.cached(("flow", flow_id), read, max_age=_MAX_AGE)


async def events_of(
    state: AppState, flow_id: str = "", patience: float = inf
) -> tuple[list[EventInfo], bool]:
    """The events that were not sent yet, of one flow if it is given, and whether they are still read."""

    async def read() -> list[EventInfo]:
        async with state.searches.use() as storage:
            return await list_open_events(storage, _MAX_EVENTS, below=flow_id)

    none: list[EventInfo] = []
    return await state.soon(("events", flow_id), read, none, max_age=_MAX_AGE, patience=patience)
