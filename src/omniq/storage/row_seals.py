"""What a key protects of a row beside its body: how it may run, its dead letter, and its unique key.

A body is sealed when its task is enqueued. The row is not, since servers change it, and they have no key. So
those fields of a row that say how its task may run must be the same as in the body.
"""

from __future__ import annotations

import msgspec

from omniq.clock import to_micros
from omniq.errors import SerializationError
from omniq.gate_rules import gates_of
from omniq.models import DeadLetter, StoredLetter, Task
from omniq.serialization import Serializer
from omniq.signing import DEAD_LETTER, TASK, SealedSerializer
from omniq.storage.row_rules import Row, check_body, is_part_of, rank_of


class RowSeals:
    """Compares rows with their sealed bodies, seals dead letters, and names unique keys."""

    def __init__(self, serializer: SealedSerializer) -> None:
        self._serializer = serializer
        self._seal = serializer.seal

    # Rows

    def check_row(self, row: Row, task: Task) -> None:
        """Raise `SerializationError` if the row and its verified body differ in how the task may run."""
        check_body(row, task)
        has_gates = row.gates or task.limits or task.breakers
        if (
            row.priority == rank_of(task)
            and row.max_crashes == task.max_crashes
            and (row.expires is None or task.expires is not None)
            and not (has_gates and row.gates != gates_of(task))
            and (row.unique == task.unique or self._is_name_of(row.unique, task.unique))
            and (task.workflow is None or is_part_of(row, task.workflow))
        ):
            return
        raise SerializationError(
            f"task {row.id}: its record has another priority, limit, breaker, unique key, expiry, "
            "parent or maximum of crashes than was signed, so that it was changed in the storage; enqueue it again"
        )

    def is_early(self, row: Row, task: Task, now: int | None) -> bool:
        """Whether a claim got the row before the eta in its body: then its row was changed.

        `now` is the time that the caller gave. The store's clock may have been set back, so the task waits.
        """
        return task.eta is not None and to_micros(task.eta) > max(row.started_at, now or 0)

    def decoded(self, row: Row, body: bytes) -> Task | None:
        """The task of the row, or None if the body cannot be verified or is not that of the row."""
        try:
            task = self._serializer.decode_task(body)
            self.check_row(row, task)
        except SerializationError:
            return None
        return task

    # Unique keys

    @property
    def hides_unique_keys(self) -> bool:
        """Whether rows have hashes in place of unique keys. Those of older versions have the keys."""
        return self._seal.is_encrypting

    def name_unique_key(self, row: Row, key: str) -> None:
        """Have the row hold that key, under all names by which it may be looked up."""
        row.unique, *aliases = self._seal.unique_names(key)
        row.unique_aliases = tuple(aliases)

    def rename_unique_key(self, row: Row) -> None:
        """Have a row hold its key under the names of the keys that are set now."""
        key = self.unique_key(row)
        if key is not None:
            self.name_unique_key(row, key)

    def unique_key(self, row: Row) -> str | None:
        """The unique key of the row, which may have its hash; None if its body cannot be read."""
        try:
            return self._serializer.decode_task(row.body).unique
        except SerializationError:
            return None

    def is_holder(self, row: Row, key: str | None) -> bool:
        """Whether a stored row, with its body, may hold that unique key; None is a key that is not known.

        If not, it was written without the signing key that it holds it: an enqueue would return the id of
        a task that has nothing to do with it, and its caller would take the result of that task.
        """
        try:
            self._seal.open(TASK, row.body)
        except SerializationError:
            return False
        try:
            task = self._serializer.decode_task(row.body)
        except SerializationError:
            # It is genuine, and this process lacks what its arguments are made of.
            return True
        return task.id == row.id and key in (None, task.unique)

    def _is_name_of(self, name: str | None, key: str | None) -> bool:
        return name is not None and key is not None and self._seal.is_unique_name(name, key)

    # Dead letters

    def sealed_letter(self, row: Row, body: bytes, letter: StoredLetter) -> StoredLetter:
        """The letter with its seal; without one if the row's call cannot be verified."""
        task = self.decoded(row, body)
        if task is None:
            return letter
        # Of the signed call: a row may have been changed.
        letter = msgspec.structs.replace(letter, own_type=task.task_type)
        hidden = ""
        if self._seal.is_encrypting:
            hidden = letter.error_details
            letter = msgspec.structs.replace(letter, error_details="")
        seal = self._seal.close(DEAD_LETTER, hidden.encode(), *_facts(letter))
        return msgspec.structs.replace(letter, seal=seal)

    def opened_letter(self, letter: StoredLetter, row: Row | None = None) -> DeadLetter:
        """The dead letter, verified, or marked as not verified.

        `row` is the row that it is stored with, if that is known: it must be the letter of that task.
        """
        shown = _shown(letter)
        try:
            if row is not None and (row.id, row.func_path) != (letter.task_id, letter.func_path):
                raise SerializationError(f"task {row.id}: the letter of task {letter.task_id}")
            hidden = self._seal.open(DEAD_LETTER, letter.seal, *_facts(letter))
        except SerializationError:
            return msgspec.structs.replace(shown, is_verified=False)
        details = letter.error_details or hidden.decode()
        return msgspec.structs.replace(shown, error_details=details, is_verified=True)


def row_seals(serializer: Serializer) -> RowSeals | None:
    """The seals of a storage with that serializer; None without a key."""
    return RowSeals(serializer) if isinstance(serializer, SealedSerializer) else None


def letter_without_key(letter: StoredLetter) -> DeadLetter:
    """The dead letter as a storage without a key shows it."""
    return msgspec.structs.replace(_shown(letter), is_verified=not letter.seal)


def _facts(letter: StoredLetter) -> tuple[str, ...]:
    """What the seal of a dead letter is bound to: all of it, and first of all its task."""
    return (
        letter.task_id,
        letter.func_path,
        letter.queue,
        letter.failure_reason,
        str(letter.attempt_count),
        letter.first_failure.isoformat(),
        letter.last_failure.isoformat(),
        letter.error_details,
        # Releases that do not know it made the seals of all other letters.
        *(() if letter.own_type is None else (letter.own_type,)),
    )


def _shown(letter: StoredLetter) -> DeadLetter:
    fields = {name: getattr(letter, name) for name in DeadLetter.__struct_fields__}
    return DeadLetter(**fields)
