"""The SQLite backend: tasks in one database file that the processes of one machine share.

| module | job |
|---|---|
| `storage` | `SQLiteStorage`: opens and closes, and implements the verbs of the contract |
| `connection` | creates and connects to a database file; alone imports sqlite3 |
| `writer_thread` | the threads that own the connections and batch jobs into transactions |
| `enqueue` | insert tasks; retry dead letters |
| `record` | record outcomes, with the rules in Python |
| `claim` | claim due tasks |
| `leases` | the leases of the owners, in a second database file |
| `recovery` | give back the tasks of an owner that retires or has lost its lease |
| `finished` | delete results and dead letters |
| `checkpoints` | checkpoints and progress |
| `wakeups` | notices commits of other processes |
| `queries` | the statements of readers |
| `scan` | the newest tasks, at a bounded cost |
| `user_transaction` | enqueue inside a caller's transaction, on sqlite3 or SQLAlchemy |
| `task_transaction` | transactions of running tasks, whose commit records the outcome |
| `tables` | rows to columns and back, many at a time |

`sql/` has the schemas of both files (`schema.sql`, `leases.sql`), the upgrades to later versions
(`schema_2.sql`, …), and the longer statements.
"""

from omniq.storage.sqlite.storage import SQLiteStorage as SQLiteStorage
