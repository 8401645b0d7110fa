"""Which modules of a package have tasks, by their source: nothing is imported to find out."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterable, Iterator
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
        for found in pkgutil.iter_modules([folder]):
            name = f"{package}.{found.name}"
            source = (
                place / found.name / "__init__.py" if found.ispkg else place / f"{found.name}.py"
            )
            if not found.name.startswith("__") and _marks_tasks(source):
                yield name
            if found.ispkg:
                yield from _search(name, [str(place / found.name)], seen)


def _marks_tasks(file: Path) -> bool:
    try:
        source = file.read_bytes()
        if b"omniq" not in source or b"task" not in source:
            return False
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        # It is imported when a module that is named needs it; the error is reported then.
        return False
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
