"""What a worker does for a node of a flow besides calling its function.

It puts the results of other nodes into the arguments. For a `map` it adds a task for each item of a result;
for an `undo` it calls what undoes the nodes of a flow that did not succeed, the last one first.
"""

from __future__ import annotations

from typing import Any, Literal, assert_never

import msgspec

from omniq.models import ChildrenFailed, PermanentError, Ref, Task, TaskStatus, TaskWorkflow
from omniq.tasks.context import TaskContext
from omniq.tasks.flow_records import member_id, with_values
from omniq.tasks.results import Results, stored_results
from omniq.tasks.versions import ANY_VERSION

_AT_ONCE = 500
"""Tasks of a map that are stored in one step."""


async def with_results(task: Task, context: TaskContext) -> Task:
    """The task with the results of other records in its arguments."""
    assert task.workflow is not None
    refs = [ref for ref in task.workflow.refs if not ref.is_paged]
    ids = list(dict.fromkeys(ref.id for ref in refs))
    values = await context._services.flows.values_of(ids) if ids else {}
    missing = [each for each in ids if each not in values]
    if missing:
        raise PermanentError(
            f"the result of {missing[0]} is gone, which is an argument of this task: its record was deleted"
        )
    return with_pages(with_values(task, refs, values), context)


def with_pages(task: Task, context: TaskContext) -> Task:
    """The task with `Results` in place of the results that it reads in pages."""
    refs = [ref for ref in task.workflow.refs if ref.is_paged] if task.workflow is not None else []
    values = {ref.id: stored_results(ref.id, context._services) for ref in refs}
    return with_values(task, refs, values) if refs else task


def without_pages(task: Task) -> Task:
    """The task for another process, in which `with_pages` puts its `Results` back."""
    given: list[tuple[int | str, Any]] = [*enumerate(task.args), *task.kwargs.items()]
    found = [
        Ref((place,), value.group_id, is_paged=True)
        for place, value in given
        if isinstance(value, Results)
    ]
    if not found:
        return task
    workflow = msgspec.structs.replace(task.workflow or TaskWorkflow(), refs=tuple(found))
    blank = with_values(task, found, dict.fromkeys(ref.id for ref in found))
    return msgspec.structs.replace(blank, workflow=workflow)


async def do_action(action: Literal["map", "undo"], task: Task, context: TaskContext) -> Any:
    """Do what the action of the task says, and return its result."""
    match action:
        case "map":
            return await _map(task, context)
        case "undo":
            return await _undo(task, context)
        case _:
            assert_never(action)


async def _map(task: Task, context: TaskContext) -> int:
    workflow = task.workflow
    assert workflow is not None
    assert workflow.parent is not None
    refs = [ref for ref in workflow.refs if ref.path[0] == 0]
    others = tuple(ref for ref in workflow.refs if ref.path[0] != 0)
    items_only = msgspec.structs.replace(
        task, workflow=msgspec.structs.replace(workflow, refs=tuple(refs))
    )
    items = (await with_results(items_only, context)).args[0]
    if not isinstance(items, list | tuple | set | frozenset):
        raise PermanentError(f"map: the result is of type {type(items).__name__}, and not a list")
    flows = context._services.flows
    group = workflow.parent
    member = TaskWorkflow(
        parent=group,
        refs=others,
        undo=workflow.undo,
        sequence=workflow.sequence,
        halts=workflow.halts,
    )
    listed = list(items)
    for start in range(0, len(listed), _AT_ONCE):
        part = [
            msgspec.structs.replace(
                task,
                id=member_id(group, start + at),
                args=(item, *task.args[1:]),
                workflow=member,
                status=TaskStatus.PENDING,
                **_UNRUN,
            )
            for at, item in enumerate(listed[start : start + _AT_ONCE])
        ]
        await flows.add_children(task, part, f"map {task.id}")
    return len(listed)


_UNRUN: dict[str, Any] = {
    "attempts": 0,
    "crashes": 0,
    "releases": 0,
    "token": 0,
    "owner": None,
    "started_at": None,
    "eta": None,
}
"""The state of a task that was not claimed yet."""


async def _undo(task: Task, context: TaskContext) -> list[str]:
    workflow = task.workflow
    assert workflow is not None
    assert workflow.parent is not None
    flows = context._services.flows
    results = await flows.results_of(workflow.after_any)
    if all(result.status is TaskStatus.SUCCESS for result in results.values()):
        return []
    flow_id = workflow.parent
    paths = {f"{flow_id}.{name}": path for name, path in task.kwargs.items()}
    done = [
        result
        for result in results.values()
        if result.status is TaskStatus.SUCCESS and result.task_id in paths
    ]
    done.sort(key=lambda each: (each.finished_at is not None, each.finished_at), reverse=True)
    failures: list[str] = []
    undone: list[str] = []
    for result in done:
        name = result.task_id.removeprefix(f"{flow_id}.")
        undo = Task(
            id=f"{task.id}.{name}",
            func_path=paths[result.task_id],
            args=(None,),
            queue=task.queue,
            created_at=task.created_at,
            # The result of a node is no call that a version was stored with.
            version=ANY_VERSION,
            workflow=TaskWorkflow(parent=task.id, refs=(Ref((0,), result.task_id),)),
        )
        await flows.add_children(task, [undo], "undo")
        try:
            await context._wait([undo.id], None, None, False)
            undone.append(name)
        except ChildrenFailed as error:
            failures.append(str(error))
    if failures:
        raise ChildrenFailed(f"{len(failures)} of {len(done)} could not be undone: {failures[0]}")
    return undone
