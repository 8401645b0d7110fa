"""The output of tasks: what a running task stores of it, and what readers get."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.errors import InvalidValue, OutputTooLarge
from omniq.failpoints import hit
from omniq.models import check_id, check_int
from omniq.storage.side_data import SideData
from omniq.storage.stored_output import Bounds, OutputQuery
from omniq.tasks.task_output import MAX_CHUNK, OutputBatch, OutputPage, OutputPosition

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks for output: more and more while there is none."""


class Outputs(SideData):
    """The verbs for the output of tasks."""

    async def append_output(self, batches: Sequence[OutputBatch]) -> list[bool]:
        """Add chunks to the output of running tasks, in one step; returns for each batch whether it was accepted.

        U1. Only the current claim may add to the output of its run; of another, nothing is stored.
        U2. A chunk that is stored again, since the reply to the first time was lost, is there once.
        U3. The newest `max_output_chunks` chunks and `max_output_bytes` bytes of a task are kept, of all its
            runs together; the oldest are dropped, by up to an eighth of that at a time.
        """
        if len({batch.task_id for batch in batches}) < len(batches):
            raise InvalidValue("batches: there are several of one task")
        for batch in batches:
            check_id(batch.task_id)
            check_int("first", batch.first, low=1, error=InvalidValue)
            largest = max((len(chunk.data) for chunk in batch.chunks), default=0)
            if largest > MAX_CHUNK:
                raise OutputTooLarge(largest, MAX_CHUNK)
        if not batches:
            return []
        owner, bounds = self._identity.owner, Bounds.of(self._settings)
        hit("append_output.before")
        accepted = await self._opened.append_output(owner, batches, bounds)
        hit("append_output.after")
        self._local_wakeups.notify_results(
            [batch.task_id for batch, is_stored in zip(batches, accepted, strict=True) if is_stored]
        )
        return accepted

    async def read_output(
        self,
        task_id: str,
        after: OutputPosition | None = None,
        *,
        all_runs: bool = False,
        tail: int | None = None,
    ) -> OutputPage | None:
        """Return a page of the output behind `after`; None when the storage has no record of the task.

        Without `all_runs` it is that of the newest run that has output: a reader that is behind a chunk of
        an earlier run goes on there. With `tail`, only that many of the newest chunks.

        U4. The chunks of a run are returned once and in order, numbered from 1, with its attempt and its token.
            Of chunks that are left out, the next one says how many.
        U5. It survives every outcome after which the task runs again, and crashes. With `all_runs` the runs
            follow each other in order.
        U6. Of a task that has ended, a page that `is_final` says so: all that the run had stored before its
            outcome was returned.
        U7. It is there as long as the record of its task or its dead letter is, and no record that gets the same id
            later has it. Nothing is left of a task with `result_ttl=0` that has ended. The workers delete it
            at a later purge.
        """
        check_id(task_id)
        if tail is not None:
            check_int("tail", tail, low=1, error=InvalidValue)
        query = OutputQuery(after=after, all_runs=all_runs, tail=tail)
        return await self._opened.read_output(task_id, query)

    async def wait_for_output(
        self,
        task_id: str,
        after: OutputPosition | None = None,
        *,
        all_runs: bool = False,
        timeout: float | None = None,
    ) -> OutputPage | None:
        """Wait for output behind `after`; returns a page without chunks after `timeout`, or when there is no more.

        U8. Output that is added through this object ends the wait immediately, and so does the end of the task.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            with self._local_wakeups.listen_for_result(task_id) as changed:
                page = await self.read_output(task_id, after, all_runs=all_runs)
                if page is None or page.chunks or page.is_final:
                    return page
                after = page.after
                remaining = None if deadline is None else deadline - self._clock.monotonic()
                if remaining is not None and remaining <= 0:
                    return page
                if not page.has_more:
                    seconds = pause if remaining is None else min(pause, remaining)
                    await self._clock.wait(changed, seconds)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
