"""The Redis backend: tasks in a Redis or Valkey server that any number of machines share.

| module | job |
|---|---|
| `storage` | `RedisStorage`: what callers use; batches enqueues |
| `backend` | `RedisBackend`: the port of the engine, and its fast path |
| `section` | one optimistic section: reads, and a write that compares what was read |
| `encoding` | rows to stored strings and back |
| `upgrade` | prepares a store, and moves tasks out of the layout of an older version |
| `address` | the address of servers and the connection options, from a URL |
| `primaries` | which server has the store: asks Sentinels, or the servers of a cluster |
| `connection` | one connection to the server, with timeouts and reconnects; alone imports hiredis |
| `error_replies` | what the errors of a server mean, and what to do about them |
| `scripts` | composes the Lua scripts, runs them, and retries when the connection is lost |
| `wakeups` | subscribes to notifications from the server |
| `server_check` | the server's settings, checked on opening and for `omniq doctor` |

`lua/` has the scripts, and in `lib/` the parts that scripts share.
"""

from omniq.storage.redis.storage import RedisStorage as RedisStorage
