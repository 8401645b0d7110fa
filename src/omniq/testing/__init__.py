"""Test support: for code that uses omniq, for new storage backends, and for omniq itself.

For tests of an application:

- The package `omniq_pytest`: the fixtures `omniq_queue`, `async_omniq_queue` and `omniq_clock`.
- `manual`: the queue behind them, which runs tasks and moves time when the test says so.
- `clock`: `ManualClock`, which stands still until the test moves it.
- `faults`: `FaultyStorage`, which fails or delays chosen calls.

For tests of a storage backend:

- `contract`: the test suite that every backend passes.
- `builders`: tasks, results, errors and outcomes with default values.
- `model`, `model_tasks`, `model_gates`, `model_views`: a simple model of the contract.
- `state_machine`, `state_machine_steps`, `state_machine_stores`: random calls on a backend, compared
  with the model.

For tests with processes, networks and servers:

- `simulation`: a fleet of workers in one thread, on virtual time, from one seed.
- `virtual_time`: the event loop and the clocks of a simulation.
- `plugin`: pytest fixtures with real PostgreSQL and Redis servers.
- `servers`, `server_process`, `server_programs`: how these servers are started, supervised and found.
- `fault_proxy`: a TCP proxy that cuts, delays and refuses connections to a server.
"""
