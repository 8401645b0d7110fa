"""Imports go one way; each driver, and the time, is imported by one file.

A module may import what stands on a line above its own, and modules of its own entry. Entries on
one line do not import each other. No modules import each other in a circle, on any line. Imports
inside functions count; imports for type checkers only do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "omniq"

# A package stands for all of its modules, but for those that have an entry of their own.
LAYERS = """
_version _deprecation errors clock text
concurrency retry cron events failpoints signing
settings models metrics
log outcomes serialization
tasks gate_rules
storage.* circuit_breaker omniq
storage.memory storage.file storage.sqlite storage.postgres storage.redis storage.nats storage.s3 operations
storage.urls scheduling
storage
worker
queue
dashboard integrations
cli
__main__ testing
"""

LEVELS = {
    name: level
    for level, line in enumerate(LAYERS.strip().splitlines(), start=1)
    for name in line.split()
}

DRIVERS = (
    "asyncpg",
    "cloudpickle",
    "cronsim",
    "cryptography",
    "hiredis",
    "obstore",
    "nats",
    "psycopg",
    "redis",
    "sqlite3",
)
FRAMEWORKS = {
    **dict.fromkeys(("starlette", "uvicorn", "jinja2"), "dashboard"),
    **dict.fromkeys(("django", "fastapi", "flask"), "integrations"),
    **dict.fromkeys(("opentelemetry", "prometheus_client"), "integrations"),
    **dict.fromkeys(("sentry_sdk", "sqlalchemy"), "integrations"),
}

# Code that needs the time, a random number or an id takes a `Clock`. `failpoints` delays a real
# process, and `testing` implements clocks.
TIME_KEEPERS = {"clock", "failpoints"}
TIME_MODULES = {"time", "random", "secrets"}
TIME_CALLS = {
    "asyncio.sleep",
    "datetime.now",
    "datetime.utcnow",
    "date.today",
    "os.urandom",
    "uuid.uuid4",
    "uuid4",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts) or "omniq"


def module_names() -> list[str]:
    return [module_name(path) for path in sorted(SRC.rglob("*.py"))]


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module, parsed when a test first needs it."""
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def entry(module: str) -> str:
    """The entry of the table that a module belongs to."""
    if module in LEVELS:
        return module
    package = module
    while package:
        package = package.rpartition(".")[0]
        for name in (f"{package}.*", package):
            if name in LEVELS:
                return name
    return module


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def run_time_nodes(tree: ast.AST) -> list[ast.AST]:
    nodes = []
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not is_for_type_checkers(child):
                nodes.append(child)
                waiting.append(child)
    return nodes


def called(tree: ast.Module) -> set[str]:
    """What a module calls, each as it is written."""
    calls = (node.func for node in run_time_nodes(tree) if isinstance(node, ast.Call))
    return {ast.unparse(call) for call in calls if isinstance(call, ast.Name | ast.Attribute)}


@cache
def imported(tree: ast.Module) -> set[str]:
    """The dotted names of all that a module imports; `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def omniq_imports(tree: ast.Module) -> set[str]:
    """The modules of omniq that a module imports; of a package and its module, the module."""
    found = {
        name.removeprefix("omniq.") for name in imported(tree) if name.split(".")[0] == "omniq"
    }
    known = {name for name in found if name in modules()}
    return {
        name
        for name in known
        if not any(other.startswith(f"{name}.") or name == "omniq" for other in known - {name})
    }


def test_every_module_has_its_place_in_the_table():
    new = [f"omniq.{module}" for module in module_names() if entry(module) not in LEVELS]

    assert not new, (
        f"add {', '.join(new)} to LAYERS in {Path(__file__).name}, "
        "below everything it imports and above everything that imports it"
    )


def test_a_module_imports_only_from_lines_above_its_own():
    wrong = [
        f"omniq.{module} (line {LEVELS.get(entry(module))}) may not import {other}"
        for module, tree in modules().items()
        for other in sorted(omniq_imports(tree))
        if entry(other) != entry(module)
        and LEVELS.get(entry(other), 0) >= LEVELS.get(entry(module), 0)
    ]

    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    imports = {module: omniq_imports(tree) - {module} for module, tree in modules().items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_is_imported_by_one_file(driver):
    users = [
        module
        for module, tree in modules().items()
        if any(name.split(".")[0] == driver for name in imported(tree))
        and entry(module) != "testing"
    ]

    assert len(users) <= 1, f"{driver} is imported by {users}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_is_imported_by_one_package(framework):
    users = {
        entry(module)
        for module, tree in modules().items()
        if any(name.split(".")[0] == framework for name in imported(tree))
    }

    assert users <= {FRAMEWORKS[framework]}


def test_only_the_clock_reads_the_time():
    wrong = [
        f"omniq.{module} uses {used}: take a Clock and ask it"
        for module, tree in modules().items()
        if module not in TIME_KEEPERS and entry(module) != "testing"
        for used in sorted((imported(tree) & TIME_MODULES) | (called(tree) & TIME_CALLS))
    ]

    assert not wrong, "\n".join(wrong)


def test_a_module_is_named_for_its_duty():
    vague = {"utils", "util", "helpers", "common", "manager", "misc"}

    assert [name for name in module_names() if not vague.isdisjoint(name.split("."))] == []


def test_the_rule_sees_what_it_should_see():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "from omniq import clock\n"
        "from omniq.storage.base import BaseStorage\n"
        "if TYPE_CHECKING:\n"
        "    from omniq.queue import TaskQueue\n"
        "def later():\n"
        "    import omniq.models\n"
    )

    assert omniq_imports(tree) == {"clock", "storage.base", "models"}


def test_a_program_that_only_declares_tasks_loads_no_more_than_it_needs():
    unneeded = "loguru", "omniq.log", "omniq.queue", "omniq.storage", "omniq.tasks.annotations"
    code = "import sys, omniq; print(*sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(unneeded).isdisjoint(found.stdout.split())
