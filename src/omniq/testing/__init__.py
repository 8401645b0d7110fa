"""Test support: for code that uses omniq, for new storage backends, and for omniq itself.

For tests of an application:

- The package `omniq_pytest`: the fixtures `omniq_queue`, `async_omniq_queue` and `omniq_clock`.
- `manual`: the queue behind them, which runs tasks and moves time when the test says so.
- `clock`: `ManualClock`, which stands still until the test moves it.
- `mock_task`: `MockTask`, a task that does what the test says; also `omniq.testing.MockTask`.
- `faults`: `FaultyStorage`, which fails or delays chosen calls.

For tests of a storage backend; all but `builders` are in the distribution omniq-contract:

- `contract`: the test suite that every backend passes.
- `builders`: tasks, results, errors and outcomes with default values.
- `model`, `model_tasks`, `model_gates`, `model_turns`, `model_flows`, `model_views`: a simple model of the contract.
- `state_machine`, `state_machine_steps`, `state_machine_stores`: random calls on a backend, compared
  with the model. `flow_machine`: the same for workflows.

For tests with processes, networks and servers:

- `simulation`: a fleet of workers in one thread, on virtual time, from one seed (omniq-contract).
- `virtual_time`: the event loop and the clocks of a simulation (omniq-contract).
- `plugin`: pytest fixtures with real PostgreSQL and Redis servers.
- `servers`, `server_process`, `server_programs`: how these servers are started, supervised and found.
- `standby`: a PostgreSQL server with a standby. `redis_groups`: Redis behind Sentinels, and a cluster. `s3_servers`: S3 servers.
- `fault_proxy`: a TCP proxy that cuts, delays and refuses connections to a server (omniq-contract).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.testing.mock_task import MockTask

__all__ = ["MockTask"]


def __getattr__(name: str) -> object:
    # Imported late: most parts of this package do not need it.
    if name == "MockTask":
        from omniq.testing.mock_task import MockTask

        return MockTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
