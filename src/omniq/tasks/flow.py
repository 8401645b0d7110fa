"""`Flow`: calls of functions that wait for one another, to be started as a whole.

`add` and `map` return a placeholder for the result of the new node. It can only be passed to later nodes, which then
wait for the result. For type checkers, it has the result type of the function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

import msgspec

from omniq.errors import InvalidTask
from omniq.models import Ref, Task, TaskWorkflow, check_key
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.flow_records import child_id, group_task, member_id
from omniq.tasks.functions import path_of
from omniq.tasks.results import Results
from omniq.tasks.task_builder import CallOptions, Standing, TaskBuilder, call_options

if TYPE_CHECKING:
    from typing import Unpack

    from omniq.queue.async_queue import EnqueueOptions
    from omniq.tasks.arguments import FunctionTypes
    from omniq.tasks.context import TaskContext

    class NodeOptions(EnqueueOptions, total=False):
        """The options of `flow.options(…)`: those of `queue.options(…)`, `after`, `after_any` and `undo`."""

        undo: Callable[..., Any] | str | None


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

OnFailure = Literal["branch", "stop"]

UNDO = "_undo"
"""The name of the record that undoes the nodes of a flow."""

MAX_NODES = 1_000
"""The most records of a flow that are stored in one step."""

_NOT_OF_NODES = ("interval", "cron", "unique", "task_id", "connection", "reschedule_on_failure")
_OPERATORS = (
    *(
        "__iter__",
        "__len__",
        "__getitem__",
        "__contains__",
        "__bool__",
        "__call__",
        "__add__",
        "__radd__",
    ),
    *(
        "__sub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__int__",
    ),
    *(
        "__float__",
        "__str__",
        "__format__",
        "__index__",
        "__enter__",
        "__await__",
        "__next__",
        "__eq__",
    ),
)


class Result:
    """A placeholder for the result of a node that has not run."""

    __slots__ = ("_flow", "_name")
    __hash__ = object.__hash__

    def __init__(self, flow: Flow, name: str) -> None:
        self._flow = flow
        self._name = name

    def __repr__(self) -> str:
        return f"<the result of node {object.__getattribute__(self, '_name')!r}>"

    def __getattr__(self, name: str) -> Any:
        raise _has_not_run(self)


def _has_not_run(result: Result) -> InvalidTask:
    name = object.__getattribute__(result, "_name")
    return InvalidTask(
        f"this stands for the result of node {name!r}, which has not run: pass it to another node"
    )


def _refuse(self: Result, *_: Any) -> Any:
    raise _has_not_run(self)


for _operator in _OPERATORS:
    setattr(Result, _operator, _refuse)


@dataclass(slots=True)
class _Node:
    name: str
    func: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: CallOptions
    after: list[str]
    after_any: list[str]
    undo: str | None = None
    items: Any = None
    is_map: bool = False
    has_waiters: bool = field(default=False)


class NodeAdder(ABC):
    """Adds nodes to a flow, with fixed options. A `Flow` is one, and `flow.options(…)` returns one."""

    _call: CallOptions

    @overload
    def add(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    @overload
    def add(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    @overload
    def add(
        self,
        name: str,
        func: Callable[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    @overload
    def add(self, name: str, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def add(self, name: str, func: str, /, *args: Any, **kwargs: Any) -> Any: ...

    def add(self, name: str, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Add a call of the function, and return a placeholder for its result."""
        return self._add(_Node(name, func, args, kwargs, self._call, [], []))

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, T, P], Coroutine[Any, Any, R]],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]: ...

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]: ...

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[T, P], R],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]: ...

    @overload
    def map(
        self, name: str, func: str, over: Iterable[Any], /, *args: Any, **kwargs: Any
    ) -> Any: ...

    def map(self, name: str, func: Any, over: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Add a call for each item; returns a placeholder for the list of results.

        The list of items may be the result of a node.
        """
        items = over if isinstance(over, Result) else _listed(over)
        return self._add(
            _Node(name, func, args, kwargs, self._call, [], [], items=items, is_map=True)
        )

    @abstractmethod
    def _add(self, node: _Node) -> Any:
        """Add the node, and return a placeholder for its result."""


class Flow(NodeAdder):
    """A graph of calls that wait for one another. `queue.start(flow)` stores all of them.

    If a node fails, the nodes that need it are cancelled; with `on_failure="stop"` all other nodes, too. The flow
    then ends as FAILED. After `timeout`, nodes that have not begun are cancelled. The flow and its nodes are kept
    for `result_ttl` after its end. Nodes without a queue run in `queue`.
    """

    def __init__(
        self,
        name: str = "",
        *,
        on_failure: OnFailure = "branch",
        timeout: Duration | None = None,
        result_ttl: Duration | None = None,
        queue: str | None = None,
    ) -> None:
        if on_failure not in ("branch", "stop"):
            raise InvalidTask(f"on_failure {on_failure!r}: expected 'branch' or 'stop'")
        if name:
            check_key("flow name", name)
        self.name = name
        self._stops = on_failure == "stop"
        self._timeout = None if timeout is None else seconds_of("timeout", timeout)
        self._ttl = None if result_ttl is None else seconds_of("result_ttl", result_ttl)
        self._queue = queue
        self._call = call_options()
        self._nodes: dict[str, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def options(self, **options: Unpack[NodeOptions]) -> FlowOptions:
        """Return `add` and `map` with options for the next node.

        `after`: nodes that must have succeeded; `after_any`: nodes that must have ended. Both take
        placeholders that `add` and `map` have returned, or names. `undo` is called with the node's result if the
        flow fails or is cancelled later.
        """
        return FlowOptions(self, dict(options))

    @classmethod
    def chain(cls, *calls: Any, **options: Any) -> Flow:
        """A flow of consecutive calls; each gets the result of the previous call as its first argument.

        A call is a function, or a tuple of a function and further arguments.
        """
        flow = cls(**options)
        result: Any = None
        for number, call in enumerate(calls):
            func, *args = call if isinstance(call, tuple) else (call,)
            given = args if number == 0 else [result, *args]
            result = flow.add(flow._free_name(func), func, *given)
        return flow

    @classmethod
    def group(cls, func: Any, items: Iterable[Any], /, *args: Any, **options: Any) -> Flow:
        """A flow of one call for each item; its result is the list of their results."""
        flow = cls(**options)
        flow.map(flow._free_name(func), func, items, *args)
        return flow

    def _free_name(self, func: Any) -> str:
        name = (func if isinstance(func, str) else path_of(func)).rpartition(".")[2][:50]
        name = name.lstrip("_") or "call"
        number, free = 1, name
        while free in self._nodes:
            number += 1
            free = f"{name}-{number}"
        return free

    # Nodes

    def _add(self, node: _Node) -> Any:
        child_id("", node.name)
        if node.name in self._nodes:
            raise InvalidTask(f"node {node.name!r} is in this flow already; give each its own name")
        for value in (node.args, node.kwargs, node.items):
            for result in _results_in(value):
                name = self._name_of(result)
                if name not in node.after:
                    node.after.append(name)
        self._nodes[node.name] = node
        for source in (*node.after, *node.after_any):
            self._nodes[source].has_waiters = True
        return Result(self, node.name)

    def _name_of(self, source: Any) -> str:
        if isinstance(source, Result):
            name = cast(str, object.__getattribute__(source, "_name"))
            if object.__getattribute__(source, "_flow") is not self:
                raise InvalidTask(f"{source!r} belongs to another flow")
            return name
        if not isinstance(source, str) or source not in self._nodes:
            raise InvalidTask(f"{source!r}: expected a node of this flow")
        return source

    def sinks(self) -> list[str]:
        """The names of the nodes that no other waits for."""
        return [node.name for node in self._nodes.values() if not node.has_waiters]

    # Building

    def build(
        self, flow_id: str, builder: TaskBuilder, now: datetime, unique: str | None
    ) -> list[Task]:
        """The records of the flow, the root first. Raises `InvalidTask` if they cannot be stored."""
        if not self._nodes:
            raise InvalidTask("the flow is empty: add at least one node")
        expires = None if self._timeout is None else now + timedelta(seconds=self._timeout)
        root = group_task(
            flow_id,
            stops=self._stops,
            unique=unique,
            task_type=self.name or None,
            result_ttl=self._ttl,
            queue=self._queue or "default",
            created_at=now,
            metadata={"sinks": self.sinks()},
        )
        tasks = [root]
        for node in self._nodes.values():
            tasks += self._node_tasks(flow_id, node, builder, now, expires)
        undone = {node.name: node.undo for node in self._nodes.values() if node.undo is not None}
        if undone:
            tasks.append(self._undo_task(flow_id, undone, now))
        return tasks

    def _node_tasks(
        self,
        flow_id: str,
        node: _Node,
        builder: TaskBuilder,
        now: datetime,
        expires: datetime | None,
    ) -> list[Task]:
        node_id = child_id(flow_id, node.name)
        if not node.is_map:
            return [self._task(flow_id, flow_id, node_id, node, node.args, builder, now, expires)]
        group = group_task(node_id, flow_id, queue=self._queue or "default", created_at=now)
        if isinstance(node.items, Result):
            first_id = f"{node_id}._map"
            args = (node.items, *node.args)
            task = self._task(flow_id, node_id, first_id, node, args, builder, now, expires)
            return [group, _with(task, action="map")]
        return [
            group,
            *(
                self._task(
                    flow_id,
                    node_id,
                    member_id(node_id, number),
                    node,
                    (item, *node.args),
                    builder,
                    now,
                    expires,
                )
                for number, item in enumerate(node.items)
            ),
        ]

    def _task(
        self,
        flow_id: str,
        parent: str,
        task_id: str,
        node: _Node,
        args: tuple[Any, ...],
        builder: TaskBuilder,
        now: datetime,
        expires: datetime | None,
    ) -> Task:
        task = build_node(builder, node.func, args, node.kwargs, node.call, now, f"{flow_id}.")
        given = task.workflow or TaskWorkflow()
        workflow = TaskWorkflow(
            parent=parent,
            after=tuple(f"{flow_id}.{name}" for name in node.after),
            after_any=tuple(f"{flow_id}.{name}" for name in node.after_any),
            refs=given.refs,
            undo=node.undo,
            sequence=given.sequence,
            halts=given.halts,
        )
        if task.interval is not None or task.cron is not None:
            raise InvalidTask(f"node {node.name!r}: a task that repeats cannot be a node of a flow")
        queue = task.queue
        if self._queue is not None and "queue" not in node.call.options.given():
            queue = self._queue
        return msgspec.structs.replace(
            task,
            id=task_id,
            unique=None,
            workflow=workflow,
            queue=queue,
            expires=task.expires if expires is None else min(task.expires or expires, expires),
        )

    def _undo_task(self, flow_id: str, undone: Mapping[str, str], now: datetime) -> Task:
        nodes = tuple(f"{flow_id}.{name}" for name in self._nodes)
        if len(nodes) >= MAX_NODES:
            raise InvalidTask(f"a flow with undo has {MAX_NODES - 1} nodes at most")
        workflow = TaskWorkflow(parent=flow_id, after_any=nodes, survives=True, action="undo")
        # Any worker that has one of the functions can run it.
        return Task(
            id=f"{flow_id}.{UNDO}",
            func_path=next(iter(undone.values())),
            kwargs=dict(undone),
            queue=self._queue or "default",
            created_at=now,
            workflow=workflow,
        )


class FlowOptions(NodeAdder):
    """What `flow.options(…)` returns."""

    def __init__(self, flow: Flow, options: dict[str, Any]) -> None:
        self._flow = flow
        self._after = [flow._name_of(each) for each in _sources(options.pop("after", ()))]
        self._after_any = [flow._name_of(each) for each in _sources(options.pop("after_any", ()))]
        undo = options.pop("undo", None)
        self._undo = None if undo is None else path_of(undo)
        for name in _NOT_OF_NODES:
            if options.get(name) is not None:
                raise InvalidTask(f"flow.options({name}=…): a node of a flow cannot have it")
        self._call = call_options(**options)

    def _add(self, node: _Node) -> Any:
        node.after, node.after_any, node.undo = list(self._after), list(self._after_any), self._undo
        return self._flow._add(node)


def build_node(
    builder: TaskBuilder,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: CallOptions,
    now: datetime,
    prefix: str,
) -> Task:
    """The task of a call, with `refs` in place of the placeholders in its arguments."""
    standing_args = tuple(Standing(each) if _has_result(each) else each for each in args)
    standing = {
        name: Standing(each) if _has_result(each) else each for name, each in kwargs.items()
    }
    task = builder.build(func, standing_args, standing, call, now, in_flow=True)
    refs: list[Ref] = []
    stored = tuple(_stored(each, (at,), prefix, refs) for at, each in enumerate(task.args))
    named = {name: _stored(each, (name,), prefix, refs) for name, each in task.kwargs.items()}
    refs = [_paged(ref, builder.types_of(func), task.func_path) for ref in refs]
    workflow = task.workflow
    if refs:
        workflow = msgspec.structs.replace(workflow or TaskWorkflow(), refs=tuple(refs))
    return msgspec.structs.replace(task, args=stored, kwargs=named, workflow=workflow)


def _paged(ref: Ref, types: FunctionTypes | None, name: str) -> Ref:
    """The ref, for a parameter that may be annotated `Results[…]`."""
    is_whole = len(ref.path) == 1
    takes_results = is_whole and types is not None and types.takes_results(ref.path[0])
    if ref.is_paged and not (takes_results or (is_whole and types is None)):
        raise InvalidTask(
            f"{name}: the argument {ref.path[0]!r} is Results.of(…), but its parameter is not annotated "
            "Results[…]: pass the placeholder itself, or change the annotation"
        )
    return msgspec.structs.replace(ref, is_paged=ref.is_paged or takes_results)


def _stored(value: Any, path: tuple[int | str, ...], prefix: str, refs: list[Ref]) -> Any:
    """The value without its placeholders, each of which becomes a ref."""
    if isinstance(value, Standing):
        value = value.value
    is_paged = isinstance(value, Results)
    source = value.values if is_paged else value
    if isinstance(source, Result):
        refs.append(Ref(path, prefix + object.__getattribute__(source, "_name"), is_paged))
        return None
    if type(value) in (list, tuple) and _has_result(value):
        return [_stored(each, (*path, at), prefix, refs) for at, each in enumerate(value)]
    if type(value) is dict and _has_result(value):
        return {key: _stored(each, (*path, key), prefix, refs) for key, each in value.items()}
    return value


def _results_in(value: Any) -> Iterable[Result]:
    if isinstance(value, Result):
        yield value
    elif isinstance(value, Results):
        if isinstance(value.values, Result):
            yield value.values
    elif type(value) in (list, tuple):
        for each in value:
            yield from _results_in(each)
    elif type(value) is dict:
        for each in value.values():
            yield from _results_in(each)


def _has_result(value: Any) -> bool:
    return next(iter(_results_in(value)), None) is not None


def _sources(given: Any) -> Sequence[Any]:
    return (given,) if isinstance(given, str | Result) else tuple(given)


def _listed(over: Any) -> list[Any]:
    if isinstance(over, str | bytes | Mapping) or not isinstance(over, Iterable):
        raise InvalidTask("map: expected a list of items, or the result of a node")
    return list(over)


def _with(task: Task, **fields: Any) -> Task:
    assert task.workflow is not None
    return msgspec.structs.replace(task, workflow=msgspec.structs.replace(task.workflow, **fields))
