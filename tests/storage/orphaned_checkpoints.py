"""Shows that a purge deletes checkpoints whose task is gone, on the store of each backend.

No call of the storage interface leaves such a checkpoint behind; another version of omniq, or a
repair by hand, may have. Each backend's test class therefore copies one within its store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

from loguru import logger

from omniq import AsyncTaskQueue, log
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock

CopyCheckpoint = Callable[[str, str], Awaitable[None]]
"""Copies the checkpoint of one task id to another id, without any call of the storage."""


class OrphanedCheckpointTests:
    """Needs a fixture `copy_checkpoint` beside those of the contract suite."""

    async def test_a_purge_deletes_an_old_checkpoint_whose_task_is_gone(
        self, storage: BaseStorage, clock: ManualClock, copy_checkpoint: CopyCheckpoint
    ) -> None:
        await storage.enqueue(a_task("live"))
        (task,) = await storage.reserve(1)
        await storage.save_checkpoint("live", task.token, b"step 3")
        await copy_checkpoint("live", "gone")
        assert await storage.load_checkpoint("gone") == b"step 3"

        assert await storage.purge_checkpoints(clock.now()) == 0
        assert await storage.load_checkpoint("gone") == b"step 3"

        clock.advance(timedelta(seconds=1))
        assert await storage.purge_checkpoints(clock.now()) == 1
        assert await storage.load_checkpoint("gone") is None
        assert await storage.load_checkpoint("live") == b"step 3"

    async def test_a_queue_deletes_orphaned_state_by_age_and_logs_how_much(
        self, storage: BaseStorage, clock: ManualClock, copy_checkpoint: CopyCheckpoint
    ) -> None:
        queue = AsyncTaskQueue(storage)
        await storage.enqueue(a_task("live"))
        (task,) = await storage.reserve(1)
        await storage.save_checkpoint("live", task.token, b"step 3")
        await copy_checkpoint("live", "gone")
        lines: list[tuple[str, int]] = []
        sink = logger.add(
            lambda message: lines.append(
                (message.record["level"].name, message.record["extra"]["count"])
            ),
            filter=lambda record: record["extra"].get("event") == "state.cleaned",
        )
        log.enable("INFO")
        try:
            clock.advance(timedelta(hours=23))
            too_young = await queue.cleanup_orphaned_state()
            younger = await queue.cleanup_orphaned_state(older_than=timedelta(hours=22))
        finally:
            log.disable()
            logger.remove(sink)

        assert (too_young, younger) == (0, 1)
        assert lines == [("INFO", 0), ("INFO", 1)]
        assert await storage.load_checkpoint("gone") is None
        assert await storage.load_checkpoint("live") == b"step 3"
