"""The PostgreSQL backend: tasks in a database that any number of machines share.

| module | job |
|---|---|
| `storage` | `PostgresStorage`: opens and closes, collects enqueues, and sets up the schema |
| `backend` | the port of the engine: sections, pages, counts, leases |
| `section` | one read-modify-write: reads that are compared by one write |
| `read_section` | sections that only read, several in one statement |
| `record_and_claim` | the fast path: record outcomes and claim tasks in one round trip |
| `enqueue` | insert new tasks; a large batch is sent while it is being built |
| `address` | reads a URL before the driver does, whose errors quote it |
| `connection` | connections to the server, with timeouts and reconnects; alone imports asyncpg |
| `transport` | keepalives, and the size of reads |
| `wakeups` | wake up storages that wait for work or results, also in other processes |
| `listener` | LISTEN: the connection that receives notifications |
| `queries` | pages and counts |
| `scan` | the newest tasks, at a bounded cost |
| `user_transaction` | enqueue inside a caller's transaction, on any known driver |
| `task_transaction` | transactions of running tasks, whose commit records the outcome |
| `vacuum` | vacuum the live tasks while many are claimed |
| `encoding` | rows to columns and back |
| `statements` | reads the SQL files, fills in the schema's name, and runs statements |
| `migrations` | installs, upgrades and checks the schema |
| `upgrade` | the part of an upgrade that has to decode what is stored |
| `server_check` | the server's settings, for `omniq doctor` |

`sql/` has the migrations (`0001_tables.sql`, …), the count of all tasks, and in `functions/` the
functions that are installed in the database.
"""

from omniq.storage.postgres.storage import PostgresStorage as PostgresStorage
