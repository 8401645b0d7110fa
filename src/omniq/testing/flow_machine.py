"""A Hypothesis state machine for workflows: random graphs, children, waits, events and cancellations.

Several owners share one store. After each move, every record must have the status that the model derives
from scratch, and a claim must find exactly the tasks that the model says may run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from omniq.clock import to_micros
from omniq.models import Task, TaskStatus
from omniq.outcomes import Cancelled, Failed, Outcome, Released, Succeeded, Suspended
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.tasks.flow_records import EVENT_NONCE, event_task
from omniq.testing.builders import a_member, a_result, an_error
from omniq.testing.clock import ManualClock
from omniq.testing.model_flows import FlowModel, Node
from omniq.testing.state_machine_stores import OpenStore, Store

T = TypeVar("T")

SETTINGS = Settings(lease=1_000_000.0, result_ttl=1e9, max_crashes=1_000, durability="os")
_OWNERS = 2
_PICK = st.integers(0, 40)


class FlowStateMachine(RuleBasedStateMachine):
    """Compares the stores of `open_store` with the model. `flow_machine_for` makes a subclass."""

    open_store: ClassVar[OpenStore]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._clock = ManualClock()
        self._model = FlowModel()
        self._storages: list[BaseStorage] = []
        self._store: Store | None = None
        self._numbers = 0

    @initialize()
    def open(self) -> None:
        self._store = type(self).open_store(self._clock, SETTINGS, None)
        for _ in range(_OWNERS):
            storage = self._store.another()
            self._run(storage.open())
            self._storages.append(storage)

    def teardown(self) -> None:
        try:
            for storage in self._storages:
                self._run(storage.close())
            if self._store is not None:
                self._run(self._store.discard())
        finally:
            self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    # Moves

    @rule(owner=st.integers(0, _OWNERS - 1), size=st.integers(0, 5), data=st.data())
    def start_a_flow(self, owner: int, size: int, data: st.DataObject) -> None:
        self._numbers += 1
        root = f"f{self._numbers:03d}"
        stops = data.draw(st.booleans(), label="stops")
        nodes = [Node(root, kind="group", stops=stops)]
        known = [node.id for node in self._model.nodes.values() if node.kind != "event"]
        for number in range(size):
            choices = [*known[-6:], *(node.id for node in nodes[1:])]
            picked = data.draw(
                st.lists(st.sampled_from(choices), max_size=3, unique=True)
                if choices
                else st.just([])
            )
            any_end = data.draw(st.integers(0, len(picked)))
            nodes.append(
                Node(
                    f"{root}.n{number}",
                    parent=root,
                    after=tuple(picked[any_end:]),
                    after_any=tuple(picked[:any_end]),
                )
            )
        self._run(self._storages[owner].enqueue_many([_task(node) for node in nodes]))
        self._model.add(nodes)
        self._check(f"started {root} with {size} nodes")

    @rule(owner=st.integers(0, _OWNERS - 1), limit=st.integers(1, 4))
    def claim(self, owner: int, limit: int) -> None:
        claimable = self._model.claimable(self._clock.micros())
        tasks = self._run(self._storages[owner].reserve(limit))
        claimed = {task.id for task in tasks}
        assert claimed <= claimable, f"claimed {claimed - claimable}, which may not run"
        assert len(tasks) == min(limit, len(claimable))
        for task in tasks:
            self._model.claim(task.id, owner, task.token)
        self._check(f"claimed {[task.id for task in tasks]}")

    def _held(self) -> list[Node]:
        return [node for node in self._model.nodes.values() if node.owner is not None]

    @precondition(lambda self: self._held())
    @rule(
        at=_PICK,
        how=st.sampled_from(("success", "success", "success", "failure", "discard", "release")),
        limit=st.integers(0, 2),
    )
    def end_a_run(self, at: int, how: str, limit: int) -> None:
        node = self._held()[at % len(self._held())]
        owner = node.owner or 0
        if how != "success" or self._model.below(node.id) or self._success_cancels(node):
            # What is cancelled after this step may begin in it.
            limit = 0
        claim = (node.id, node.token)
        outcomes: dict[str, Outcome] = {
            "success": Succeeded(*claim, a_result(Task(id=node.id, func_path="tasks.work"), at)),
            "failure": Failed(*claim, an_error()),
            "discard": Cancelled(*claim, "not needed"),
            "release": Released(*claim),
        }
        (recorded,), tasks = self._run(
            self._storages[owner].record_and_reserve([outcomes[how]], limit)
        )
        assert recorded
        match how:
            case "success":
                self._model.end(node.id, TaskStatus.SUCCESS, at)
            case "failure":
                self._model.end(node.id, TaskStatus.FAILED)
            case "discard":
                self._model.end(node.id, TaskStatus.CANCELLED)
            case "release":
                self._model.give_back(node.id)
        for task in tasks:
            assert task.id in self._model.claimable(self._clock.micros()), task.id
            self._model.claim(task.id, owner, task.token)
        self._check(f"{how} of {node.id}")

    def _success_cancels(self, node: Node) -> bool:
        """Whether it ends a group with a failed member, and what needs that group is cancelled."""
        model = copy.deepcopy(self._model)
        model.end(node.id, TaskStatus.SUCCESS)
        return any(
            each.status is not self._model.nodes[task_id].status
            for task_id, each in model.nodes.items()
            if each.status is TaskStatus.CANCELLED
        )

    @precondition(lambda self: self._held())
    @rule(at=_PICK, kinds=st.lists(st.sampled_from(("task", "event")), min_size=1, max_size=3))
    def add_children(self, at: int, kinds: list[str]) -> None:
        parent = self._held()[at % len(self._held())]
        if parent.cancel_requested:
            return
        storage, claim = self._storages[parent.owner or 0], (parent.id, parent.token)
        nodes = []
        for kind in kinds:
            self._numbers += 1
            nodes.append(Node(f"{parent.id}.c{self._numbers:03d}", kind=kind, parent=parent.id))
        if len(nodes[0].id) > 100:
            return
        for node in nodes:
            task = _task(node)
            nonce = EVENT_NONCE if node.kind == "event" else "child"
            for _ in range(2):
                self._run(storage.enqueue_many([task], nonce=nonce, under=claim))
        self._model.add(nodes)
        self._check(f"added {[node.id for node in nodes]}")

    @precondition(lambda self: self._held())
    @rule(at=_PICK, data=st.data())
    def suspend(self, at: int, data: st.DataObject) -> None:
        node = self._held()[at % len(self._held())]
        above = {node.id[:end] for end, letter in enumerate(node.id) if letter == "."}
        choices = [each for each in self._model.nodes if each not in above and each != node.id]
        picked: list[str] = []
        if choices:
            picked = data.draw(st.lists(st.sampled_from(choices), max_size=4, unique=True))
        on = tuple(picked)
        is_some, is_timed = data.draw(st.tuples(st.booleans(), st.booleans()))
        enough = data.draw(st.integers(1, len(on))) if on and is_some else None
        until = self._clock.now() + timedelta(seconds=5) if is_timed else None
        outcome = Suspended(node.id, node.token, on, enough, until)
        assert self._run(self._storages[node.owner or 0].record([outcome])) == [True]
        self._model.suspend(node.id, on, enough, None if until is None else to_micros(until))
        self._check(f"suspended {node.id} on {on}, enough {enough}, until {until}")

    @precondition(lambda self: self._events())
    @rule(owner=st.integers(0, _OWNERS - 1), at=_PICK)
    def send_an_event(self, owner: int, at: int) -> None:
        events = self._events()
        event = events[at % len(events)]
        is_first = self._run(self._storages[owner].complete(event.id, at))
        assert is_first == self._model.complete(event.id, at)
        self._check(f"sent {event.id}")

    def _events(self) -> list[Node]:
        return [node for node in self._model.nodes.values() if node.kind == "event"]

    @precondition(lambda self: self._model.nodes)
    @rule(owner=st.integers(0, _OWNERS - 1), at=_PICK)
    def cancel(self, owner: int, at: int) -> None:
        ids = list(self._model.nodes)
        task_id = ids[at % len(ids)]
        cancelled = self._run(self._storages[owner].cancel(task_id))
        assert cancelled == self._model.cancel(task_id)
        self._check(f"cancelled {task_id}")

    @rule(seconds=st.sampled_from((1, 5)))
    def advance(self, seconds: int) -> None:
        self._clock.advance(seconds)

    # Checks

    def _check(self, move: str) -> None:
        note(move)
        storage = self._storages[-1]
        while self._run(storage.advance_flows()):
            pass
        for node in self._model.nodes.values():
            task = self._run(storage.get_task(node.id))
            assert task is not None, node.id
            assert task.status is node.status, f"{node.id} is {task.status}, and not {node.status}"
            if node.status is TaskStatus.SUCCESS and node.kind != "group":
                result = self._run(storage.get_result(node.id))
                assert result is not None
                assert result.result == node.value, node.id
        waiting = {
            task.id
            for node in self._model.nodes.values()
            if (task := self._run(storage.get_task(node.id))) is not None
            and task.status is TaskStatus.PENDING
            and (task.workflow is None or task.workflow.kind == "task")
            and not self._run(storage.sources_of(task.id))
            and not (task.workflow is not None and task.workflow.has_returned)
        }
        due = self._model.claimable(self._clock.micros())
        assert {each for each in due if not self._model.nodes[each].until} <= waiting


def _task(node: Node) -> Task:
    if node.kind == "event":
        parent = Task(id=node.parent or "", func_path="tasks.work")
        return event_task(node.id, parent if node.parent else None)
    return a_member(
        node.id,
        kind=node.kind,
        parent=node.parent,
        after=node.after,
        after_any=node.after_any,
        stops=node.stops,
    )


def flow_machine_for(open_store: OpenStore) -> type[FlowStateMachine]:
    """Return a state machine over stores that `open_store` creates."""
    return type("FlowMachine", (FlowStateMachine,), {"open_store": staticmethod(open_store)})
