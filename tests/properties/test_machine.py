"""Any number of owners, any moves, any order: every backend answers as the model does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from omniq.testing.machine import MemoryStore, machine_for


@pytest.mark.timeout(120)
def test_memory_answers_as_the_model_does() -> None:
    run_state_machine_as_test(
        machine_for(MemoryStore),
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            deadline=None,
            derandomize=False,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
