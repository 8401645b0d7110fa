"""The SQLite backend: tasks in one database file that the processes of one machine share.

| module | job |
|---|---|
| `storage` | `SQLiteStorage`: the storage on this backend; refuses to be used after a fork |
| `backend` | `SQLiteBackend`: opens both files, runs sections, reads, leases and waits |
| `section` | reads and writes of one atomic step |
| `lanes` | the ready tasks of a claim, by function or by queue and function |
| `tables` | rows to columns and back, many at a time |
| `damaged_rows` | sets rows aside that omniq has not written, after one made a call fail |
| `queries` | pages and counts |
| `scan` | the newest tasks, at a bounded cost |
| `leases` | the leases of the owners, in a second database file |
| `store_record` | what the store says about itself, and which lease file it has |
| `wakeups` | notices commits of other processes |
| `user_transaction` | sections inside a caller's transaction, on sqlite3 or SQLAlchemy |
| `task_transaction` | transactions of running tasks, whose commit records the outcome |
| `connection` | creates and connects to a database file; alone imports sqlite3 |
| `writer_thread` | the threads that own the connections and batch jobs into transactions |
| `forks` | lets a forked process use a database that its parent had open |
| `upgrade` | SQL functions that upgrade a store of an earlier version |

`sql/` has the schemas of both files (`schema.sql`, `leases.sql`), the upgrades to later versions
(`schema_2.sql`, …), and the longer statements.
"""

from omniq.storage.sqlite.storage import SQLiteStorage as SQLiteStorage
