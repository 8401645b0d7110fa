"""The Redis backend: tasks in a Redis or Valkey server that any number of machines share.

| module | job |
|---|---|
| `storage` | `RedisStorage`: opens and closes, and implements the verbs of the contract |
| `address` | the server's address and connection options, from a URL |
| `connection` | one connection to the server, with timeouts and reconnects; alone imports hiredis |
| `scripts` | composes the Lua scripts, runs them, and retries when the connection is lost |
| `record` | plans what outcomes change; the scripts apply it |
| `encoding` | rows to stored strings and back |
| `wakeups` | subscribes to notifications from the server |
| `side_data` | results, dead letters, checkpoints, progress, schedules, pauses |
| `queries` | replies to readers |
| `server_check` | the server's settings, checked on opening and for `omniq doctor` |

`lua/` has one script for each verb, and in `lib/` the parts that scripts share.
"""

from omniq.storage.redis.storage import RedisStorage as RedisStorage
