"""File names: builds and parses them. Ids contain dots, so names are parsed from the right."""

from __future__ import annotations

import re
from typing import NamedTuple

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}|0")


class Claimed(NamedTuple):
    """The name of a claimed task's file: `<id>.<token>.<owner>.<started>.running`.

    `started` is the time of the claim in microseconds. After a cancellation was requested, the same
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
        """Return the same claim after a cancellation was requested."""
        return self._replace(is_cancelled=True)


class Committed(NamedTuple):
    """A change that is committed, but perhaps not finished yet: `<id>.<token>.<nonce>.done`."""

    id: str
    token: int
    nonce: str

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"queue/{self.id}.{self.token}.{self.nonce}.done"

    @property
    def part(self) -> str:
        """The path of the new record."""
        return f"results/{self.id}.{self.token}.{self.nonce}.part"

    @property
    def dead_part(self) -> str:
        """A second path of the new record, when it also becomes a dead letter."""
        return f"dead/{self.id}.{self.token}.{self.nonce}.part"


def task_path(task_id: str) -> str:
    """The path of a waiting task."""
    return f"queue/{task_id}.task"


def intent_path(task_id: str) -> str:
    """The path of an intent: a complete task that is about to be enqueued, not claimable yet."""
    return f"tmp/{task_id}.task.tmp"


def result_path(task_id: str) -> str:
    """The path of the record of a task that has ended."""
    return f"results/{task_id}.result"


def dead_path(task_id: str) -> str:
    """The path of a dead letter, with the task's record."""
    return f"dead/{task_id}.dead"


def id_of(name: str, ending: str) -> str | None:
    """The id in a name of the form `<id><ending>`; None for other names.

    >>> id_of("a.b.task", ".task"), id_of("a b.task", ".task")
    ('a.b', None)
    """
    if not name.endswith(ending):
        return None
    task_id = name[: -len(ending)]
    return task_id if _ID.fullmatch(task_id) else None


def claimed_of(name: str) -> Claimed | None:
    """The claim in a `.running` or `.cancelling` name; None for other names.

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
    """The change in a `.done` (or `.part`) name; None for other names.

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
