"""Every backend implements one interface and runs one contract suite."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from omniq.storage.base import BaseStorage
from omniq.storage.file import FileStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.postgres import PostgresStorage
from omniq.storage.redis import RedisStorage
from omniq.storage.sqlite import SQLiteStorage

ROOT = Path(__file__).parents[2]
BACKENDS = {
    "memory": MemoryStorage,
    "file": FileStorage,
    "sqlite": SQLiteStorage,
    "postgres": PostgresStorage,
    "redis": RedisStorage,
}

# Opening and administration: what a store needs beyond the contract, and no caller of tasks uses.
OWN = {"check_schema", "server_report", "upgrade_schema"}


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_every_backend_package_is_known_here():
    packages = {path.parent.name for path in (ROOT / "src/omniq/storage").glob("*/storage.py")}

    assert packages == set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_adds_no_method_to_the_interface(backend):
    added = public_names(BACKENDS[backend]) - public_names(BaseStorage)

    assert added <= OWN, f"callers would have to know the backend to use {sorted(added - OWN)}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_keeps_the_signatures_of_the_interface(backend):
    for name in public_names(BaseStorage) & set(vars(BACKENDS[backend])):
        method, promised = getattr(BACKENDS[backend], name), getattr(BaseStorage, name)
        if inspect.isfunction(promised):
            assert (
                inspect.signature(method).parameters.keys()
                == inspect.signature(promised).parameters.keys()
            ), f"{backend}: {name}"


def test_the_interface_for_backends_does_not_grow():
    assert len(BaseStorage.__abstractmethods__) <= 41


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_runs_the_whole_contract_suite(backend):
    path = next((ROOT / "tests/storage").glob(f"test_{backend}*contract.py"), None)
    path = path or ROOT / "tests/storage" / f"test_{backend}.py"
    suites = [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and node.name.startswith("Test")
        and "StorageContract" in {ast.unparse(base) for base in node.bases}
    ]

    assert suites, f"{path.name}: no test class derives from StorageContract"
