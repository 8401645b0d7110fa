"""The log backend: the state in each process, and every change a numbered commit of a shared log.

For servers with one atomic operation: store commit `n` if it is not stored yet. Each process holds
the whole state in memory, decides on it, and appends the effects of its decisions. A process that loses
the race for a number applies the commit of the other process, and decides again. One atomic append is therefore
enough for claims, unique keys, limits, leases and batches.

| module | job |
|---|---|
| `log` | the port that S3, NATS and other logs implement |
| `encoding` | commits and snapshots as bytes |
| `undoable_tables` | the state, which can undo the changes of a commit |
| `replica` | the state and its place in the log: follow, append, undo, save snapshots |
| `append_order` | which of the competing processes appends next |
| `commit_thread` | runs all calls that wait, and appends their changes as one commit |
| `backend` | the port of the engine on top of it |
| `storage` | `LogStorage` |
"""

from omniq.storage.log.log import Log as Log
from omniq.storage.log.log import Trimmed as Trimmed
from omniq.storage.log.storage import LogStorage as LogStorage
