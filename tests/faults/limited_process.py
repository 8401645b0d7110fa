"""A process of a user who runs nothing else: `python -m tests.faults.limited_process UID LIMIT`.

It applies the limits of a child process, and starts processes until it can start no more. Not a worker: it
may be unable to execute the interpreter, which may be in a folder of root.
"""

from __future__ import annotations

import os
import sys

from omniq import Settings
from omniq.worker.executors.child_limits import check_child_limits, limit_this_process
from tests.faults import fault_tasks


def main(uid: int, limit: int) -> None:
    settings = Settings(child_process_limit=limit)
    # Modules are imported before: the other user may not be able to read them.
    check_child_limits(Settings(child_file_limit=64))
    os.setresuid(uid, uid, uid)
    check_child_limits(settings)
    limit_this_process(settings)
    started = fault_tasks.start_processes(limit // 2)
    try:
        fault_tasks.start_processes(10_000)
    except BlockingIOError as error:
        sys.stdout.write(f"started {started}, then {type(error).__name__}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
