"""Whether the code here can make a stored call: what a worker would find out when it claims the task.

Nothing is run but upcasters, and the constructors of the types in annotations.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask
from omniq.models import Task
from omniq.tasks.functions import FunctionCache
from omniq.tasks.signature import Callee, callee_of
from omniq.tasks.versions import ANY_VERSION, WrongSignature

ProblemKind = Literal[
    "missing",
    "not run here",
    "signature",
    "types",
    "newer version",
    "no upcaster",
    "upcaster",
    "undo",
    "unreadable",
    "newer omniq",
    "declaration",
]

_MOST_KNOWN = 10_000
"""How many functions, and how many shapes of calls, are remembered at most."""


class Misfit(NamedTuple):
    """Why a call cannot be made: the kind of problem, and what a worker says about it."""

    problem: ProblemKind
    detail: str


_Shape = tuple[str, int, int, tuple[str, ...]]


class CallCheck:
    """Checks calls against the functions that a worker with these modules has.

    A call of a function without types and upcasters is judged by its shape: how many arguments it has, and
    their names. Such calls are checked once for each shape.
    """

    def __init__(self, functions: FunctionCache) -> None:
        self._functions = functions
        self._callees: dict[str, Callee | Misfit] = {}
        self._shapes: dict[_Shape, Misfit | None] = {}

    def why_not(self, task: Task) -> Misfit | None:
        """Why the code cannot make this call; None if it can."""
        workflow = task.workflow
        if workflow is not None and workflow.kind != "task":
            # The record of a group or of an event never runs.
            return None
        callee = self._callee(task.func_path)
        if isinstance(callee, Misfit):
            return callee
        if workflow is not None:
            return self._why_not_node(task, callee)
        if callee.types.converts_arguments or task.version != callee.version:
            return _why_unfit(task, callee)
        shape = (task.func_path, task.version, len(task.args), tuple(task.kwargs))
        if shape not in self._shapes:
            if len(self._shapes) >= _MOST_KNOWN:
                self._shapes.clear()
            self._shapes[shape] = _why_unfit(task, callee)
        return self._shapes[shape]

    def _why_not_node(self, task: Task, callee: Callee) -> Misfit | None:
        """Of a part of a workflow: its arguments may be results that do not exist yet."""
        workflow = task.workflow
        assert workflow is not None
        undos = [workflow.undo] if workflow.undo is not None else []
        if workflow.action == "undo":
            undos += list(task.kwargs.values())
        for path in undos:
            if isinstance(found := self._callee(path), Misfit):
                return Misfit("undo", found.detail)
        if workflow.action == "undo":
            # Its own arguments are the paths of functions.
            return None
        if not workflow.refs:
            return _why_unfit(task, callee)
        if (wrong := _wrong_version(task, callee)) is not None:
            return wrong
        return _wrong_shape(task, callee) if task.version == callee.version else None

    def _callee(self, func_path: str) -> Callee | Misfit:
        found = self._callees.get(func_path)
        if found is None:
            if len(self._callees) >= _MOST_KNOWN:
                self._callees.clear()
            found = self._callees[func_path] = self._find(func_path)
        return found

    def _find(self, func_path: str) -> Callee | Misfit:
        try:
            return callee_of(self._functions.resolve(func_path), func_path)
        except ForbiddenFunction as error:
            return Misfit("not run here", error.why)
        except FunctionNotFound as error:
            return Misfit("missing", error.why)
        except InvalidTask as error:
            return Misfit("not run here", str(error))


def _why_unfit(task: Task, callee: Callee) -> Misfit | None:
    """Compare the version, the number and names of the arguments, and their types."""
    if (wrong := _wrong_version(task, callee)) is not None:
        return wrong
    try:
        call = task if task.version == callee.version else callee.upcast(task)
    except WrongSignature as error:
        return Misfit("upcaster", str(error))
    if (wrong := _wrong_shape(call, callee)) is not None:
        return wrong
    if not callee.types.converts_arguments:
        return None
    try:
        callee.types.load(call.args, call.kwargs)
    except Exception as error:
        # The constructor of a type is the user's code, and its message may quote the arguments.
        is_ours = isinstance(error, InvalidTask)
        return Misfit("types", str(error) if is_ours else f"a type raised {type(error).__name__}")
    return None


def _wrong_version(task: Task, callee: Callee) -> Misfit | None:
    stored, wanted = task.version, callee.version
    if stored > wanted:
        return Misfit(
            "newer version",
            f"the arguments are of version {stored}, and the code has version {wanted}",
        )
    if stored == ANY_VERSION:
        return None
    gap = next((each for each in range(stored, wanted) if each not in callee.upcasters), None)
    if gap is None:
        return None
    return Misfit(
        "no upcaster",
        f"the arguments are of version {stored}, the code has version {wanted}, and no upcaster leads from "
        f"version {gap} to {gap + 1}",
    )


def _wrong_shape(task: Task, callee: Callee) -> Misfit | None:
    try:
        callee.types.check(task.args, task.kwargs)
    except InvalidTask as error:
        return Misfit("signature", str(error))
    return None
