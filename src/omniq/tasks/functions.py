"""From a function to its path and back: `@task`, `path_of`, and which functions may be called.

A stored task names its function by a dotted path. Every program that can write to the storage
chooses such paths, so `FunctionCache` decides which of them become calls.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar, overload

from omniq._deprecation import callers_level
from omniq.errors import (
    ForbiddenFunction,
    FunctionNotFound,
    InvalidTask,
    SettingsError,
    UnmarkedFunctionWarning,
)
from omniq.models import BreakerRule, Limit, OnConflict, Runnable, check_func_path
from omniq.retry import Backoff
from omniq.tasks.batches import batch_of
from omniq.tasks.declared_schedules import DeclaredSchedule
from omniq.tasks.durations import Duration
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.function_lookup import (
    MARK,
    MARKED,
    NOT_IMPORTED,
    FoundFunction,
    attribute_of,
    check_path,
    file_of,
    import_named,
    imported_function,
    is_installed,
    is_main,
    is_path,
    is_refused,
    loaded_function,
    main_name,
    marked_methods,
    why_main_is_unfit,
    why_unfit,
)
from omniq.tasks.options import (
    Executor,
    Hook,
    SequenceOnFailure,
    SuccessHook,
    TaskOptions,
    check_options,
)
from omniq.tasks.passed_functions import PASSED, PassedFunctions
from omniq.tasks.versions import Upcasters

_F = TypeVar("_F", bound=Callable[..., Any])

MAX_EXCLUDED = 100
"""How many functions a worker excludes by name: each of its claims and heartbeats carries them."""

_NO_OPTIONS = TaskOptions()


@overload
def task(func: _F, /) -> _F: ...


@overload
def task(
    *,
    queue: str | None = ...,
    priority: int | None = ...,
    max_retries: int | None = ...,
    max_crashes: int | None = ...,
    retry: Backoff | Sequence[Duration] | None = ...,
    timeout: Duration | None = ...,
    executor: Executor | None = ...,
    breaker: str | BreakerRule | Iterable[str | BreakerRule] | None = ...,
    rate: str | tuple[int, Duration] | None = ...,
    max_running: int | None = ...,
    limit_key: str | Callable[..., str] | None = ...,
    cost: float | Callable[..., float] | None = ...,
    limits: Iterable[Limit] | Callable[..., Iterable[Limit]] | None = ...,
    sequence: str | Callable[..., str] | None = ...,
    sequence_on_failure: SequenceOnFailure | None = ...,
    fair_key: str | Callable[..., str] | None = ...,
    fair_weight: float | Callable[..., float] | None = ...,
    ageing: Duration | None = ...,
    cron: str | None = ...,
    tz: str | None = ...,
    interval: Duration | None = ...,
    reschedule_on_failure: bool | None = ...,
    expires: Duration | None = ...,
    result_ttl: Duration | None = ...,
    unique: str | Callable[..., str] | bool | None = ...,
    on_conflict: OnConflict | None = ...,
    max_wait: Duration | None = ...,
    unique_for: Duration | None = ...,
    errors: ErrorRules | None = ...,
    on_success: SuccessHook | None = ...,
    on_failure: Hook | None = ...,
    on_dead: Hook | None = ...,
    name: str | None = ...,
    aliases: Iterable[str] | None = ...,
    version: int | None = ...,
    upcasters: Upcasters | None = ...,
    schedules: DeclaredSchedule | Iterable[DeclaredSchedule] | None = ...,
    task_type: str | None = ...,
    metadata: Mapping[str, Any] | None = ...,
) -> Callable[[_F], _F]: ...


def task(func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Mark a function as a task and store its options on it. It stays a plain function.

    Nothing is opened and nothing is registered. Tasks are stored under the `name`, or the path of the
    function without one; a worker also runs those that are stored under `aliases`. `rate` is text such
    as "10/s", "100/5m", or (10, seconds). `errors` says after which exceptions a retry may help.
    `on_success(task, result)` is called after a run that succeeded, `on_failure(task, error)` after
    every failed run, and `on_dead(task, error)` when the task fails for good. Raises
    `InvalidTask` for wrong options; `omniq.tasks.options` has the table of all options.
    """
    checked = check_options(**options)

    def mark(func: _F) -> _F:
        if reason := why_unfit(func):
            raise InvalidTask(f"@task on {_name_of(func)}: {reason}")
        batch = batch_of(func)
        if batch is not None and batch.takes_contexts and checked.executor == "process":
            raise InvalidTask(
                f"@task on {_name_of(func)}: a child process has no contexts of a batch; leave the "
                "parameter out, or run the function in a thread"
            )
        setattr(func, MARK, checked)
        return func

    return mark if func is None else mark(func)


def options_of(func: Callable[..., Any]) -> TaskOptions:
    """Return the options of the function's `@task`; a plain function has none."""
    options = getattr(func, MARK, _NO_OPTIONS)
    return options if isinstance(options, TaskOptions) else _NO_OPTIONS


def functions_in(source: ModuleType | Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the function, or those that a module defines."""
    if not isinstance(source, ModuleType):
        return [source]
    own = [
        value
        for value in vars(source).values()
        if isinstance(value, FunctionType) and value.__module__ == source.__name__
    ]
    return [*own, *marked_methods(source)]


def path_of(func: Callable[..., Any] | str) -> str:
    """Return the name of the function, or its dotted path; a worker finds it by that.

    Text is only checked.

    Raises `InvalidTask` for an object without such a path, and `SettingsError` for a name that two
    functions have; the message says what to do instead.
    """
    if isinstance(func, str):
        check_func_path(func)
        return func
    path = own_path_of(func)
    name = options_of(func).name
    if name is None:
        return path
    _check_free(name, MARKED.paths_of(name) or [path])
    return name


def own_path_of(func: Callable[..., Any]) -> str:
    """The path from which a worker imports the function, whatever its name."""
    if not callable(func):
        raise InvalidTask(not_a_function(func))
    if reason := why_unfit(func) or _why_unreachable(func):
        raise InvalidTask(f"{_name_of(func)} cannot be a task: {reason}")
    module = main_name() if is_main(func.__module__) else func.__module__
    if module is None:
        raise InvalidTask(f"{_name_of(func)} cannot be a task: {why_main_is_unfit()}")
    if is_refused(module):
        raise InvalidTask(
            f"{_name_of(func)} cannot be a task: functions of {module} are never run; "
            "enqueue one of your functions that calls it"
        )
    return f"{module}.{func.__qualname__}"


def _check_free(name: str, paths: Sequence[str]) -> None:
    """Raise `SettingsError` if the name of the function at these paths also means another function."""
    if len(paths) > 1:
        raise SettingsError(
            f"two functions have the name {name}: {paths[0]} and {paths[1]}; give one of them another "
            "name"
        )
    try:
        loaded_function(name)
    except FunctionNotFound:
        # Nothing that could run, or an import of the same function in an older place.
        return
    if [name] != list(paths):
        raise SettingsError(
            f"{paths[0]} has the name {name}, which is the path of another function; give it "
            "another name"
        )


def not_a_function(value: object) -> str:
    """Why this cannot be enqueued: most often, a function was called instead of passed."""
    if inspect.iscoroutine(value):
        name = value.__name__
        # Python would warn that it was never awaited, which is not the mistake.
        value.close()
        return f"{name} was called: pass the function and its arguments, as in enqueue({name}, …)"
    return (
        f"it is not a function but {type(value).__name__}; was the function called? Pass it and its "
        "arguments, as in enqueue(func, …)"
    )


def pass_to_queue(
    func: Callable[..., Any] | str, func_path: str, passed: PassedFunctions = PASSED
) -> None:
    """Note that this process has passed the function to a queue: its own pools may then run it.

    Warns when other workers will not. A function with a name is noted by its path: a name is none, and
    nothing is imported by it.
    """
    path = func_path if isinstance(func, str) else own_path_of(func)
    if path not in passed:
        if warning := why_not_elsewhere(func, func_path):
            code = getattr(func, "__code__", None)
            if code is None:
                warnings.warn(warning, UnmarkedFunctionWarning, stacklevel=callers_level())
            else:
                # The place to mend. The call may also be in another thread, that of the synchronous API.
                place = code.co_filename, code.co_firstlineno
                warnings.warn_explicit(warning, UnmarkedFunctionWarning, *place)
        passed.add(path)


def why_not_elsewhere(func: Callable[..., Any] | str, func_path: str) -> str | None:
    """Why a worker in another process may not run the function; None if that is not known."""
    try:
        found = loaded_function(func_path if isinstance(func, str) else own_path_of(func))
    except ForbiddenFunction as error:
        return None if isinstance(func, str) else f"no worker will run {func_path}: {error.why}"
    except FunctionNotFound:
        # A path of which this process does not have the module.
        return None
    if found.is_marked:
        return None
    return (
        f"{func_path}: mark it with @task, or a worker in another process, or after a restart, "
        f"will not run it, unless the worker names the module {found.module}"
    )


class FunctionCache:
    """Turns paths into functions, for one worker, and decides which it may run.

    Without `allow`: functions marked with `@task` in modules that the program has imported, and what
    this process has passed to a queue, but nothing unmarked of omniq or of an installed package. With
    `allow`: the marked and the public functions that the named modules define, and marked ones in
    modules below them; a name may also be the path of one function.

    Never: private names, what a module has only imported from another, the standard library, and
    objects that are not plain functions. Static methods (`pkg.mod.Class.method`), and objects of a
    framework with `__omniq_function__()`, count as functions. Nothing is imported because a stored
    task names it.
    """

    def __init__(
        self, allow: Iterable[str] | None = None, passed: PassedFunctions = PASSED
    ) -> None:
        if isinstance(allow, str):
            raise InvalidTask(
                f"allow={allow!r}: expected a list of prefixes, such as ['pkg.tasks']"
            )
        self._allow = None if allow is None else tuple(allow)
        self._passed = passed
        self._marked = MARKED
        self._found: dict[str, Callable[..., Any]] = {}
        self._excluded: dict[str, str] = {}
        self._failed_imports: dict[str, str] | None = None
        # The paths of the functions that have a name, by name. Replaced, never changed.
        self._paths: dict[str, str] = {}
        # Of the names that were resolved: they mean the same function from then on.
        self._own_paths: dict[str, str] = {}
        self._lock = threading.Lock()
        self._seen = -1
        self._seen_marked: frozenset[str] | None = None
        # Replaced, never changed: any thread may read it.
        self._runnable = Runnable()
        self._update(self._marked.paths())

    @property
    def is_open(self) -> bool:
        """Whether no modules were named: what the program imports and enqueues decides."""
        return self._allow is None

    @property
    def description(self) -> str:
        """What it runs, for people: the named modules, each with its file."""
        if self._allow is None:
            return "functions that are marked with @task, or enqueued here"
        return ", ".join(f"{name} ({file_of(name)})" for name in self._allow)

    @property
    def runnable(self) -> Runnable:
        """The functions to claim: all that may run, without what was found missing. From any thread."""
        if self._allow is None:
            marked = self._marked.paths()
            if marked is not self._seen_marked or len(self._passed) != self._seen:
                self._update(marked)
        return self._runnable

    def refresh(self) -> None:
        """Search again for marked functions, also in modules that have changed since their import."""
        self._update(self._marked.search())

    def refresh_sometimes(self) -> None:
        """As `refresh`, but with a search that is at most ten seconds old."""
        self._update(self._marked.search_sometimes())

    def check_names(self) -> None:
        """Raise `SettingsError` for a name of `@task` that means two functions."""
        for name, paths in self._marked.named.items():
            if mine := self._mine(paths):
                _check_free(name, mine)

    def own_path(self, func_path: str) -> str:
        """The path from which to import the function, if `func_path` is a name; else the same text."""
        return self._own_paths.get(func_path) or self._paths.get(func_path, func_path)

    def _mine(self, paths: Sequence[str]) -> Sequence[str]:
        return paths if self._allow is None else [path for path in paths if self._names(path)]

    def _update(self, marked: frozenset[str]) -> None:
        with self._lock:
            excluded = frozenset(self._excluded)
            named = {name: self._mine(paths) for name, paths in self._marked.named.items()}
            self._paths = {name: paths[0] for name, paths in named.items() if len(paths) == 1}
            if self._allow is not None:
                # What was given may also be the path of one function.
                names = frozenset(self._allow).union(self._paths)
                if (names, excluded) != (self._runnable.names, self._runnable.excluded):
                    self._runnable = Runnable(modules=self._allow, names=names, excluded=excluded)
                return
            self._seen, self._seen_marked = len(self._passed), marked
            names = marked.union(filter(_may_run, self._passed), self._paths) - excluded
            if (names, excluded) != (self._runnable.names, self._runnable.excluded):
                self._runnable = Runnable(names=names, excluded=excluded)

    def import_allowed(self) -> list[FunctionNotFound]:
        """Import the modules that `allow` names; returns the error of each that cannot be imported."""
        errors = list(self._import_allowed())
        self._failed_imports = {error.func_path: error.why for error in errors}
        self.refresh()
        return errors

    def _import_allowed(self) -> Iterator[FunctionNotFound]:
        for name in self._allow or ():
            try:
                import_named(name)
            except FunctionNotFound as error:
                failed = error
            except BaseException as error:
                # The import runs user code, which may raise anything.
                failed = FunctionNotFound(name, f"importing it failed: {error!r}")
            else:
                continue
            yield failed

    def resolve(self, func_path: str) -> Callable[..., Any]:
        """Return the function at that path.

        Raises `ForbiddenFunction` when it must not run here, and `FunctionNotFound` when it does
        not exist; `elsewhere` on either says that another worker may have it.
        """
        func = self._found.get(func_path)
        if func is None:
            if (reason := self._excluded.get(func_path)) is not None:
                raise FunctionNotFound(func_path, reason, elsewhere=True)
            func = self._found[func_path] = self._find(func_path)
        return func

    @property
    def found(self) -> KeysView[str]:
        """The paths that were resolved before."""
        return self._found.keys()

    def is_excluded(self, func_path: str) -> bool:
        """Whether the function was found missing before."""
        return func_path in self._excluded

    def exclude(self, func_path: str, reason: str) -> bool:
        """Claim no more tasks of a function that cannot run in this process, as long as it lives.

        Returns False for one that is not excluded: there are too many, or the path is malformed.
        """
        if func_path not in self._excluded:
            if len(self._excluded) >= MAX_EXCLUDED or not is_path(func_path):
                return False
            self._excluded[func_path] = reason
            self.refresh()
        return True

    def _find(self, func_path: str) -> Callable[..., Any]:
        if (own_path := self._paths.get(func_path)) is not None:
            self._own_paths[func_path] = own_path
            func_path = own_path
        elif len(several := self._mine(self._marked.named.get(func_path, ()))) > 1:
            # Found when a module was imported later: it could be either. Nor is it a path.
            both = f"{several[0]} and {several[1]}"
            raise FunctionNotFound(
                func_path, f"two functions have the name: {both}", elsewhere=True
            )
        if self._allow is None:
            # What this process has enqueued by its path, this process may also import.
            is_passed = func_path in self._passed
            found = (imported_function if is_passed else loaded_function)(func_path)
            why = _why_closed(found, is_passed=is_passed)
        else:
            check_path(func_path)
            if not self._names(func_path):
                raise ForbiddenFunction(
                    func_path, f"only functions of {self._allowed()} run here", elsewhere=True
                )
            found = self._loaded(func_path)
            why = self._why_not_named(func_path, found)
        if why is not None:
            raise ForbiddenFunction(func_path, why, elsewhere=True)
        return found.func

    def _loaded(self, func_path: str) -> FoundFunction:
        if self._failed_imports is None:
            self.import_allowed()
        assert self._failed_imports is not None
        try:
            return loaded_function(func_path)
        except FunctionNotFound as error:
            if error.why != NOT_IMPORTED:
                raise
            for name, why in self._failed_imports.items():
                if f"{func_path}.".startswith(f"{name}."):
                    raise FunctionNotFound(func_path, why) from error
            why = f"{NOT_IMPORTED}; name it, or import it in a module that is named"
            raise FunctionNotFound(func_path, why, elsewhere=True) from error

    def _names(self, path: str) -> bool:
        """Whether `allow` names the function, its module, or a package above it."""
        return any(f"{path}.".startswith(f"{name}.") for name in self._allow or ())

    def _why_not_named(self, func_path: str, found: FoundFunction) -> str | None:
        # The module, or one of its classes or functions.
        is_named = any(
            f"{func_path}.".startswith(f"{name}.") and f"{name}.".startswith(f"{found.module}.")
            for name in self._allow or ()
        )
        if is_named or found.is_marked:
            return None
        return "it is not marked with @task; mark it, or name its module as well"

    def _allowed(self) -> str:
        return ", ".join(self._allow or ()) or "no module"


def _why_closed(found: FoundFunction, *, is_passed: bool) -> str | None:
    """Why a worker that was given no modules does not run the function; None if it does."""
    if found.is_marked:
        return None
    if not is_passed:
        return (
            "it is not marked with @task, and this process has not enqueued it; mark it, or name "
            "its module: allow=[…]"
        )
    if is_installed(found.module):
        return (
            "it belongs to an installed package and is not marked with @task; mark it, or name "
            "its module: allow=[…]"
        )
    return None


def _may_run(func_path: str) -> bool:
    try:
        check_path(func_path)
    except ForbiddenFunction:
        return False
    return True


def resolve(func_path: str, allow: Iterable[str] | None = None) -> Callable[..., Any]:
    """Import the function at that path: for a path that a person or this process has given.

    With `allow` it returns what a worker with these modules runs. Raises `ForbiddenFunction` for what
    is not run, and `FunctionNotFound`.
    """
    if allow is not None:
        return FunctionCache(allow).resolve(func_path)
    return imported_function(func_path).func


def _name_of(func: object) -> str:
    module = getattr(func, "__module__", None)
    name = getattr(func, "__qualname__", None) or type(func).__name__
    return f"{module}.{name}" if module else str(name)


def _why_unreachable(func: Callable[..., Any]) -> str | None:
    """Return why the path of the function does not lead back to it, or None."""
    module = sys.modules.get(func.__module__)
    if module is None:
        return f"its module {func.__module__} is not imported"
    try:
        found = attribute_of(module, func.__qualname__.split("."))
    except AttributeError as error:
        return str(error)
    if found is not func:
        return (
            f"{func.__module__}.{func.__qualname__} is a different object; enqueue the one that "
            "the module has by that name, and use functools.wraps in decorators"
        )
    return None
