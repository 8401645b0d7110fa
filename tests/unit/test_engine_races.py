"""What others do between two steps of a verb, or before its caller has the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omniq.storage.memory import MemoryStorage
from omniq.storage.memory.backend import MemoryBackend
from omniq.testing.builders import a_task, an_error
from omniq.testing.clock import ManualClock


class SlowBackend(MemoryBackend):
    """A memory store whose next reply is kept until `replies` is set."""

    is_slow = False

    def __init__(self, *parts):
        super().__init__(*parts)
        self.replies = asyncio.Event()

    async def transact(self, work, **options):
        is_slow, self.is_slow = self.is_slow, False
        reply = await super().transact(work, **options)
        if is_slow:
            await self.replies.wait()
        return reply


async def test_a_late_reply_to_a_fenced_owner_is_no_sign_of_a_store_that_went_back():
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    backend = SlowBackend(storage._memory, clock, storage._local_wakeups)
    storage._use(backend)
    async with storage, storage.another() as other:
        await storage.enqueue(a_task("a"))
        await storage.renew()
        backend.is_slow = True
        late = asyncio.create_task(storage.reserve(1))
        await asyncio.sleep(0)
        clock.advance(storage.settings.lease)
        await other.give_back_abandoned()
        storage._change_owner(storage.owner)
        (again,) = await storage.reserve(1)
        backend.replies.set()

        assert await late == []
        assert again.token == 2
        assert (await storage.store_record()).epoch == 0
        assert await storage.held_by(storage.owner) == {"a": 2}


class InterruptedBackend(MemoryBackend):
    """A memory store that calls `after_page` after each page it has read."""

    after_page: Callable[[], Awaitable[None]] | None = None

    async def page(self, query):
        found = await super().page(query)
        if self.after_page is not None:
            await self.after_page()
        return found


async def test_a_dead_letter_that_is_retried_while_others_are_purged_keeps_its_checkpoint():
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    backend = InterruptedBackend(storage._memory, clock, storage._local_wakeups)
    storage._use(backend)
    async with storage, storage.another() as other:
        await storage.enqueue_many([a_task("a"), a_task("b")])
        for task in await storage.reserve(2):
            await storage.save_checkpoint(task.id, task.token, b"saved")
            await storage.mark_failed(task.id, an_error(), will_retry=False)
        clock.advance(1)

        async def retry():
            backend.after_page = None
            await other.retry_dead("a")

        backend.after_page = retry

        assert await storage.purge_dead(clock.now()) == 1
        assert await storage.load_checkpoint("a") == b"saved"
        assert await storage.load_checkpoint("b") is None
