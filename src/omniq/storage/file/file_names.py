"""File names of the queue folder, both ways. Ids contain dots, so names are read from the right."""

from __future__ import annotations

import re
from typing import NamedTuple

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}|0")


class Claimed(NamedTuple):
    """A task that an owner holds: `<id>.<token>.<owner>.<started>.running`.

    `started` is the claim's instant in microseconds. Once its cancellation was asked for, the same
    name ends in `.cancelling`.
    """

    id: str
    token: int
    owner: str
    started: int
    is_cancelled: bool = False

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        ending = "cancelling" if self.is_cancelled else "running"
        return f"queue/{self.id}.{self.token}.{self.owner}.{self.started}.{ending}"

    def cancelled(self) -> Claimed:
        """The same claim after its cancellation was asked for."""
        return self._replace(is_cancelled=True)


class Committed(NamedTuple):
    """A change that holds and may still have to be carried out: `<id>.<token>.<nonce>.done`."""

    id: str
    token: int
    nonce: str

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"queue/{self.id}.{self.token}.{self.nonce}.done"

    @property
    def part(self) -> str:
        """The record that the change brings about."""
        return f"results/{self.id}.{self.token}.{self.nonce}.part"

    @property
    def dead_part(self) -> str:
        """The same record once more, when it also becomes a dead letter."""
        return f"dead/{self.id}.{self.token}.{self.nonce}.part"


def task_path(task_id: str) -> str:
    """Where a waiting task lies."""
    return f"queue/{task_id}.task"


def intent_path(task_id: str) -> str:
    """Where a task lies that is about to be enqueued: whole, and not claimable yet."""
    return f"tmp/{task_id}.task.tmp"


def result_path(task_id: str) -> str:
    """Where the record of a task that has ended lies."""
    return f"results/{task_id}.result"


def dead_path(task_id: str) -> str:
    """Where a dead letter lies, with the task's record."""
    return f"dead/{task_id}.dead"


def id_of(name: str, ending: str) -> str | None:
    """The id in a name of the form `<id><ending>`; None when it is not one.

    >>> id_of("a.b.task", ".task"), id_of("a b.task", ".task")
    ('a.b', None)
    """
    if not name.endswith(ending):
        return None
    task_id = name[: -len(ending)]
    return task_id if _ID.fullmatch(task_id) else None


def claimed_of(name: str) -> Claimed | None:
    """The claim that a `.running` or `.cancelling` name stands for.

    >>> claimed_of("a.b.2.W1.77.running")
    Claimed(id='a.b', token=2, owner='W1', started=77, is_cancelled=False)
    """
    parts = name.rsplit(".", 4)
    if len(parts) != 5 or parts[4] not in ("running", "cancelling"):
        return None
    task_id, token, owner, started, ending = parts
    if not (_ID.fullmatch(task_id) and _NUMBER.fullmatch(token) and _NUMBER.fullmatch(started)):
        return None
    if not _WORD.fullmatch(owner):
        return None
    return Claimed(task_id, int(token), owner, int(started), ending == "cancelling")


def committed_of(name: str, ending: str = "done") -> Committed | None:
    """The change that a `.done` (or `.part`) name stands for.

    >>> committed_of("a.b.2.N5.done")
    Committed(id='a.b', token=2, nonce='N5')
    """
    parts = name.rsplit(".", 3)
    if len(parts) != 4 or parts[3] != ending:
        return None
    task_id, token, nonce, _ = parts
    if not (_ID.fullmatch(task_id) and _NUMBER.fullmatch(token) and _WORD.fullmatch(nonce)):
        return None
    return Committed(task_id, int(token), nonce)
