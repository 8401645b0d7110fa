"""The pages of workflows: flows, one flow with its graph, and events that are answered in the browser."""

from __future__ import annotations

import httpx
import pytest

from omniq import Flow, TaskContext, task
from omniq.dashboard.flow_graph import MAX_NODES, flow_graph
from omniq.models import TaskStatus
from omniq.operations.flow_view import NodeInfo
from tests.browser.served import bearer, dashboard_client, sign_in


@task
async def numbers(count: int) -> list[int]:
    return list(range(count))


@task
async def double(number: int) -> int:
    return 2 * number


@task(max_retries=0)
async def add_up(given: list[int]) -> int:
    if sum(given) > 10:
        raise ValueError("too much")
    return sum(given)


@task
async def asks(ctx: TaskContext) -> str:
    is_approved = await ctx.wait_for("approval", bool, prompt="Refund 20 EUR?")
    why = await ctx.wait_for("reason", str)
    return f"{is_approved}: {why}"


def order_flow(count: int = 3) -> Flow:
    flow = Flow("order")
    doubled = flow.map("doubled", double, flow.add("numbers", numbers, count))
    flow.add("total", add_up, doubled)
    return flow


async def page(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.get(path, headers=bearer())
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_a_flow_is_listed_and_shown_with_its_nodes(queue):
    handle = await queue.start(order_flow())
    async with dashboard_client(queue) as client:
        before = await page(client, f"/flows/{handle.id}")
        async with queue.worker(concurrency=2):
            await handle.result(timeout=20)
        listed = await page(client, "/flows")
        client.app.state.dashboard.invalidate()
        after = await page(client, f"/flows/{handle.id}")
        node = await page(client, f"/tasks/{handle.id}.total")

    assert "waits for 1" in before
    assert f'href="/flows/{handle.id}">order</a>' in listed
    assert after.count('<g class="success">') == 3
    assert "3 of 3" in after
    assert f'href="/flows/{handle.id}"' in node


async def test_a_failed_flow_is_retried_from_a_node(queue):
    handle = await queue.start(order_flow(9))
    async with queue.worker(concurrency=2):
        await handle.wait(timeout=20)
    async with dashboard_client(queue) as client:
        token = await sign_in(client)
        shown = (await client.get(f"/flows/{handle.id}")).text
        form = {"token": token, "back": "/flows", "id": handle.id, "node": "total"}
        answer = await client.post("/act/flows/retry", data=form)
        again = await client.post("/act/flows/retry", data=form, follow_redirects=True)

    assert "Retry from here" in shown
    assert answer.status_code == 303
    assert await handle.status() is not TaskStatus.FAILED
    assert "not" in again.text


async def test_a_flow_is_cancelled_once(queue):
    handle = await queue.start(order_flow())
    async with dashboard_client(queue) as client:
        first = await client.post("/api/flows/cancel", json={"id": handle.id}, headers=bearer())
        second = await client.post("/api/flows/cancel", json={"id": handle.id}, headers=bearer())

    assert (first.status_code, second.status_code) == (200, 400)
    assert await handle.status() is TaskStatus.CANCELLED


async def test_an_event_is_answered_with_a_button_or_a_text(queue):
    async with queue.worker(concurrency=2), dashboard_client(queue) as client:
        handle = await queue.enqueue(asks)
        token = await sign_in(client)
        for name, fields in (("approval", {"value": "true"}), ("reason", {"text": "all is well"})):
            while name not in (shown := (await client.get("/events")).text):
                client.app.state.dashboard.invalidate()
            form = {"token": token, "back": "/events", "id": handle.id, "name": name, **fields}
            answer = await client.post("/act/events/send", data=form)
            assert answer.status_code == 303
            if name == "approval":
                assert "Refund 20 EUR?" in shown
                assert ">Yes</button>" in shown

        assert await handle.result(timeout=20) == "True: all is well"


async def test_a_value_of_another_type_is_refused(queue):
    async with queue.worker(concurrency=2), dashboard_client(queue) as client:
        handle = await queue.enqueue(asks)
        while not (await client.get("/api/events", headers=bearer())).json()["events"]:
            client.app.state.dashboard.invalidate()
        body = {"id": handle.id, "name": "approval", "value": "yes"}
        answer = await client.post("/api/events/send", json=body, headers=bearer())

    assert answer.status_code == 400
    assert "approval" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/flows/unknown", "/api/flows/unknown"])
async def test_an_unknown_flow_is_not_found(queue, path):
    async with dashboard_client(queue) as client:
        assert (await client.get(path, headers=bearer())).status_code == 404


async def test_the_api_has_the_nodes_and_edges(queue):
    handle = await queue.start(order_flow())
    async with dashboard_client(queue) as client:
        listed = (await client.get("/api/flows?limit=1", headers=bearer())).json()
        shown = (await client.get(f"/api/flows/{handle.id}", headers=bearer())).json()

    assert [flow["id"] for flow in listed["flows"]] == [handle.id]
    assert shown["edges"] == [["numbers", "doubled"], ["doubled", "total"]]


def node(name: str, layer: int, *after: str) -> NodeInfo:
    return NodeInfo(
        id=f"f.{name}",
        name=name,
        status=TaskStatus.PENDING,
        func_path="shop.f",
        after=after,
        layer=layer,
        counts={},
    )


def test_the_boxes_of_a_graph_do_not_overlap():
    nodes = [node("a", 0), *(node(f"b{number}", 1, "a") for number in range(5)), node("c", 2, "b0")]
    graph = flow_graph(nodes)

    assert graph is not None
    assert len({(box.x, box.y) for box in graph.boxes}) == 7
    assert all(box.x + 168 <= graph.width and box.y + 44 <= graph.height for box in graph.boxes)
    assert len(graph.lines) == 6


def test_a_flow_with_very_many_nodes_has_no_graph():
    assert flow_graph([]) is None
    assert flow_graph([node(str(number), 0) for number in range(MAX_NODES + 1)]) is None
