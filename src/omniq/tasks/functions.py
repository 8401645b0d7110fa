"""From a function to its path and back: `@task`, `path_of`, and which functions may be called.

A stored task names its function by a dotted path. Every program that can write to the storage
chooses such paths, so `FunctionCache` decides which of them become calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast, overload

from omniq.durations import Duration
from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask
from omniq.models import BreakerRule, Runnable, check_func_path
from omniq.retry import Backoff
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.options import Executor, Hook, TaskOptions, check_options

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__omniq__"
_FUNCTION_METHOD = "__omniq_function__"

# Not a list of dangerous modules, which would always miss one. No function of the standard library
# can be a task; a user who needs one enqueues a one-line function that calls it.
_REFUSED_MODULES = sys.stdlib_module_names | {"pip", "setuptools", "pkg_resources", "_pytest"}


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
    retry: Backoff | None = ...,
    timeout: Duration | None = ...,
    executor: Executor | None = ...,
    breaker: str | BreakerRule | Iterable[str | BreakerRule] | None = ...,
    rate: str | tuple[int, Duration] | None = ...,
    max_running: int | None = ...,
    limit_key: str | Callable[..., str] | None = ...,
    cron: str | None = ...,
    tz: str | None = ...,
    interval: Duration | None = ...,
    expires: Duration | None = ...,
    result_ttl: Duration | None = ...,
    unique: str | Callable[..., str] | bool | None = ...,
    errors: ErrorRules | None = ...,
    on_failure: Hook | None = ...,
    on_dead: Hook | None = ...,
    metadata: Mapping[str, Any] | None = ...,
) -> Callable[[_F], _F]: ...


def task(func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Mark a function as a task and store its options on it. It stays a plain function.

    Nothing is opened and nothing is registered. `rate` is text such as "10/s", "100/5m", or
    (10, seconds). `errors` says after which exceptions a retry may help. `on_failure(task, error)`
    is called after every failed run, `on_dead(task, error)` when the task fails for good. Raises
    `InvalidTask` for wrong options; `omniq.tasks.options` has the table of all options.
    """
    checked = check_options(**options)

    def mark(func: _F) -> _F:
        if reason := _why_unfit(func):
            raise InvalidTask(f"@task on {_name_of(func)}: {reason}")
        setattr(func, _MARK, checked)
        return func

    return mark if func is None else mark(func)


def options_of(func: Callable[..., Any]) -> TaskOptions:
    """Return the options of the function's `@task`; a plain function has none."""
    options = getattr(func, _MARK, _NO_OPTIONS)
    return options if isinstance(options, TaskOptions) else _NO_OPTIONS


def declared_in(source: ModuleType | Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the function, or those that a module defines with a cron expression or an interval."""
    if not isinstance(source, ModuleType):
        return [source]
    own = [
        value
        for value in vars(source).values()
        if isinstance(value, FunctionType) and value.__module__ == source.__name__
    ]
    return [func for func in own if options_of(func).cron or options_of(func).interval]


def path_of(func: Callable[..., Any] | str) -> str:
    """Return the dotted path by which a worker imports this function. A path is only checked.

    Raises `InvalidTask` for an object without such a path; the message says what to do instead.
    """
    if isinstance(func, str):
        check_func_path(func)
        return func
    if reason := _why_unfit(func) or _why_unreachable(func):
        raise InvalidTask(f"{_name_of(func)} cannot be a task: {reason}")
    module = _main_name() if _is_main(func.__module__) else func.__module__
    if module is None:
        raise InvalidTask(
            f"{_name_of(func)} cannot be a task: a worker cannot import __main__; "
            "move the function to a module"
        )
    if _is_refused(module):
        raise InvalidTask(
            f"{_name_of(func)} cannot be a task: functions of {module} are never run; "
            "enqueue one of your functions that calls it"
        )
    return f"{module}.{func.__qualname__}"


class FunctionCache:
    """Turns paths into functions, for one worker. A path is imported once.

    It returns only plain functions, also static methods (`pkg.mod.Class.method`), and the function
    that the `__omniq_function__()` of a framework's object returns. With `allow`, both the path and
    the module that defines the function must lie under one of the prefixes; any other path is
    refused before anything is imported. Dunder names, the standard library and objects that are not
    plain functions are always refused, also where an allowed module has imported them.

    `runnable` is what the worker claims: all that is allowed, without what it has found missing.
    """

    def __init__(self, allow: Iterable[str] | None = None) -> None:
        if isinstance(allow, str):
            raise InvalidTask(
                f"allow={allow!r}: expected a list of prefixes, such as ['pkg.tasks']"
            )
        self._allow = None if allow is None else tuple(allow)
        self._found: dict[str, Callable[..., Any]] = {}
        self._excluded: dict[str, str] = {}
        self.runnable = self._runnable()
        """The functions to claim; None for all. Replaced, never changed: any thread may read it."""

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

    def has_found(self, func_path: str) -> bool:
        """Whether the function was resolved before."""
        return func_path in self._found

    def exclude(self, func_path: str, reason: str) -> bool:
        """Claim no more tasks of a function that cannot run in this process, as long as it lives.

        Returns False for one that is not excluded: there are too many, or the path is malformed.
        """
        if func_path not in self._excluded:
            if len(self._excluded) >= MAX_EXCLUDED or not _is_path(func_path):
                return False
            self._excluded[func_path] = reason
            self.runnable = self._runnable()
        return True

    def _runnable(self) -> Runnable | None:
        excluded = frozenset(self._excluded)
        if self._allow is not None:
            # A prefix may also be the path of one function.
            return Runnable(modules=self._allow, names=frozenset(self._allow), excluded=excluded)
        return Runnable(modules=None, excluded=excluded) if excluded else None

    def _find(self, func_path: str) -> Callable[..., Any]:
        self._check_path(func_path)
        module, names = _import_longest(func_path)
        try:
            func = _attribute(module, names)
        except AttributeError as error:
            # Another version of the module may have it, on a worker that was deployed earlier or later.
            raise FunctionNotFound(func_path, str(error), elsewhere=True) from error
        # Read from the class: a proxy object that has every attribute does not count.
        if (get_function := getattr(type(func), _FUNCTION_METHOD, None)) is not None:
            func = get_function(func)
        if reason := _why_unfit(func, anywhere=True):
            raise ForbiddenFunction(func_path, reason)
        self._check_defining_module(func_path, func)
        return cast(Callable[..., Any], func)

    def _check_path(self, func_path: str) -> None:
        if not _is_path(func_path):
            raise ForbiddenFunction(func_path[:100], "this is not a dotted path")
        parts = func_path.split(".")
        if any(part.startswith("__") for part in parts):
            raise ForbiddenFunction(func_path, "names with two underscores are never run")
        if _is_refused(func_path):
            raise ForbiddenFunction(
                func_path, f"functions of {parts[0]} are never run; call it from one of yours"
            )
        if not self._is_allowed(func_path):
            raise ForbiddenFunction(
                func_path, f"only functions of {self._allowed()} run here", elsewhere=True
            )

    def _check_defining_module(self, func_path: str, func: FunctionType) -> None:
        """Refuse a function that an allowed module has only imported from another module."""
        home = func.__module__ or ""
        if _is_main(home):
            home = _main_name() or home
        if _is_refused(home):
            raise ForbiddenFunction(func_path, f"it is {home}.{func.__qualname__}, never run")
        if not self._is_allowed(f"{home}.{func.__qualname__}"):
            raise ForbiddenFunction(
                func_path, f"it comes from {home}; only functions of {self._allowed()} run here"
            )

    def _is_allowed(self, path: str) -> bool:
        if self._allow is None:
            return True
        return any(path == prefix or path.startswith(prefix + ".") for prefix in self._allow)

    def _allowed(self) -> str:
        return ", ".join(self._allow or ()) or "no module"


def resolve(func_path: str, allow: Iterable[str] | None = None) -> Callable[..., Any]:
    """Return the function at that path, as `FunctionCache(allow).resolve` does."""
    return FunctionCache(allow).resolve(func_path)


def _why_unfit(func: object, *, anywhere: bool = False) -> str | None:
    """Return why this can never be a task, or None. With `anywhere`, its name is not checked."""
    match func:
        case FunctionType():
            if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
                return "it is a generator; a task returns one value"
            if anywhere:
                return None
            return _why_unnamed(func)
        case type():
            return "it is a class; enqueue a function that makes one"
        case MethodType():
            return "it is bound to an object; enqueue a function of a module and pass what it needs"
        case partial():
            return "it is a partial; enqueue the function and pass it the arguments"
        case staticmethod() | classmethod():
            return "put @task below @staticmethod; class methods cannot be tasks"
        case _ if inspect.isbuiltin(func):
            return "it is a builtin; enqueue one of your functions that calls it"
        case _:
            return f"it is not a function but {type(func).__name__}"


def _why_unnamed(func: FunctionType) -> str | None:
    if func.__name__ == "<lambda>":
        return "it is a lambda, which a worker cannot import; define it with def in a module"
    if "<locals>" in func.__qualname__:
        return "it is defined inside a function; move it to the top of its module"
    return None


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
        found = _attribute(module, func.__qualname__.split("."))
    except AttributeError as error:
        return str(error)
    if found is not func:
        return (
            f"{func.__module__}.{func.__qualname__} is a different object; enqueue the one that "
            "the module has by that name, and use functools.wraps in decorators"
        )
    return None


def _is_path(func_path: str) -> bool:
    try:
        check_func_path(func_path)
    except InvalidTask:
        return False
    return True


def _is_refused(path: str) -> bool:
    return path.partition(".")[0] in _REFUSED_MODULES


def _is_main(module: str) -> bool:
    # The second is the name of the parent's script in a child of multiprocessing.
    return module in ("__main__", "__mp_main__")


def _attribute(module: ModuleType, names: list[str]) -> Any:
    """Return the attribute at the names, through classes only: an imported module is not followed.

    Raises `AttributeError` with a full sentence. Runs no descriptors and no `__getattr__`.
    """
    found = vars(module).get(names[0])
    for name in names[1:]:
        if not isinstance(found, type):
            raise AttributeError(f"{module.__name__} has no class {names[0]}")
        found = inspect.getattr_static(found, name, None)
    if found is None:
        raise AttributeError(f"{module.__name__} has no {'.'.join(names)}")
    if len(names) == 1:
        return found
    if not isinstance(found, staticmethod):
        raise AttributeError(f"{'.'.join(names)} is not a static method")
    return found.__func__


def _import_longest(func_path: str) -> tuple[ModuleType, list[str]]:
    """Import the longest module path at the start; return it and the remaining names."""
    first, *rest = func_path.split(".")
    module = _import(func_path, first)
    while len(rest) > 1 and hasattr(module, "__path__"):
        name = f"{module.__name__}.{rest[0]}"
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            break
        module = _import(func_path, name)
        rest = rest[1:]
    if len(rest) > 1 and hasattr(module, "__path__") and rest[0] not in vars(module):
        raise FunctionNotFound(func_path, f"no module {module.__name__}.{rest[0]}", elsewhere=True)
    return module, rest


def _import(func_path: str, name: str) -> ModuleType:
    # The running script is __main__; an import by its name would run it again.
    if name == _main_name():
        return sys.modules["__main__"]
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # The import runs user code, which may raise any exception.
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        why = f"no module {name}" if missing else f"importing {name} failed: {error!r}"
        raise FunctionNotFound(func_path, why, elsewhere=missing) from error


def _main_name() -> str | None:
    """Return the name by which another process can import the script of __main__, or None."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = str(spec.name)
        return None if name.rpartition(".")[2] == "__main__" else name
    file = getattr(main, "__file__", None)
    if file is None or not (name := Path(file).stem).isidentifier():
        return None
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = None if found is None else found.origin
    return name if origin and Path(origin).resolve() == Path(file).resolve() else None
