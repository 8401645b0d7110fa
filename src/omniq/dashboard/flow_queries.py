"""The reads of workflows that the pages and the API share."""

from __future__ import annotations

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


async def flows_of(state: AppState, query: FlowsQuery) -> list[FlowInfo]:
    """The newest flows, newest first."""

    async def read() -> list[FlowInfo]:
        async with state.searches.use() as storage:
            return await list_flows(storage, query.limit)

    return await state.cached(("flows", query.limit), read, max_age=_MAX_AGE)


async def flow_of(state: AppState, flow_id: str) -> tuple[FlowInfo, list[NodeInfo]]:
    """A flow and its nodes. Raises `TaskNotFound`."""

    async def read() -> tuple[FlowInfo, list[NodeInfo]]:
        async with state.searches.use() as storage:
            return await show_flow(storage, flow_id)

    return await state.cached(("flow", flow_id), read, max_age=_MAX_AGE)


async def events_of(state: AppState, flow_id: str = "") -> list[EventInfo]:
    """The events that were not sent yet, of one flow if it is given."""

    async def read() -> list[EventInfo]:
        async with state.searches.use() as storage:
            return await list_open_events(storage, _MAX_EVENTS, below=flow_id)

    return await state.cached(("events", flow_id), read, max_age=_MAX_AGE)
