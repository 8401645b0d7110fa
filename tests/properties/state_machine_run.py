"""Runs the storage state machine with the settings that all backends share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from omniq.testing.flow_machine import flow_machine_for
from omniq.testing.state_machine import state_machine_for
from omniq.testing.state_machine_stores import OpenStore

LONG_RUN_EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "40"))
"""Examples of a long run in `make deep`; `make state-machine` sets it to 500."""

FEWER_EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "10"))
"""The same, on storages where an example takes seconds."""


def run_state_machine(open_store: OpenStore, *, examples: int, steps: int) -> None:
    _run(state_machine_for(open_store), examples, steps)


def run_flow_machine(open_store: OpenStore, *, examples: int, steps: int) -> None:
    _run(flow_machine_for(open_store), examples, steps)


def _run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            # The duration depends on the load of the machine; the test has its own timeout.
            deadline=None,
            # Random examples: over time they reach more than 200 fixed ones would. In CI the
            # examples are fixed, so that a failure is caused by the change under test.
            derandomize="CI" in os.environ,
            print_blob=True,
            # Slow and large examples are intended.
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
