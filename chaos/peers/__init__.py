"""The same kills for other task queues as for omniq: lost tasks, second runs, recovery times.

Each queue has an adapter of at most a hundred lines, which runs in a separate environment. Events
are recorded outside every store, and counted in the same way for all queues.

    __main__    the command: `python -m chaos.peers`
    registry    the queues, their settings and guarantees
    adapters    one module for each queue
    workload    the tasks, and the events they record
    fleet       one round: a producer, workers, kills
    counting    counts the events of a round
    record      the recorded rounds: results.json
    page        the page docs/reference/fault-comparison.md
"""
