"""Why a task of a workflow does not run: what it waits for, and what would end that."""

from __future__ import annotations

import shlex

from omniq.models import Task
from omniq.operations.reasons import Reason
from omniq.storage.base import BaseStorage
from omniq.tasks.flow_records import name_of

_MAX_NAMED = 5
_MAX_HOPS = 1_000


async def flow_reasons(storage: BaseStorage, task: Task) -> list[Reason]:
    """The reasons that other records are for the task; none if it waits for nothing."""
    workflow = task.workflow
    if workflow is None:
        return []
    if workflow.has_returned:
        text = f"The function has returned; {workflow.members} of its children have not ended"
        return [Reason(code="waits_for_children", text=text, facts={"children": workflow.members})]
    if workflow.kind == "group":
        if workflow.is_open:
            return [Reason(code="being_built", text="More members are being added to it")]
        text = (
            f"It ends with the last of its members: {workflow.members} of {workflow.size} are live"
        )
        return [Reason(code="waits_for_members", text=text, facts={"members": workflow.members})]
    if workflow.kind == "event":
        return [await _event_reason(storage, task)]
    sources = await storage.sources_of(task.id)
    reasons: list[Reason] = []
    if workflow.follows is not None:
        reasons.append(await _sequence_reason(storage, workflow.sequence or "", workflow.follows))
    ids = [source.id for source in sources if source.id != workflow.follows]
    if not sources:
        return reasons
    circle = await _circle(storage, task.id)
    if circle:
        text = f"These wait for one another, so that none of them ends: {' -> '.join(circle)}"
        hint = f"omniq tasks cancel {shlex.quote(task.id)}"
        return [Reason(code="waits_in_circle", text=text, hint=hint, facts={"circle": circle})]
    if not ids:
        return reasons
    if len(ids) == 1:
        other = await storage.get_task(ids[0])
        if other is not None and other.workflow is not None and other.workflow.kind == "event":
            return [*reasons, await _event_reason(storage, other)]
    named = ", ".join(ids[:_MAX_NAMED]) + (" …" if len(ids) > _MAX_NAMED else "")
    enough = workflow.needs - workflow.holds
    text = f"It waits for {enough} of {len(ids)} others: {named}"
    until = task.eta if workflow.on else None
    hint = f"omniq explain {shlex.quote(ids[0])}"
    facts = {"ids": ids[:100]}
    return [*reasons, Reason(code="waits_for", text=text, until=until, hint=hint, facts=facts)]


async def _sequence_reason(storage: BaseStorage, key: str, before: str) -> Reason:
    """Why a task that is not the first of its sequence waits."""
    facts = {"sequence": key, "follows": before}
    if not before:
        text = (
            f"It is in the sequence {key!r}: it was enqueued in a transaction, and the maintenance of "
            "the next worker gives it its place"
        )
        return Reason(code="waits_in_sequence", text=text, hint="start a worker", facts=facts)
    quoted = shlex.quote(before)
    if await storage.get_dead(before) is not None:
        text = f"The task before it in the sequence {key!r}, {before}, has failed for good and halts it"
        hint = f"omniq dead retry {quoted}, or omniq dead delete {quoted}"
        return Reason(code="sequence_halted", text=text, hint=hint, facts=facts)
    text = f"It is in the sequence {key!r} and runs after {before}"
    hint = f"omniq explain {quoted}"
    return Reason(code="waits_in_sequence", text=text, hint=hint, facts=facts)


async def _event_reason(storage: BaseStorage, event: Task) -> Reason:
    parent = None if event.workflow is None else event.workflow.parent
    name = event.id if parent is None else name_of(event.id)
    target = f"{shlex.quote(parent)} {name}" if parent is not None else f"- {name}"
    prompt = "" if event.workflow is None else event.workflow.prompt
    text = f"It waits for the event {name!r}" + (f": {prompt}" if prompt else "")
    return Reason(
        code="waits_for_event",
        text=text,
        until=event.expires,
        hint=f"omniq flows send {target} VALUE",
        facts={"event": name, "task": parent},
    )


async def _circle(storage: BaseStorage, task_id: str) -> list[str]:
    """The ids of tasks that wait for one another, beginning and ending with this one; else nothing."""
    came_from: dict[str, str] = {}
    left = [task_id]
    for _ in range(_MAX_HOPS):
        if not left:
            return []
        current = left.pop()
        for source in await storage.sources_of(current):
            if source.id == task_id:
                path = [task_id]
                while current != task_id:
                    path.insert(1, current)
                    current = came_from[current]
                return [task_id, *path[1:], task_id]
            if source.id not in came_from:
                came_from[source.id] = current
                left.append(source.id)
    return []
