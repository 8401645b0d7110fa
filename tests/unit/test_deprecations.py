"""Names of earlier versions work for one release, and warn."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from omniq import AsyncTaskQueue, DeadLetter, TaskQueue, errors, events
from omniq.models import Task, TaskError
from omniq.outcomes import Failed
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage import BaseStorage
from omniq.text.to_json import plain

LETTER = DeadLetter(
    task_id="a",
    func_path="mail.send",
    failure_reason="exhausted",
    attempt_count=4,
    first_failure=datetime(2026, 1, 1, tzinfo=UTC),
    last_failure=datetime(2026, 1, 2, tzinfo=UTC),
    error_details="ValueError: no such address",
)


class LetterOf0_1(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter as the release before this one defined it."""

    task_id: str
    task_type: str
    failure_reason: str
    attempt_count: int
    first_failure: datetime
    last_failure: datetime
    error_details: str
    queue: str = "default"
    checkpoint: bytes | None = None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TaskFailed", events.TaskFailure),
        ("TaskCancelled", events.TaskCancellation),
        ("LeaseLost", events.LeaseLoss),
    ],
)
def test_an_event_that_shared_its_name_with_an_error_has_both_names(old, new):
    with pytest.warns(DeprecationWarning, match=f"omniq.events.{old} .* use {new.__name__}"):
        found = getattr(events, old)

    assert found is new
    assert getattr(errors, old) is not new


def test_the_new_names_of_events_do_not_change_what_is_logged():
    names = [kind.name for kind in (events.TaskFailure, events.TaskCancellation, events.LeaseLoss)]

    assert names == ["task.failed", "task.cancelled", "lease.lost"]


def test_a_misspelt_event_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'TaskFaild'"):
        _ = events.TaskFaild  # type: ignore[attr-defined]  # that there is none is the point


def test_a_dead_letter_has_a_type_and_names_its_function_as_a_task_does():
    typed = msgspec.structs.replace(LETTER, own_type="newsletter")

    assert LETTER.task_type == LETTER.func_path == "mail.send"
    assert (typed.task_type, typed.func_path) == ("newsletter", "mail.send")


def test_dead_letters_are_read_and_written_as_in_the_release_before():
    values = msgspec.structs.asdict(LETTER)
    assert values.pop("is_verified")
    assert values.pop("own_type") is None
    old = LetterOf0_1(task_type=values.pop("func_path"), **values)
    decode_old, decode_new = internal_decoder(LetterOf0_1), internal_decoder(DeadLetter)

    assert decode_new(encode_internal(old)) == LETTER
    assert decode_old(encode_internal(LETTER)) == old
    assert encode_internal(old) == encode_internal(LETTER)


def test_the_json_of_a_dead_letter_keeps_its_keys():
    shown = plain(LETTER)

    added = ["is_verified", "id", "func_path"]
    assert list(shown) == [*LetterOf0_1.__struct_fields__, *added]
    assert (shown["id"], shown["func_path"], shown["task_type"]) == ("a", "mail.send", "mail.send")


async def fail(storage: BaseStorage, task_id: str, func_path: str) -> None:
    await storage.enqueue(Task(id=task_id, func_path=func_path, max_retries=0))
    [task] = await storage.reserve(1, storage.clock.now())
    await storage.record([Failed(task.id, task.token, TaskError("no"))])


async def test_the_type_of_a_task_without_one_is_its_function():
    async with AsyncTaskQueue("memory://") as queue:
        await fail(queue.storage, "a", "mail.send")
        await fail(queue.storage, "b", "mail.fetch")
        listed = await queue.dead.list(task_type="mail.send")
        stored = await queue.storage.list_dead(task_type="mail.send")
        exported = [record async for record in queue.dead.export(task_type="mail.send")]
        retried = await queue.dead.retry_all(task_type="mail.send")

        assert [letter.task_id for letter in listed] == ["a"]
        assert stored == listed
        assert [record["task_id"] for record in exported] == ["a"]
        assert retried == 1
        assert [letter.task_id for letter in await queue.dead.list()] == ["b"]


def test_the_blocking_queue_filters_by_type_too():
    with TaskQueue("memory://") as queue:
        assert queue.dead.list(task_type="mail.send") == []
        assert queue.dead.retry_all(task_type="mail.send") == 0
        assert list(queue.dead.export(task_type="mail.send")) == []


async def test_surround_is_wrap_enqueue():
    async with AsyncTaskQueue("memory://") as queue:
        with pytest.warns(DeprecationWarning, match="use wrap_enqueue"):
            queue.surround(lambda tasks: pytest.fail("not called by this test"))
