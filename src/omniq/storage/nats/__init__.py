"""The NATS backend: tasks in JetStream streams that any number of machines share.

| module | job |
|---|---|
| `storage` | `NatsStorage`: what callers use |
| `backend` | `NatsBackend`: the log backend in the host, and calls to the host in all other processes |
| `host` | finds the host or becomes it; runs the calls of other processes |
| `calls` | the calls that processes send to the host, as values |
| `replies` | the host's replies to calls |
| `section` | one optimistic section of a process that is not the host |
| `stream_log` | the log: commits and snapshots as messages of two streams |
| `address` | the servers, the store and the connection options, from a URL |
| `connection` | one connection to a server, and JetStream's API; the only module that imports the driver |
| `api_errors` | what the errors of JetStream mean |
| `server_check` | the server and its streams, checked on opening and for `omniq doctor` |
"""

from omniq.storage.nats.storage import NatsStorage as NatsStorage
