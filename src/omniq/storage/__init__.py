"""Where tasks are stored. `open_storage(url)` picks the backend; `BaseStorage` is the contract.

| module | job |
|---|---|
| `urls` | `open_storage`: a storage object from a URL |
| `base` | `BaseStorage`: enqueue, claim, record, renew and wait, over the engine |
| `side_data` | the contract's second part: dead letters, checkpoints, schedules, pauses, retention |
| `inspection` | the contract's read side |
| `flows` | the contract's part for workflows |
| `outputs` | the contract's part for the output of tasks |
| `controls` | the contract's part for operators: pauses, limits, breakers |
| `claim_register` | the claims of an owner, who has each of them, compared with what the store says |
| `types` | values that a storage exchanges with its callers and its backend |
| `row_rules` | a task as a storage holds it, and every change it may go through |
| `engine` | every verb of the contract as atomic steps over a backend: enqueue, claim, record |
| `lease_engine` | the same for the lease of an owner, and stores that went back |
| `recovery_engine` | the same for the tasks of dead workers |
| `dead_letter_engine`, `checkpoint_engine`, `schedule_engine` | the same for dead letters, checkpoints and progress, and schedules |
| `flow_engine`, `output_engine` | the same for workflows, and for the output of tasks |
| `operator_engine`, `retention_engine` | the same for operators, and for what has expired |
| `engine_base` | what all steps share: a section that is repeated when another step was first |
| `insertion`, `flow_insertion` | which rows an enqueue inserts, and which unique keys they hold; the edges of a workflow |
| `conflicts` | what an enqueue does when its unique key is held |
| `step` | one atomic step: the rows it has read, and what becomes of them |
| `claim` | which rows an owner gets, and in which order |
| `fairness` | the place in line of tasks with a `fair_key` |
| `sequences` | tasks with one key, one at a time and in order |
| `release_dependents` | what the end of a record changes in others |
| `pauses` | queues and functions of which nothing is claimed |
| `incarnation` | notices that a store has gone back to an earlier state |
| `gate_states` | limits and breakers in one step: who enters, who is parked, who is offered room |
| `sealed_documents` | how schedules and checkpoints are stored, and those of an older omniq, which wait for a seal |
| `pending_hooks` | calls of `on_dead` that are recorded with a dead letter until they are made |
| `stored_output` | the output of tasks as documents |
| `run_history` | counts of runs by minute and hour, ended workers, operator actions |
| `worker_requests` | what one worker is asked to do, and its answers |
| `row_seals` | what a key protects of a row beside its body: dead letters, unique keys, how it may run |
| `known_rows` | the rows that a storage object has claimed: plans their outcomes for fast paths |
| `backend` | the port: what a backend implements |
| `row_codec` | a row as columns and a rest, for backends that store it so |
| `tables`, `ready_rows` | everything a store holds, in memory, for backends that hold it in the process |
| `run_counts` | how many runs ended in which way, and how long they took |
| `store_clock` | the time of a server, as far as it is known here |
| `newest_by_id` | the newest tasks, for backends that sort tasks by id |
| `enqueue_batcher` | writes concurrent enqueues together, for backends on a server |
| `wakeups` | wake-ups within one process |
| `permissions` | refuses files and folders that other users may write to |
| `connection_advice` | what to do about a server that does not answer |
| `memory`, `file`, `sqlite`, `postgres`, `redis`, `nats`, `s3` | the backends, a package each |
| `log` | the common part of backends on a log that can only be appended to |
"""

from omniq.storage.base import BaseStorage
from omniq.storage.types import Capabilities
from omniq.storage.urls import open_storage

__all__ = ["BaseStorage", "Capabilities", "open_storage"]
