"""Random workflows on several owners: every record is what the model derives from scratch."""

from __future__ import annotations

import pytest

from omniq.testing.state_machine_stores import MemoryStore, OpenStore
from tests.properties.state_machine_run import FEWER_EXAMPLES, LONG_RUN_EXAMPLES, run_flow_machine
from tests.properties.test_state_machine import file_store, sqlite_store
from tests.storage.memory_log import MemoryLogStore


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("open_store", "examples"),
    [(MemoryStore, 20), (sqlite_store, 3), (file_store, 2), (MemoryLogStore, 4)],
    ids=["memory", "sqlite", "file", "log"],
)
def test_a_backend_runs_flows_as_the_model_says(open_store: OpenStore, examples: int) -> None:
    run_flow_machine(open_store, examples=examples, steps=40)


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "open_store",
    [MemoryStore, sqlite_store, file_store, MemoryLogStore],
    ids=["memory", "sqlite", "file", "log"],
)
def test_a_backend_runs_flows_as_the_model_says_in_long_runs(open_store: OpenStore) -> None:
    is_fast = open_store is MemoryStore or open_store is MemoryLogStore
    examples = LONG_RUN_EXAMPLES if is_fast else FEWER_EXAMPLES
    run_flow_machine(open_store, examples=examples, steps=100)
