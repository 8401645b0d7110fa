"""How schedules and checkpoints are stored; and those of an older omniq, which wait for a seal.

With a key, an older omniq sealed the call of a schedule and the results of steps, but neither the times
of the schedule nor the names of the steps. No process trusts such a document until an operator has seen
what it says, and has had it sealed as a whole: `omniq schema upgrade`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from omniq import signing
from omniq.errors import InvalidValue, SerializationError
from omniq.models import MAX_MISSED, Schedule, Task, check_stored_schedule
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.signing import has_seal, is_sealed, seal_document, unsealed
from omniq.storage.backend import Document
from omniq.tasks.steps import CheckpointData, encode_checkpoint, older_checkpoint, task_key

_TEMPLATE = "template"
"""The id of the call of a schedule. A task's call that someone planted there has the id of the task."""


class StoredSchedule(msgspec.Struct, array_like=True):
    """A schedule without its task's arguments, and the task as the serializer encodes it."""

    version: int
    schedule: Schedule
    task: bytes


class StoredCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint, and when it was saved."""

    saved_at: int
    data: bytes


decode_schedule = internal_decoder(StoredSchedule)
decode_checkpoint = internal_decoder(StoredCheckpoint)


class OlderDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A `document` that an older omniq has stored, and `sealed`, which is the same with a seal.

    What would be trusted is in `schedule`, or in `checkpoint` of the task with this `id`. One that cannot be
    sealed has a `problem`.
    """

    kind: Literal["schedule", "checkpoint"]
    id: str
    document: Document
    sealed: bytes = b""
    func_path: str = ""
    schedule: Schedule | None = None
    checkpoint: CheckpointData | None = None
    problem: str = ""


def encode_schedule(serializer: Serializer, schedule: Schedule, version: int) -> bytes:
    """The schedule as it is stored under its id."""
    # Arguments and metadata are user data: only the serializer may encode them.
    bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
    stored = StoredSchedule(
        version,
        msgspec.structs.replace(schedule, task=bare),
        unsealed(serializer).encode_task(schedule.task),
    )
    return seal_document(serializer, signing.SCHEDULE, encode_internal(stored), schedule.id)


def whole_schedule(stored: StoredSchedule, task: Task) -> Schedule:
    """The schedule with its task; `SerializationError` for values that no schedule has."""
    schedule = msgspec.structs.replace(
        stored.schedule,
        task=task,
        version=stored.version,
        # Earlier versions had no maximum.
        max_missed=min(stored.schedule.max_missed, MAX_MISSED),
    )
    try:
        check_stored_schedule(schedule)
    except InvalidValue as error:
        raise SerializationError(f"schedule {schedule.id}: {error}") from error
    return schedule


def older_schedule(serializer: Serializer, document: Document) -> OlderDocument | None:
    """What a schedule without a seal says, if there is a key; None of other bytes."""
    if has_seal(document.data) or not is_sealed(serializer):
        return None
    try:
        stored = decode_schedule(document.data)
    except SerializationError:
        return None
    try:
        task = serializer.decode_task(stored.task)
        schedule = whole_schedule(stored, task)
        if task.id != _TEMPLATE or schedule.id != document.key:
            raise SerializationError("its call is that of something else")
    except SerializationError:
        return OlderDocument(
            kind="schedule",
            id=document.key,
            document=document,
            func_path=stored.schedule.task.func_path,
            problem="no known key has signed its call: add the schedule again, or delete it",
        )
    return OlderDocument(
        kind="schedule",
        id=document.key,
        document=document,
        sealed=encode_schedule(serializer, schedule, stored.version),
        func_path=task.func_path,
        schedule=schedule,
    )


def is_sealed_checkpoint(document: Document) -> bool:
    """Whether the checkpoint has a seal. Bytes that are no checkpoint need none."""
    try:
        return has_seal(decode_checkpoint(document.data).data)
    except SerializationError:
        return True


def older_document(serializer: Serializer, document: Document, task: Task) -> OlderDocument:
    """What the checkpoint of a verified task says, which has no seal."""
    stored = decode_checkpoint(document.data)
    data = older_checkpoint(serializer, task_key(task), stored.data)
    found = OlderDocument(
        kind="checkpoint", id=document.key, document=document, func_path=task.func_path
    )
    if data is None:
        problem = "no known key has signed its values for this task: retry the task from the start"
        return msgspec.structs.replace(found, problem=problem)
    whole = encode_checkpoint(serializer, task_key(task), data)
    sealed = encode_internal(StoredCheckpoint(stored.saved_at, whole))
    return msgspec.structs.replace(found, checkpoint=data, sealed=sealed)
