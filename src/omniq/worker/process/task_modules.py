"""Which modules of a package have tasks, by their source: nothing is imported to find out."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from types import ModuleType


def modules_with_tasks(package: ModuleType) -> list[str]:
    """The names of the modules below the package that mark functions with omniq's `@task`."""
    return sorted(_search(package.__name__, getattr(package, "__path__", ()), set()))


def _search(package: str, folders: Iterable[str], seen: set[Path]) -> Iterator[str]:
    for folder in folders:
        place = Path(folder).resolve()
        if place in seen:
            # Links can make a circle.
            continue
        seen.add(place)
        modules = list(pkgutil.iter_modules([folder]))
        for found in modules:
            name = f"{package}.{found.name}"
            source = (
                place / found.name / "__init__.py" if found.ispkg else place / f"{found.name}.py"
            )
            if found.name.startswith("__") or _is_test(found.name):
                continue
            if _marks_tasks(source):
                yield name
            if found.ispkg:
                yield from _search(name, [str(place / found.name)], seen)
        for name in _plain_folders(place, {found.name for found in modules}):
            yield from _search(f"{package}.{name}", [str(place / name)], seen)


def _plain_folders(place: Path, modules: Container[str]) -> list[str]:
    """The folders that Python imports from without an `__init__.py`, but not before a module of that name."""
    try:
        return [
            each.name
            for each in place.iterdir()
            if each.name.isidentifier()
            and each.name not in modules
            and not each.name.startswith("__")
            and each.name != "node_modules"
            and not _is_test(each.name)
            and each.is_dir()
        ]
    except OSError:
        return []


def _is_test(name: str) -> bool:
    """Whether it is for tests, by its name: such code may mark functions that are no tasks of the worker.

    >>> [_is_test(name) for name in ("tests", "conftest", "test_mail", "mail_test", "testing", "latest")]
    [True, True, True, True, False, False]
    """
    return (
        name in ("test", "tests", "conftest") or name.startswith("test_") or name.endswith("_test")
    )


def _marks_tasks(file: Path) -> bool:
    try:
        source = file.read_bytes()
        if b"omniq" not in source or b"task" not in source:
            return False
        tree = ast.parse(source)
    except OSError:
        return False
    except (SyntaxError, ValueError):
        # It may have tasks: the import has the error, and says where it is.
        return True
    names = {"task"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "omniq":
            names |= {alias.asname for alias in node.names if alias.name == "task" and alias.asname}
    return any(
        _last_name(decorator) in names
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
    )


def _last_name(decorator: ast.expr) -> str | None:
    match decorator:
        case ast.Call(func=func):
            return _last_name(func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return None
