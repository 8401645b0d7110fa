"""`omniq flows`: flows, their graphs, and the events that tasks wait for."""

from __future__ import annotations

import pytest

from omniq import Flow

pytestmark = pytest.mark.timeout(120)


def a_flow() -> Flow:
    flow = Flow("import")
    first = flow.add("list", "clitasks.add", 1)
    flow.map("part", "clitasks.add", [1, 2, 3], first)
    flow.options(after=["part"]).add("last", "clitasks.add", 1)
    return flow


def test_a_flow_is_listed_shown_cancelled_and_retried(omniq, queue):
    assert "no flow was started" in omniq("flows", "list").err
    handle = queue.start(a_flow())

    (listed,) = omniq("flows", "list", "--json").lines
    assert (listed["id"], listed["name"], listed["nodes"]) == (handle.id, "import", 3)
    shown = omniq("flows", "show", handle.id)
    assert shown.out.splitlines()[0] == f"{handle.id} import: pending"
    assert "×3 ░░░░░░░░░░ 0 done · 3 pending" in shown.out
    graph = omniq("flows", "show", handle.id, "--json").json
    assert graph["edges"] == [["list", "part"], ["part", "last"]]
    refused = omniq("flows", "retry", handle.id)
    assert (refused.code, "runs" in refused.err) == (1, True)
    assert omniq("flows", "cancel", handle.id).out == f"cancelled: {handle.id}\n"
    assert omniq("flows", "retry", handle.id).out == f"retried: {handle.id}\n"
    assert omniq("flows", "show", "nowhere").code == 3
    assert omniq("flows", "cancel", "nowhere").code == 3


def test_an_event_is_sent_to_a_task(omniq, queue):
    task = queue.options(delay=3600).enqueue("clitasks.add", 1)

    assert omniq("flows", "send", task.id, "approved", "true").out == "sent: approved\n"
    assert "already" in omniq("flows", "send", task.id, "approved", "false").out
    assert omniq("flows", "send", "nowhere", "approved").code == 3
    wrong = omniq("flows", "send", task.id, "other", "yes")
    assert (wrong.code, "is not JSON" in wrong.err) == (1, True)
    assert omniq("flows", "send", "-", "order-7.paid", "12").out == "sent: order-7.paid\n"


def test_what_a_task_waits_for_is_explained(omniq, queue):
    handle = queue.start(a_flow())

    explained = omniq("explain", f"{handle.id}.last")
    assert f"It waits for 1 of 1 others: {handle.id}.part" in explained.out
    group = omniq("explain", handle.id)
    assert "3 of 3 are live" in group.out
