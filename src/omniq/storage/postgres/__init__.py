"""The PostgreSQL backend: tasks in a database that any number of machines share.

| module | job |
|---|---|
| `storage` | `PostgresStorage`: opens and closes, and implements the verbs of the contract |
| `connection` | connections to the server, with timeouts and reconnects; alone imports asyncpg |
| `enqueue` | insert tasks, singly or in batches; retry dead letters |
| `record_and_claim` | the fast path: record outcomes and claim tasks in one round trip |
| `record` | the rule path: record outcomes in a transaction, with the rules in Python |
| `claim` | the rule path: claim gated, suspect and expired tasks |
| `recovery` | give back the tasks of an owner that retires or has lost its lease |
| `wakeups` | LISTEN and NOTIFY: wake up waiting storages in other processes |
| `side_data` | results, dead letters, checkpoints, progress, schedules, pauses |
| `queries` | the statements of readers |
| `scan` | the newest tasks, at a bounded cost |
| `read_batcher` | combines concurrent reads of single tasks |
| `user_transaction` | enqueue inside a caller's transaction, on any known driver |
| `task_transaction` | transactions of running tasks, whose commit records the outcome |
| `vacuum` | vacuum the live tasks while many are claimed |
| `encoding` | rows to columns and back |
| `statements` | reads the SQL files and fills in the schema's name |
| `migrations` | installs, upgrades and checks the schema |
| `server_check` | the server's settings, for `omniq doctor` |

`sql/` has the migrations (`0001_tables.sql`, …), single statements, and in `functions/` the
functions that are installed in the database.
"""

from omniq.storage.postgres.storage import PostgresStorage as PostgresStorage
