"""The S3 backend: the log of `omniq.storage.log`, one object for each commit.

An object is created only if it does not exist (`If-None-Match: *`): if several processes write the same number, one succeeds.

| object | what it is |
|---|---|
| `log/<n>` | commit n |
| `snap/<n>`, `chunk/<n>-…` | the state after commit n: the list of its chunks, and the chunks |
| `floor/<n>` | commits up to n may have been deleted |
| `clock` | written to read the server's time |

| module | job |
|---|---|
| `storage` | `S3Storage` |
| `address` | bucket, prefix, endpoint and region, from a URL |
| `connection` | the only module that imports the driver: requests, retries, errors |
| `object_log` | `S3Log`: appends and reads commits |
| `snapshots` | saves and loads snapshots |
| `trimming` | deletes old objects, and detects that a process was suspended for too long |
| `server_check` | refuses a server without conditional writes; `omniq doctor` |
"""

from omniq.storage.s3.storage import S3Storage as S3Storage
