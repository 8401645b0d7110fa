"""A small model of workflows: it derives from scratch, after each move, who has ended and who may run.

It shares no code with the rules of storages, counts nothing and has no edges: whether a record may run is
computed from the statuses of those that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from omniq.models import TaskStatus

SUCCESS, FAILED, CANCELLED = TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED
PENDING, RUNNING = TaskStatus.PENDING, TaskStatus.RUNNING


@dataclass
class Node:
    """A record: what it waits for, and what has become of it."""

    id: str
    kind: str = "task"
    parent: str | None = None
    after: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()
    stops: bool = False
    status: TaskStatus = PENDING
    owner: int | None = None
    token: int = 0
    is_suspended: bool = False
    on: tuple[str, ...] = ()
    enough: int | None = None
    until: int | None = None
    has_returned: bool = False
    has_run: bool = False
    cancel_requested: bool = False
    is_stopped: bool = False
    value: object = None


@dataclass
class FlowModel:
    """All records of a store, and the moves."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def add(self, nodes: Iterable[Node]) -> None:
        self.nodes.update({node.id: node for node in nodes})
        self.derive()

    def has_ended(self, task_id: str) -> bool:
        return self.nodes[task_id].status.is_final

    def below(self, task_id: str) -> list[Node]:
        """All records below one, parents first."""
        found: list[Node] = []
        for node in self.nodes.values():
            if node.parent == task_id:
                found += [node, *self.below(node.id)]
        return found

    # What follows from the statuses

    def may_run(self, node: Node, now: int) -> bool:
        """Whether a claim may take it."""
        if node.kind != "task" or node.status is not PENDING or node.has_returned:
            return False
        if node.is_suspended:
            ended = sum(self.has_ended(each) for each in node.on)
            needed = len(node.on) if node.enough is None else node.enough
            return ended >= needed or (node.until is not None and node.until <= now)
        return node.has_run or (
            all(self.nodes[each].status is SUCCESS for each in node.after)
            and all(self.has_ended(each) for each in node.after_any)
        )

    def claimable(self, now: int) -> set[str]:
        return {node.id for node in self.nodes.values() if self.may_run(node, now)}

    def derive(self) -> None:
        """Apply what follows until nothing changes."""
        while sum(self._derive(node) for node in list(self.nodes.values())):
            pass

    def _derive(self, node: Node) -> bool:
        children = [each for each in self.nodes.values() if each.parent == node.id]
        if node.status.is_final:
            # A task that has ended leaves nothing below it.
            return node.kind == "task" and self._cancel_all(self.below(node.id))
        ends_below = node.is_stopped or node.cancel_requested
        if ends_below and self._cancel_all(self.below(node.id)):
            return True
        waits = node.status is PENDING and not node.has_run and not node.is_suspended
        if waits and any(self._has_failed(each) for each in node.after):
            node.status = CANCELLED
            return True
        members = [each for each in children if each.kind != "event"]
        if (
            node.stops
            and not node.is_stopped
            and any(self._has_failed(each.id) for each in members)
        ):
            node.is_stopped = True
            return True
        if any(not each.status.is_final for each in members):
            return False
        if node.kind == "group":
            failed = any(each.status is not SUCCESS for each in members)
            node.status = FAILED if failed else SUCCESS
            if node.cancel_requested:
                node.status = CANCELLED
            return True
        if node.has_returned:
            node.status = SUCCESS
            return True
        return False

    def _has_failed(self, task_id: str) -> bool:
        return self.has_ended(task_id) and self.nodes[task_id].status is not SUCCESS

    def _cancel_all(self, nodes: list[Node]) -> bool:
        return sum(self._cancel_one(node) for node in nodes) > 0

    def _cancel_one(self, node: Node) -> bool:
        if node.status.is_final or node.cancel_requested:
            return False
        live = any(
            each.parent == node.id and not each.status.is_final and each.kind != "event"
            for each in self.nodes.values()
        )
        if node.owner is not None or (node.kind == "group" and live):
            node.cancel_requested = True
        else:
            node.status = CANCELLED
        return True

    # Moves

    def claim(self, task_id: str, owner: int, token: int) -> None:
        node = self.nodes[task_id]
        node.status, node.owner, node.token = RUNNING, owner, token
        node.has_run, node.is_suspended = True, False

    def end(self, task_id: str, status: TaskStatus, value: object = None) -> None:
        """The owner records the end of its run."""
        node = self.nodes[task_id]
        node.owner, node.value = None, value
        if status is SUCCESS and not node.cancel_requested and self._has_live_child(task_id):
            node.status, node.has_returned = PENDING, True
        else:
            node.status = status
        self.derive()

    def _has_live_child(self, task_id: str) -> bool:
        return any(
            each.parent == task_id and each.kind != "event" and not each.status.is_final
            for each in self.nodes.values()
        )

    def give_back(self, task_id: str) -> None:
        """The run ends, and the task runs again."""
        node = self.nodes[task_id]
        node.owner = None
        node.status = CANCELLED if node.cancel_requested else PENDING
        self.derive()

    def suspend(
        self, task_id: str, on: tuple[str, ...], enough: int | None, until: int | None
    ) -> None:
        node = self.nodes[task_id]
        node.is_suspended, node.on, node.enough, node.until = True, on, enough, until
        self.give_back(task_id)

    def complete(self, event_id: str, value: object) -> bool:
        node = self.nodes[event_id]
        if node.status.is_final:
            return False
        node.status, node.value = SUCCESS, value
        self.derive()
        return True

    def cancel(self, task_id: str) -> bool:
        node = self.nodes[task_id]
        if node.status.is_final:
            return False
        self._cancel_one(node)
        self.derive()
        return True
