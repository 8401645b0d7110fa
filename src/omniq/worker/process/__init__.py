"""The processes of `omniq worker`.

- `supervisor`: `Worker`: starts the pools, stops and restarts them, returns the exit code.
- `shutdown`: what SIGTERM, SIGINT, SIGQUIT and SIGHUP ask of a worker.
- `pool_process`: the pool in this process, for `--processes 1`.
- `start_report`: what a worker says when it starts.
- `file_watch`: notices changed Python files, for `--reload`.
- `module_import`: imports the modules of a worker, and says why it cannot.
- `task_modules`: which modules of a package have tasks, by their source.
- `worker_children`: several worker processes, started and replaced by the supervisor.
- `worker_child`: the program of one of them.
- `inbox`: where the main thread waits for signals and messages.
- `console`: log lines and error messages on stderr, and exit codes.
"""
