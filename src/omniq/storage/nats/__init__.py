"""The NATS backend: tasks in JetStream streams that any number of machines share.

| module | job |
|---|---|
| `storage` | `NatsStorage`: what callers use |
| `backend` | `NatsBackend`: the log backend with wake-ups and the server's time |
| `stream_log` | the log: commits and snapshots as messages of two streams |
| `address` | the servers, the store and the connection options, from a URL |
| `connection` | one connection to a server, and JetStream's API; alone imports the driver |
| `server_check` | the server and its streams, checked on opening and for `omniq doctor` |
"""

from omniq.storage.nats.storage import NatsStorage as NatsStorage
