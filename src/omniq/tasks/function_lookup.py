"""Finds the function at a path: in modules that are loaded, or by import for a caller that is trusted.

A path is text that anyone may have stored. Nothing here calls a function, runs a descriptor or a
`__getattr__`, and only `imported_function` and `import_named` import anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask, UnguardedModule
from omniq.models import check_func_path
from omniq.tasks.import_guard import importing
from omniq.tasks.options import TaskOptions

MARK = "__omniq__"
FUNCTION_METHOD = "__omniq_function__"

# Not a list of dangerous modules, which would always miss one. No function of the standard library
# can be a task; a user who needs one enqueues a one-line function that calls it.
_REFUSED_MODULES = sys.stdlib_module_names | {"pip", "setuptools", "pkg_resources", "_pytest"}

# Not `value.__dict__`, which a metaclass may answer.
_CLASS_CONTENTS = type.__dict__["__dict__"].__get__
_QUALIFIED_NAME = type.__dict__["__qualname__"].__get__

NOT_IMPORTED = "its module is not imported here"

_INSTALL_FOLDERS = {"site-packages", "dist-packages"}


class FoundFunction(NamedTuple):
    """A plain function, the module that defines it, and whether it is marked with `@task`."""

    func: FunctionType
    module: str
    is_marked: bool


def loaded_function(func_path: str) -> FoundFunction:
    """The function at that path, in a module that is loaded; nothing is imported.

    Raises `ForbiddenFunction` for what is never run, and `FunctionNotFound`.
    """
    check_path(func_path)
    module, names = _loaded_module(func_path)
    return _checked(func_path, module, names)


def imported_function(func_path: str) -> FoundFunction:
    """The function at that path, whose module is imported if need be: for a path that was not stored.

    Raises `ForbiddenFunction` for what is never run, and `FunctionNotFound`.
    """
    check_path(func_path)
    module, names = _import_longest(func_path)
    return _checked(func_path, module, names)


def import_named(name: str) -> None:
    """Import a module that a person has named, or the module of a class or function.

    Raises `FunctionNotFound` when there is none.
    """
    if is_refused(name):
        return
    module, rest = _import_longest(name, keep=0)
    if rest and rest[0] not in vars(module):
        raise FunctionNotFound(name, f"no module {module.__name__}.{rest[0]}", elsewhere=True)


def file_of(name: str) -> str:
    """Where a named module lies: its file, or the folder of a package without `__init__.py`."""
    module = _module_named(name, main_name())
    if module is None:
        # A class or a function.
        return file_of(name.rpartition(".")[0]) if "." in name else "not imported"
    places = [_contents(module).get("__file__"), *(_contents(module).get("__path__") or ())]
    return next((place for place in places if isinstance(place, str)), "built in")


def check_path(func_path: str) -> None:
    """Raise `ForbiddenFunction` for a path that is never run, whatever it leads to."""
    if not is_path(func_path):
        raise ForbiddenFunction(func_path[:100], "this is not a dotted path")
    parts = func_path.split(".")
    if any(part.startswith("__") for part in parts):
        raise ForbiddenFunction(func_path, "names with two underscores are never run")
    if is_refused(func_path):
        raise ForbiddenFunction(
            func_path, f"functions of {parts[0]} are never run; call it from one of yours"
        )
    if parts[-1].startswith("_"):
        raise _private(func_path)


def is_path(func_path: str) -> bool:
    """Whether the text has the form of a path."""
    try:
        check_func_path(func_path)
    except InvalidTask:
        return False
    return True


def is_refused(path: str) -> bool:
    """Whether the path lies in a module whose functions are never run."""
    return path.partition(".")[0] in _REFUSED_MODULES


def is_marked(value: object) -> bool:
    """Whether `@task` has marked the function, or a framework's object stands for a task."""
    if type(value) is FunctionType:
        return MARK in value.__dict__
    return _stands_for_function(value)


def is_installed(module_name: str) -> bool:
    """Whether the loaded module belongs to omniq or to an installed package: not written for this program."""
    if module_name.partition(".")[0] == "omniq":
        return True
    module = _module_named(module_name, main_name())
    origin = None if module is None else _contents(module).get("__file__")
    if not isinstance(origin, str):
        return False
    return not _INSTALL_FOLDERS.isdisjoint(Path(origin).parts) or any(
        Path(origin).is_relative_to(folder) for folder in _install_paths()
    )


@cache
def _install_paths() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


# From a path to a function


def _checked(func_path: str, module: ModuleType, names: list[str]) -> FoundFunction:
    try:
        found = attribute_of(module, names)
    except AttributeError as error:
        # Another version of the module may have it, on a worker that was deployed earlier or later.
        raise FunctionNotFound(func_path, str(error), elsewhere=True) from error
    marked = is_marked(found)
    if _stands_for_function(found):
        found = getattr(type(found), FUNCTION_METHOD)(found)
    try:
        reason = why_unfit(found, anywhere=True)
    except Exception:
        # An object that loads something when it is asked for its class, as Django's settings do.
        reason = f"it is not a function but {type(found).__name__}"
    if reason is not None:
        raise ForbiddenFunction(func_path, reason)
    name = func_path.removesuffix("." + ".".join(names))
    home = _shown_name(found.__module__ or "")
    if home != name:
        own_path = f"{home}.{found.__qualname__}"
        if is_refused(home):
            raise ForbiddenFunction(func_path, f"it is {own_path}, never run")
        raise ForbiddenFunction(
            func_path, f"it comes from {home}; enqueue it by its own path: {own_path}"
        )
    if any(part.startswith("_") for part in (*names, *_own_names(found))):
        raise _private(func_path)
    return FoundFunction(found, name, marked)


def _own_names(func: FunctionType) -> list[str]:
    """The names under which the function was defined; those inside a function do not count."""
    return [] if "<locals>" in func.__qualname__ else func.__qualname__.split(".")


def _private(func_path: str) -> ForbiddenFunction:
    return ForbiddenFunction(
        func_path, "names with a leading underscore are never run; rename the function"
    )


def _stands_for_function(value: object) -> bool:
    # Read from the class: a proxy object that has every attribute does not count. By its type, since
    # `isinstance` asks the object.
    kind = type(value)
    return hasattr(kind, FUNCTION_METHOD) and not issubclass(kind, type)


def why_unfit(func: object, *, anywhere: bool = False) -> str | None:
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
        return (
            "it is defined inside a function; move it to the top of its module, or, if a decorator "
            "made it, use functools.wraps in the decorator"
        )
    return None


def attribute_of(module: ModuleType, names: list[str]) -> Any:
    """Return the attribute at the names, through classes only: an imported module is not followed.

    Raises `AttributeError` with a full sentence. Runs no descriptors and no `__getattr__`.
    """
    found = _contents(module).get(names[0])
    for name in names[1:]:
        if not issubclass(type(found), type):
            raise AttributeError(f"{module.__name__} has no class {names[0]}")
        found = inspect.getattr_static(found, name, None)
    if found is None:
        raise AttributeError(f"{module.__name__} has no {'.'.join(names)}")
    if len(names) == 1:
        return found
    if not isinstance(found, staticmethod):
        raise AttributeError(f"{'.'.join(names)} is not a static method")
    return found.__func__


# Modules


def _loaded_module(func_path: str) -> tuple[ModuleType, list[str]]:
    """The loaded module with the longest name at the start of the path; and the remaining names."""
    script, parts = main_name(), func_path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = _module_named(".".join(parts[:length]), script)
        if module is not None:
            rest = parts[length:]
            if len(rest) == 1 or rest[0] in _contents(module):
                return module, rest
            break
    raise FunctionNotFound(func_path, NOT_IMPORTED, elsewhere=True)


def _module_named(name: str, script: str | None) -> ModuleType | None:
    """The loaded module of that name; the running script under the name that other processes use."""
    return sys.modules.get("__main__" if name == script else name)


def _contents(module: ModuleType) -> dict[str, Any]:
    """The variables of the module. One that is loaded lazily is not loaded by this."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _import_longest(func_path: str, *, keep: int = 1) -> tuple[ModuleType, list[str]]:
    """Import the longest module path at the start; return it and the remaining names, `keep` or more."""
    first, *rest = func_path.split(".")
    module = _import(func_path, first)
    while len(rest) > keep and hasattr(module, "__path__"):
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
    if name == main_name():
        return sys.modules["__main__"]
    try:
        with importing(name):
            return importlib.import_module(name)
    except UnguardedModule:
        raise
    except (Exception, SystemExit) as error:
        # The import runs user code, which may raise any exception.
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        why = f"no module {name}" if missing else f"importing {name} failed: {error!r}"
        raise FunctionNotFound(func_path, why, elsewhere=missing) from error


def is_main(module: str) -> bool:
    """Whether this is the name of the running script."""
    # The second is the name of the parent's script in a child of multiprocessing.
    return module in ("__main__", "__mp_main__")


def _shown_name(module: str) -> str:
    return main_name() or module if is_main(module) else module


def main_name() -> str | None:
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


def why_main_is_unfit() -> str:
    """Why no other process can import the script of __main__, and what to do."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(file or "")
    importable = re.sub(r"\W", "_", script.stem)
    if file is not None and importable != script.stem and importable.isidentifier():
        return (
            f"a worker cannot import {script.name}; rename the file to {importable}{script.suffix}, "
            "or move the function to a module"
        )
    return "a worker cannot import __main__; move the function to a module"


# Marked functions

_SEARCH_EVERY = 10.0


class _Marked(NamedTuple):
    """Where a marked function was found, where it was defined, and its names besides its path."""

    path: str
    own_path: str
    names: tuple[str, ...]


class MarkedFunctions:
    """The paths of all functions with `@task` in the modules that the program has imported.

    They are searched and not registered: `@task` changes nothing but its function. All pools of a process
    share one search, `MARKED`.
    """

    def __init__(self) -> None:
        self._modules: dict[str, tuple[ModuleType, int, list[_Marked]]] = {}
        self._count = -1
        self._searched_at = -_SEARCH_EVERY
        self._paths: frozenset[str] = frozenset()
        self.named: Mapping[str, Sequence[str]] = {}
        """The paths of the functions with a name or alias, by that; of the last search."""

    @property
    def is_stale(self) -> bool:
        """Whether modules may have been imported since the last search. Costs next to nothing."""
        return len(sys.modules) != self._count

    def paths(self) -> frozenset[str]:
        """The paths in the modules that were imported until now."""
        return self.search() if self.is_stale else self._paths

    def paths_of(self, name: str) -> Sequence[str]:
        """The paths of the functions that have this name or alias; normally one."""
        self.paths()
        if name not in self.named:
            # A module may have grown since it was searched.
            self.search()
        return self.named.get(name, ())

    def search(self) -> frozenset[str]:
        """The paths now. A module that was searched before and has not grown is not searched again."""
        modules = list(sys.modules.items())
        count = len(modules)
        found: dict[str, tuple[ModuleType, int, list[_Marked]]] = {}
        for name, module in modules:
            if is_refused(name) or not issubclass(type(module), ModuleType):
                continue
            if getattr(_contents(module).get("__spec__"), "_initializing", False):
                # Its import has not ended: search again at the next opportunity.
                count = -1
            size = len(_contents(module))
            known = self._modules.get(name)
            if known is None or known[0] is not module or known[1] != size:
                known = module, size, _marked_in(name, module)
            found[name] = known
        # Replaced, never changed: other threads may search, too.
        self._modules, self._count, self._searched_at = found, count, SYSTEM_CLOCK.monotonic()
        marked = [each for *_, of_module in found.values() for each in of_module]
        paths = frozenset(each.path for each in marked)
        if paths != self._paths:
            self._paths = paths
        self.named = _paths_by_name(marked)
        return self._paths

    def search_sometimes(self) -> frozenset[str]:
        """The paths of a search that is at most ten seconds old: a search costs some milliseconds."""
        is_old = SYSTEM_CLOCK.monotonic() - self._searched_at > _SEARCH_EVERY
        return self.search() if is_old else self.paths()


MARKED = MarkedFunctions()


def _paths_by_name(marked: Iterable[_Marked]) -> dict[str, list[str]]:
    """One path of each function, also if its module has it twice, or is loaded as the script too."""
    found: dict[str, dict[str, str]] = {}
    for path, own_path, names in marked:
        for name in names:
            paths = found.setdefault(name, {})
            if paths.get(own_path) != own_path:
                paths[own_path] = path
    return {name: list(paths.values()) for name, paths in found.items()}


def _marked_in(module_name: str, module: ModuleType) -> list[_Marked]:
    shown = _shown_name(module_name)
    if is_main(shown):
        # No other process can import it, so its functions have no path.
        return []
    values = list(_contents(module).items())
    found = [
        (name, value)
        for name, value in values
        if not name.startswith("_")
        and (
            MARK in value.__dict__ and value.__module__ == module_name
            if type(value) is FunctionType
            else _stands_for_function(value)
        )
    ]
    found += _marked_in_classes(module_name, "", values)
    return [_marked(shown, name, value) for name, value in found]


def _marked(module_name: str, name: str, func: object) -> _Marked:
    if type(func) is not FunctionType:
        # An object of a framework: it has the names of that.
        return _Marked(f"{module_name}.{name}", "", ())
    options = func.__dict__.get(MARK)
    names = options.names if isinstance(options, TaskOptions) else ()
    return _Marked(f"{module_name}.{name}", f"{module_name}.{func.__qualname__}", names)


def marked_methods(module: ModuleType) -> list[FunctionType]:
    """The marked static methods of the classes that the module defines."""
    values = list(_contents(module).items())
    return [func for _, func in _marked_in_classes(module.__name__, "", values)]


def _marked_in_classes(
    module_name: str, prefix: str, values: list[tuple[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """The paths in the module of marked static methods, in classes that the module defines, also nested ones."""
    for name, value in values:
        if not issubclass(type(value), type) or name.startswith("_"):
            continue
        path, contents = f"{prefix}{name}", _CLASS_CONTENTS(value)
        # An alias is not followed: classes may refer to each other in a circle.
        if contents.get("__module__") != module_name or _QUALIFIED_NAME(value) != path:
            continue
        inner = list(contents.items())
        for method_name, method in inner:
            is_public = type(method) is staticmethod and not method_name.startswith("_")
            if is_public and MARK in getattr(method.__func__, "__dict__", ()):
                yield f"{path}.{method_name}", method.__func__
        yield from _marked_in_classes(module_name, f"{path}.", inner)
