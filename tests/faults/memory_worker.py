"""A worker with little memory: `python -m tests.faults.memory_worker CGROUP` prints what became of its tasks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from omniq import AsyncTaskQueue, Settings
from tests.faults import fault_tasks


async def main(group: Path) -> None:
    settings = Settings(base_retry_delay=0.0)
    async with AsyncTaskQueue("memory://", settings=settings) as queue:
        # Before any child is started: running processes stay in their group.
        (group / "cgroup.procs").write_text(str(os.getpid()))
        async with queue.worker(concurrency=2):
            greedy = await queue.enqueue(fault_tasks.eat_memory, 900)
            modest = [await queue.enqueue(fault_tasks.eat_memory, 1) for _ in range(3)]
            failed = await queue.get_result(greedy.id, timeout=40)
            fine = [await handle.result(timeout=30) for handle in modest]
        letter = await queue.dead.get(greedy.id)
    assert failed is not None
    assert failed.error is not None
    report = {
        "fine": fine,
        "error": [failed.error.error_type, failed.error.message],
        "attempts": failed.attempts,
        "is_dead": letter is not None,
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
