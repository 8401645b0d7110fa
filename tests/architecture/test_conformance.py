"""Every backend implements one interface, runs one contract suite, and names its modules alike."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from omniq.storage.backend import Backend, Section
from omniq.storage.base import BaseStorage
from omniq.storage.file import FileStorage
from omniq.storage.log import LogStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.nats import NatsStorage
from omniq.storage.postgres import PostgresStorage
from omniq.storage.redis import RedisStorage
from omniq.storage.s3 import S3Storage
from omniq.storage.sqlite import SQLiteStorage

ROOT = Path(__file__).parents[2]
BACKENDS = {
    "memory": MemoryStorage,
    "file": FileStorage,
    "sqlite": SQLiteStorage,
    "postgres": PostgresStorage,
    "redis": RedisStorage,
    "log": LogStorage,
    "s3": S3Storage,
    "nats": NatsStorage,
}

# Public methods beyond the contract, with the reason. No caller that enqueues or runs tasks needs them.
OWN = {
    "another": "memory has no URL by which a second object could open the same store",
    "check_schema": "administration: omniq schema, omniq doctor",
    "schema_sql": "administration: omniq schema, for databases that omniq may not change itself",
    "server_report": "administration: omniq doctor",
    "upgrade_schema": "administration: omniq schema",
}

# The same job has the same module name in every backend that has a module for it.
JOBS = {
    "implement the contract": "storage",
    "implement the port of the engine": "backend",
    "run one read-modify-write of the engine": "section",
    "upgrade what an older version has stored": "upgrade",
    "read the URL of a server": "address",
    "connect to the database or the server": "connection",
    "store the leases of owners": "leases",
    "store finished tasks and purge them": "finished",
    "answer readers": "queries",
    "find the newest tasks at a bounded cost": "scan",
    "turn rows into stored values and back": "encoding",
    "receive notifications, or detect changes": "wakeups",
    "enqueue inside the transaction of a caller": "user_transaction",
    "commit the outcome of a task with the writes of its function": "task_transaction",
    "check the settings of the server": "server_check",
}

# Modules that only one backend has, with the reason.
ONE_BACKEND = {
    "file": {
        "file_names": "records are files, and their names are parsed",
        "filesystem": "alone calls the file system: which calls are atomic and durable",
        "index": "the names of waiting tasks in memory: a folder has no order",
        "shared_file": "a batch is stored as one file with many names",
        "store": "runs every call of the backend with blocking calls in the thread of the store",
        "task_files": "follows the folder of live tasks, and reads records",
        "writes": "many names change in one step: a folder has no transactions",
    },
    "sqlite": {
        "damaged_rows": "columns are checked by the database, and a program may turn that off",
        "forks": "SQLite remembers locks of the process, which a forked child does not have",
        "lanes": "a claim merges the ready tasks of its functions, each read in order by an index",
        "store_record": "the leases are in a second file, which the store must recognise",
        "tables": "the statements that read and write rows, and the columns of a row",
        "writer_thread": "one thread runs the waiting writes in one transaction",
    },
    "postgres": {
        "enqueue": "a large batch is sent while it is being built",
        "listener": "notifications need a connection that does nothing else",
        "migrations": "a shared database is upgraded by a command, step by step",
        "read_section": "reads that arrive together are one statement",
        "record_and_claim": "one SQL function records and claims, unless the rules are needed",
        "statements": "loads the SQL files and fills in the name of the schema",
        "transport": "the driver has no options for keepalives and the size of reads",
        "vacuum": "dead rows slow down the claims of a busy table",
    },
    "log": {
        "append_order": "processes that compete for the end of a log take turns",
        "commit_thread": "one thread commits the waiting calls together",
        "log": "the port of servers that can only append",
        "replica": "the state in the process, and how far it has followed the log",
        "undoable_tables": "a decision is undone when another process commits first",
    },
    "nats": {
        "api_errors": "the error codes of JetStream, and what to do about them",
        "replies": "what the host answers to a call",
        "calls": "each call of the port as a value that travels to the host",
        "host": "one process runs the calls of all others",
        "stream_log": "a log whose commits and snapshots are messages of two streams",
    },
    "redis": {
        "error_replies": "the codes of error replies, and what to do about them",
        "primaries": "the server of a store changes: Sentinels and clusters say which one it is",
        "scripts": "composes the Lua scripts and runs them",
    },
    "s3": {
        "object_log": "a log whose commits and snapshots are objects",
        "snapshots": "a snapshot is many objects, of which the last makes them count",
        "trimming": "the number of a deleted commit is free again",
    },
}


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def modules(backend: str) -> set[str]:
    folder = ROOT / "src/omniq/storage" / backend
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_every_backend_package_is_known_here():
    packages = {path.parent.name for path in (ROOT / "src/omniq/storage").glob("*/storage.py")}

    assert packages == set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_adds_no_method_to_the_interface(backend):
    added = public_names(BACKENDS[backend]) - public_names(BaseStorage) - OWN.keys()

    assert not added, f"callers would have to know the backend to use {sorted(added)}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_keeps_the_signatures_of_the_interface(backend):
    for name in public_names(BaseStorage) & set(vars(BACKENDS[backend])):
        method, promised = getattr(BACKENDS[backend], name), getattr(BaseStorage, name)
        if inspect.isfunction(promised):
            assert (
                inspect.signature(method).parameters.keys()
                == inspect.signature(promised).parameters.keys()
            ), f"{backend}: {name}"


def test_the_port_does_not_grow():
    assert len(Backend.__abstractmethods__ | Section.__abstractmethods__) <= 20


def test_the_rules_are_applied_by_the_engine_alone():
    engine = {
        "engine",
        "lease_engine",
        "recovery_engine",
        "dead_letter_engine",
        "operator_engine",
        "flow_engine",
        "release_dependents",
        "step",
        "claim",
        "gate_states",
        "known_rows",
    }
    for path in (ROOT / "src/omniq/storage").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        applies = re.search(r"row_rules\.(settle|give_back|finish|retry_dead)|gate_rules\.", source)
        is_engine = path.parent.name == "storage" and path.stem in engine
        assert is_engine or not applies, f"{path.name} applies rules; backends only store rows"


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_is_named_after_its_job_as_in_every_backend(backend):
    unknown = modules(backend) - set(JOBS.values()) - ONE_BACKEND.get(backend, {}).keys()

    assert not unknown, (
        f"{backend}: {sorted(unknown)}: use the name that JOBS has for the job, "
        "or add the module to ONE_BACKEND with a reason"
    )


def test_a_name_for_one_backend_is_used_by_that_backend_alone():
    for backend, names in ONE_BACKEND.items():
        assert names.keys() <= modules(backend), f"{backend}: no such module"
        for other in BACKENDS.keys() - {backend}:
            assert not names.keys() & modules(other), f"{backend} and {other}: add it to JOBS"
    assert set(JOBS.values()) <= set().union(*map(modules, BACKENDS)), "a job without a module"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_package_lists_its_modules(backend):
    package = importlib.import_module(f"omniq.storage.{backend}")
    docstring = package.__doc__ or ""

    missing = {name for name in modules(backend) if f"`{name}`" not in docstring}
    assert not missing
