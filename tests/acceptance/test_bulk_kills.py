"""A bulk change whose process is killed is completed by the same command, and nothing is done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus

COUNT = 4_000


@pytest.mark.deep
@pytest.mark.timeout(180)
def test_the_same_command_completes_what_a_kill_has_interrupted(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/tasks.db?durability=os"
    command = [sys.executable, "-m", "omniq", "tasks", "cancel", "--all", "--func", "shop.charge"]
    command += ["--yes", "--json", "--url", url]
    with TaskQueue(url) as queue:
        queue.enqueue_many([("shop.charge", (order,)) for order in range(COUNT)])
        first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        progress = json.loads(first.stdout.readline())
        first.kill()
        first.communicate(timeout=60)
        before = queue.stats().by_status[TaskStatus.CANCELLED]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        report = json.loads(second.stdout.splitlines()[-1])

        assert progress == {"progress": 1_000, "total": COUNT}
        assert before >= 1_000
        assert report == {"done": COUNT - before, "refused": {}}
        assert queue.stats().by_status[TaskStatus.CANCELLED] == COUNT
