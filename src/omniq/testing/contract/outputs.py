"""The output of tasks: stored by the current claim alone, bounded, in order, and gone with the record."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from omniq.errors import InvalidTask, InvalidValue, OutputTooLarge
from omniq.outcomes import Failed
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.stored_output import OUTPUT, OUTPUT_PAGE
from omniq.tasks.task_output import MAX_CHUNK, OutputBatch, OutputPosition, StoredChunk
from omniq.testing.builders import (
    FINAL_KINDS,
    RELEASING_KINDS,
    OutcomeKind,
    a_task,
    an_error,
    an_outcome,
    an_output,
)
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import LEASE, ContractPart, OpenAnother, claim_one, promise

_VALUES = ["one ✓", b"\0two\xff", {"three": [3, None, 1.5]}]


async def _claim_with_output(storage: BaseStorage, *values: Any, **fields: Any) -> None:
    await storage.enqueue(a_task("a", **fields))
    task = await claim_one(storage)
    await storage.append_output([an_output("a", task.token, *(values or _VALUES))])


async def _values(storage: BaseStorage, task_id: str = "a", **options: Any) -> list[Any] | None:
    """All that is returned of the output; None if there is no record of the task."""
    page = await storage.read_output(task_id, **options)
    if page is None:
        return None
    values = [chunk.value for chunk in page.chunks]
    while page is not None and page.has_more:
        page = await storage.read_output(task_id, **{**options, "after": page.after})
        values += [chunk.value for chunk in page.chunks] if page is not None else []
    return values


async def _stored(storage: BaseStorage) -> int:
    """The number of documents that the store has of outputs."""
    engine = storage._opened
    found = [await engine._all_documents(kind) for kind in (OUTPUT, OUTPUT_PAGE)]
    return sum(map(len, found))


class OutputContract(ContractPart):
    """U1 to U8."""

    @promise("U1")
    async def test_only_the_current_claim_adds_to_the_output(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await _claim_with_output(storage)

        assert await other.append_output([an_output("a", 1, "x", first=4)]) == [False]
        refused = [an_output("a", 2, "x", first=4), an_output("unknown", 1, "x")]
        assert await storage.append_output(refused) == [False, False]
        clock.advance(LEASE)
        await other.give_back_abandoned()
        assert await storage.append_output([an_output("a", 1, "x", first=4)]) == [False]
        assert await _values(storage, all_runs=True) == _VALUES

    @promise("U1")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_task_that_has_ended_gets_no_more_output(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([an_outcome(kind, task, clock.now())])

        assert await storage.append_output([an_output("a", 1, "late")]) == [False]
        assert await _values(storage) == []

    @promise("U2", "U4")
    async def test_chunks_that_are_stored_again_are_there_once(self, storage: BaseStorage) -> None:
        await _claim_with_output(storage, 1, 2)
        await storage.append_output([an_output("a", 1, 1, 2, 3)])
        await storage.append_output([an_output("a", 1, 2, 3, first=2)])
        await storage.append_output([an_output("a", 1, 4, first=4)])

        assert await _values(storage) == [1, 2, 3, 4]

    @promise("U3", "U4")
    async def test_the_oldest_chunks_are_dropped_and_the_next_one_says_how_many(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(settings=Settings(max_output_chunks=16))
        await _claim_with_output(storage, *range(1, 8))
        for first in range(8, 38, 3):
            await storage.append_output([an_output("a", 1, *range(first, first + 3), first=first)])
        page = await storage.read_output("a")

        assert page is not None
        numbers = [chunk.number for chunk in page.chunks]
        assert numbers == [chunk.value for chunk in page.chunks]
        assert numbers == list(range(numbers[0], 38))
        assert 14 <= len(numbers) <= 16
        assert [chunk.missed for chunk in page.chunks[:2]] == [numbers[0] - 1, 0]
        assert [chunk.is_first for chunk in page.chunks[:2]] == [True, False]
        late = await storage.read_output("a", OutputPosition(1, 3))
        assert late is not None
        assert late.chunks[0].missed == numbers[0] - 4

    @promise("U3")
    async def test_the_bytes_of_all_runs_together_are_bounded(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage = await open_another(settings=Settings(max_output_bytes=65_536))
        await _claim_with_output(storage, *["x" * 10_000] * 5)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome("released", task, clock.now())])
        token = (await claim_one(storage)).token
        await storage.append_output([an_output("a", token, *["y" * 10_000] * 4)])
        page = await storage.read_output("a", all_runs=True)

        assert page is not None
        assert [chunk.value[0] for chunk in page.chunks] == ["x", "x", "y", "y", "y", "y"]
        assert page.chunks[0].missed == 3

    @promise("U4")
    async def test_a_reader_gets_each_chunk_once_and_in_order(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        reader, seen, after = await open_another(), list[Any](), None
        await _claim_with_output(storage, 1)
        for first in range(2, 900, 90):
            values = range(first, first + 90)
            await storage.append_output([an_output("a", 1, *values, first=first, attempt=1)])
            page = await reader.read_output("a", after)
            assert page is not None
            assert not page.is_final
            assert [chunk.missed for chunk in page.chunks] == [0] * len(page.chunks)
            seen, after = seen + [chunk.value for chunk in page.chunks], page.after

        assert seen == list(range(1, 902))
        assert await _values(reader) == seen
        assert await _values(reader, tail=3) == [899, 900, 901]

    @promise("U4", "U5")
    @pytest.mark.parametrize("kind", [*RELEASING_KINDS, "held"])
    async def test_output_survives_every_outcome_after_which_the_task_runs_again(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await _claim_with_output(storage)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome(kind, task, clock.now())])
        if kind == "held":
            await storage.reschedule("a", clock.now())

        assert await _values(storage) == _VALUES
        again = await claim_one(storage)
        await storage.append_output([an_output("a", again.token, "next", attempt=2)])
        page = await storage.read_output("a", all_runs=True)
        assert page is not None
        assert [(chunk.run, chunk.attempt, chunk.number) for chunk in page.chunks] == [
            *((1, 1, number) for number in (1, 2, 3)),
            (again.token, 2, 1),
        ]

    @promise("U5")
    async def test_a_reader_goes_on_with_the_newest_run_or_reads_all_of_them(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        other = await open_another()
        await _claim_with_output(storage)
        clock.advance(LEASE)
        await other.give_back_abandoned()
        assert await _values(other) == _VALUES
        task = await claim_one(other)
        await other.append_output([an_output("a", task.token, "again", attempt=2)])

        assert await _values(other) == ["again"]
        assert await _values(other, after=OutputPosition(1, 1)) == ["again"]
        assert await _values(other, all_runs=True) == [*_VALUES, "again"]
        assert await _values(other, all_runs=True, after=OutputPosition(1, 2)) == [
            _VALUES[2],
            "again",
        ]

    @promise("U6")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_the_last_page_of_a_task_that_has_ended_says_so(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await _claim_with_output(storage)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome(kind, task, clock.now())])
        page = await storage.read_output("a")

        assert page is not None
        assert ([chunk.value for chunk in page.chunks], page.is_final) == (_VALUES, True)
        rest = await storage.read_output("a", page.after)
        assert rest is not None
        assert (rest.chunks, rest.is_final) == ([], True)

    @promise("U7")
    async def test_output_disappears_with_the_record_of_its_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_output(storage, result_ttl=60.0)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome("succeeded", task, clock.now())])
        clock.advance(59)
        await storage.purge_expired()
        assert await _values(storage) == _VALUES
        clock.advance(2)

        assert await _values(storage) is None
        clock.advance(300)
        await storage.purge_expired()
        assert await _stored(storage) == 0

    @promise("U7")
    @pytest.mark.parametrize("verb", ["delete_task", "purge_results", "delete_dead", "purge_dead"])
    async def test_output_is_deleted_after_its_record_was(
        self, storage: BaseStorage, clock: ManualClock, verb: str
    ) -> None:
        await _claim_with_output(storage)
        await storage.record([Failed("a", 1, an_error())])
        if "dead" in verb:
            await storage.purge_results(clock.now() + timedelta(days=1))
            await storage.purge_expired()
            assert await _values(storage) == _VALUES
        else:
            await storage.delete_dead("a")
        clock.advance(1)
        by_id = verb.startswith("delete")
        await getattr(storage, verb)("a" if by_id else clock.now() + timedelta(days=1))

        assert await _values(storage) is None
        await storage.purge_expired()
        assert await _stored(storage) == 0

    @promise("U7")
    async def test_nothing_is_left_of_a_task_whose_result_is_not_kept(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_output(storage, result_ttl=0.0)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome("succeeded", task, clock.now())])

        assert await _values(storage) is None
        await storage.enqueue(a_task("a"))
        assert await _values(storage, all_runs=True) == []
        again = await claim_one(storage)
        await storage.append_output([an_output("a", again.token, "new")])
        assert await _values(storage, all_runs=True) == ["new"]
        assert await _stored(storage) == 2

    @promise("U7", "E8")
    @pytest.mark.parametrize(
        "end", ["delete_task", "delete_dead", "purge_results", "expiry", "not kept"]
    )
    async def test_an_enqueue_repeated_after_its_task_was_deleted_has_no_output_of_it(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock, end: str
    ) -> None:
        """By the same nonce, and but for an expiry in the same instant."""
        task = a_task("a", result_ttl=0.0 if end in ("not kept", "delete_dead") else 60.0)
        await storage.enqueue_many([task], nonce="call")
        token = (await claim_one(storage)).token
        await storage.append_output([an_output("a", token, *_VALUES)])
        kind: OutcomeKind = "failed" if end == "delete_dead" else "succeeded"
        claimed = await storage.get_task("a")
        assert claimed is not None
        await storage.record([an_outcome(kind, claimed, clock.now())])
        match end:
            case "delete_task" | "delete_dead":
                assert await getattr(storage, end)("a")
            case "purge_results":
                assert await storage.purge_results(clock.now() + timedelta(seconds=1)) == 1
            case "expiry":
                clock.advance(61)
        assert await storage.enqueue_many([task], nonce="call") == ["a"]

        assert await _values(storage, all_runs=True) == []
        other = await open_another()
        again = await claim_one(other)
        await other.append_output([an_output("a", again.token, "new")])
        assert await _values(storage, all_runs=True) == ["new"]
        assert await _stored(storage) == 2

    @promise("U7", "E11")
    async def test_a_task_that_was_replaced_has_no_output_of_its_earlier_call(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        held = {"unique": "key", "on_conflict": "replace"}
        await _claim_with_output(storage, **held)
        task = await storage.get_task("a")
        assert task is not None
        await storage.record([an_outcome("retried", task, clock.now() + timedelta(hours=1))])
        assert await _values(storage) == _VALUES
        assert await storage.enqueue(a_task("b", args=(2,), **held)) == "a"

        assert await _values(storage, all_runs=True) == []
        await storage.purge_expired()
        assert await _stored(storage) == 0
        again = await claim_one(storage)
        await storage.append_output([an_output("a", again.token, "new")])
        assert await _values(storage, all_runs=True) == ["new"]

    @promise("U5", "U7")
    async def test_a_purge_keeps_the_output_of_live_tasks_and_dead_letters(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_output(storage)
        await storage.record([Failed("a", 1, an_error())])
        await storage.enqueue(a_task("b"))
        task = await claim_one(storage)
        await storage.append_output([an_output("b", task.token, "b")])
        for _ in range(3):
            clock.advance(timedelta(days=10))
            await storage.purge_expired()

        assert await _values(storage) == _VALUES
        assert await _values(storage, "b") == ["b"]
        await storage.retry_dead("a")
        assert await _values(storage) == _VALUES

    @promise("U8")
    async def test_a_wait_for_output_ends_with_the_next_chunk_and_with_the_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _claim_with_output(storage, 1)
        task = await storage.get_task("a")
        assert task is not None
        first = asyncio.ensure_future(storage.wait_for_output("a", OutputPosition(1, 1)))
        await asyncio.sleep(0)
        await storage.append_output([an_output("a", 1, 2, first=2)])
        page = await asyncio.wait_for(first, 10)
        assert page is not None
        assert [chunk.value for chunk in page.chunks] == [2]
        last = asyncio.ensure_future(storage.wait_for_output("a", page.after))
        await asyncio.sleep(0)
        await storage.record([an_outcome("succeeded", task, clock.now())])
        page = await asyncio.wait_for(last, 10)

        assert page is not None
        assert (page.chunks, page.is_final) == ([], True)
        assert await storage.wait_for_output("unknown") is None

    @promise("U8")
    async def test_a_wait_for_output_without_any_ends_after_its_timeout(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        page = await storage.wait_for_output("a", timeout=0)

        assert page is not None
        assert (page.chunks, page.is_final) == ((), False)

    async def test_batches_that_cannot_be_stored_are_refused(self, storage: BaseStorage) -> None:
        await _claim_with_output(storage)
        too_large = OutputBatch(
            task_id="a",
            token=1,
            attempt=1,
            first=4,
            chunks=[StoredChunk(0, b"x" * (MAX_CHUNK + 1))],
        )

        assert await storage.append_output([]) == []
        with pytest.raises(OutputTooLarge):
            await storage.append_output([too_large])
        with pytest.raises(InvalidTask):
            await storage.append_output([an_output("a/b", 1, "x")])
        with pytest.raises(InvalidValue):
            await storage.append_output([an_output("a", 1, "x", first=0)])
        with pytest.raises(InvalidValue):
            await storage.append_output([an_output("a", 1, "x"), an_output("a", 2, "x")])
        assert await _values(storage) == _VALUES
