"""The NATS backend: tasks in JetStream streams that any number of machines share.

| module | job |
|---|---|
| `storage` | `NatsStorage`: what callers use |
| `backend` | `NatsBackend`: the log backend in the host, and calls to the host in all other processes |
| `host` | finds the process that is the host, or becomes it; runs the calls of the others |
| `calls` | what travels between processes: each call of the port as a value |
| `replies` | what the host answers to a call |
| `section` | one optimistic section of a process that is not the host |
| `stream_log` | the log: commits and snapshots as messages of two streams |
| `address` | the servers, the store and the connection options, from a URL |
| `connection` | one connection to a server, and JetStream's API; alone imports the driver |
| `api_errors` | what the errors of JetStream mean |
| `server_check` | the server and its streams, checked on opening and for `omniq doctor` |
"""

from omniq.storage.nats.storage import NatsStorage as NatsStorage
