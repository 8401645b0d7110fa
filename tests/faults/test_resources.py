"""What a store does while the system refuses resources, and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio, os, resource, signal, sys
from omniq.errors import OmniqError, StorageError
from omniq.storage import open_storage
from omniq.testing.builders import a_task, some_tasks

url, kind = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

class Lack:
    def __enter__(self):
        self.taken = []
        if kind == "descriptors":
            name, soft = resource.RLIMIT_NOFILE, None
            self.before = resource.getrlimit(name)
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(name, (highest + 1, self.before[1]))
            try:
                while True:
                    self.taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
        else:
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.before[1]))

    def __exit__(self, *_):
        for fd in self.taken:
            os.close(fd)
        name = resource.RLIMIT_NOFILE if kind == "descriptors" else resource.RLIMIT_FSIZE
        resource.setrlimit(name, self.before)

async def main():
    async with open_storage(url) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        refused = 0
        with Lack():
            for number in range(5):
                try:
                    await storage.enqueue(a_task(f"x{number}", args=("x" * 100_000,)))
                except StorageError:
                    refused += 1
            try:
                async with open_storage(url) as other:
                    await other.list_tasks()
            except OmniqError:
                # Not even the settings can be read.
                refused += 1
        print("refused", refused)
        await storage.enqueue(a_task("after"))
        listed = sorted(task.id for task in await storage.list_tasks())
        print("missing", sorted({"a", "b", "c", "after"} - set(listed)))
        claimed = await storage.reserve(50)
        print("same", sorted(task.id for task in claimed) == listed)
        print("whole", all(task.args in ((), ("x" * 100_000,)) for task in claimed))
        async with open_storage(url) as other:
            print("dead", [letter.task_id for letter in await other.list_dead()])

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["descriptors", "size"])
@pytest.mark.fault("F56", "F57")
@pytest.mark.parametrize("backend", ["file", "sqlite"])
def test_a_refused_system_call_raises_an_error_and_leaves_the_store_intact(kind, backend, tmp_path):
    urls = {
        "file": f"file://{tmp_path}/store?durability=os",
        "sqlite": f"sqlite:///{tmp_path}/store.db?durability=os",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, urls[backend], kind],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines())

    assert done.returncode == 0, done.stderr
    assert int(printed["refused"]) > 0
    assert (printed["missing"], printed["same"], printed["whole"], printed["dead"]) == (
        "[]",
        "True",
        "True",
        "[]",
    )


READ_ONLY = """
import asyncio, subprocess, sys
from omniq.errors import StorageError
from omniq.storage import open_storage
from omniq.testing.builders import a_task, some_tasks

url, place = sys.argv[1:]

def mount(*options):
    subprocess.run(["mount", *options], check=True)

async def main():
    mount("-t", "tmpfs", "-o", "mode=700", "none", place)
    try:
        async with open_storage(url) as storage:
            await storage.enqueue_many(some_tasks("ab"))
        mount("-o", "remount,ro", place)
        refused = 0
        try:
            async with open_storage(url) as storage:
                await storage.enqueue(a_task("x"))
        except StorageError:
            refused += 1
        mount("-o", "remount,rw", place)
        async with open_storage(url) as storage:
            await storage.enqueue(a_task("c"))
            print(refused, sorted(task.id for task in await storage.reserve(5)))
    finally:
        subprocess.run(["umount", "-l", place], check=False)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F55")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("backend", ["file", "sqlite"])
def test_a_temporarily_read_only_disk_raises_an_error_and_is_used_again_afterwards(
    backend, tmp_path
):
    place = tmp_path / "mounted"
    place.mkdir()
    urls = {
        "file": f"file://{place}/store?durability=os",
        "sqlite": f"sqlite:///{place}/store.db?durability=os",
    }
    # In a separate mount namespace: nothing stays mounted, however the test ends.
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", READ_ONLY, urls[backend], str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip(done.stderr.strip())

    assert done.returncode == 0, done.stderr
    assert done.stdout.split(" ", 1) == ["1", "['a', 'b', 'c']\n"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.fault("F51")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a disk")
def test_acknowledged_tasks_survive_a_power_cut():
    command = [sys.executable, "-m", "tests.faults.powercut", "--cuts", "4", "--seed", "7"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout + done.stderr)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("cuts 4, acknowledged ") == 2
    assert "acknowledged 0" not in done.stdout
