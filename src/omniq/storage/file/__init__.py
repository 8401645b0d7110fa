"""The file backend: tasks as files in a folder that the processes of one machine share.

| module | job |
|---|---|
| `storage` | `FileStorage`, and the layout of the folder |
| `backend` | `FileBackend`: the port of the engine, and the watch for work |
| `store` | `Store`: carries out the calls of the backend, with blocking system calls |
| `section` | one read-modify-write of the engine |
| `writes` | changes many names in one step, with renames alone; ends the writes of dead processes |
| `task_files` | follows the folder of live tasks, and reads records |
| `index` | the names in that folder, in memory |
| `wakeups` | inotify: which names have appeared and disappeared in it |
| `finished` | reads, finds and deletes the records of ended tasks, and dead letters |
| `queries` | counts and lists live tasks, ended tasks and dead letters |
| `leases` | one file for each owner, whose name contains the end of its lease |
| `upgrade` | moves what older versions have stored to the new folders |
| `file_names` | builds and parses names; what the name of a task says beside its record |
| `shared_file` | many records in one file |
| `encoding` | the contents of files: header, checksum, record |
| `filesystem` | the system calls: what is atomic, and what is durable |
"""

from omniq.storage.file.storage import FileStorage as FileStorage
