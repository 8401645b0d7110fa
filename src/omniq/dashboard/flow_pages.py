"""The pages of workflows: the list of flows, one flow with its nodes, and the events that tasks wait for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omniq.dashboard import flow_queries, queries
from omniq.dashboard.app_state import state_of
from omniq.dashboard.flow_graph import flow_graph
from omniq.dashboard.rendering import page, patience_of


async def flows(request: Request) -> Response:
    """The newest flows."""
    state = state_of(request)
    query = queries.parse_query(flow_queries.FlowsQuery, request.query_params.multi_items())
    await state.sampler.current()
    found, searching = await flow_queries.flows_of(state, query, patience_of(request))
    return page(request, "flows.html", flows=found, limit=query.limit, searching=searching)


async def flow(request: Request) -> Response:
    """One flow: its nodes, what each waits for, and its open events."""
    state, flow_id = state_of(request), request.path_params["flow_id"]
    await state.sampler.current()
    info, nodes = await flow_queries.flow_of(state, flow_id)
    events, searching = await flow_queries.events_of(state, flow_id, patience_of(request))
    return page(
        request,
        "flow.html",
        flow=info,
        nodes=nodes,
        graph=flow_graph(nodes),
        events=events,
        searching=searching,
    )


async def events(request: Request) -> Response:
    """The events that tasks wait for, with a form for the value of each."""
    state = state_of(request)
    await state.sampler.current()
    found, searching = await flow_queries.events_of(state, patience=patience_of(request))
    return page(request, "events.html", events=found, searching=searching)


ROUTES = tuple(
    Route(path, handler, methods=["GET"])
    for path, handler in (
        ("/flows", flows),
        ("/flows/{flow_id}", flow),
        ("/events", events),
    )
)
