"""The file backend: tasks as files in a folder that the processes of one machine share.

| module | job |
|---|---|
| `storage` | `FileStorage`: opens and closes, and implements the verbs of the contract |
| `store` | `Store`: carries out the verbs, with blocking system calls |
| `store_thread` | the thread in which the store runs |
| `task_files` | reads the records of tasks, and changes them by the protocol of renames |
| `enqueue` | adds tasks to the queue folder |
| `claim` | claims due tasks |
| `record` | records outcomes and cancellations; gives back and retries tasks |
| `finished` | counts, lists and deletes ended tasks and dead letters |
| `leases` | one file for each owner, whose name contains the end of its lease |
| `gates` | the shared state of running limits, rate limits and breakers |
| `unique_keys` | the tasks that hold unique keys |
| `schedules` | the schedules |
| `checkpoints` | checkpoints and progress |
| `wakeups` | inotify: which names have appeared and disappeared in the queue folder |
| `index` | the names in the queue folder, in memory |
| `shared_values` | compare-and-swap on small values, made of renames |
| `shared_file` | records of many tasks in one file |
| `listed_records` | reads the records of listed names, each shared file once |
| `encoding` | the contents of files: header, checksum, record |
| `file_names` | builds and parses the names of files |
| `filesystem` | the system calls: what is atomic, and what is durable |

The layout of the folder and the table of crashes are at the top of `storage`.
"""

from omniq.storage.file.storage import FileStorage as FileStorage
