"""The Redis backend: tasks in a Redis or Valkey server that any number of machines share.

| module | job |
|---|---|
| `storage` | `RedisStorage`: what callers use; batches enqueues |
| `backend` | `RedisBackend`: the port of the engine, and its fast path |
| `section` | one optimistic section: reads, and a write that compares what was read |
| `encoding` | rows to stored strings and back |
| `upgrade` | prepares a store, and moves tasks out of the layout of an older version |
| `address` | the server's address and connection options, from a URL |
| `connection` | one connection to the server, with timeouts and reconnects; alone imports hiredis |
| `scripts` | composes the Lua scripts, runs them, and retries when the connection is lost |
| `wakeups` | subscribes to notifications from the server |
| `server_check` | the server's settings, checked on opening and for `omniq doctor` |

`lua/` has the scripts, and in `lib/` the parts that scripts share.
"""

from omniq.storage.redis.storage import RedisStorage as RedisStorage
