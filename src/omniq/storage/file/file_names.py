"""File names: builds and parses them, and reads a live task's row from its name and its record.

In `tasks/`:

    <id>.<content>.<version>.task                            a waiting task
    <id>.<content>.<version>.<token>.<owner>.<started>.running   a held task
    <kind>~<key>.<content>.<due>.doc                         a document
    <any of these>.new                                       about to be added
    <any of these>.<write>.old, <write>.done                 taken by a write (see `writes`)
    <write>.open, <write>.done                               a write of several names

`content` names the file that holds the record, which no later write changes. A name is never used
twice: every rename raises the version, and every new record has a new content. So a rename is a
compare-and-swap of everything that the name and the record say.

Claims, parking, the return of a parked task, cancellation requests and the mark of attached documents
are only in the name, so that they cost one rename and write no file.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from urllib.parse import quote

import msgspec

from omniq.models import TaskStatus
from omniq.storage.file.encoding import NotARecord
from omniq.storage.row_rules import Row, copy_of

_LONGEST_KEY = 96
_ID = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_WORD = r"[A-Za-z0-9_-]{1,64}"
_NUMBER = r"[1-9][0-9]{0,18}|0"
# Ids contain dots; no other part of a name does, so that there is one way to split it.
_ROW = re.compile(
    rf"({_ID})\.({_WORD})\.([1-9][0-9]{{0,8}}|0)(a?c?)(?:p([0-9]{{1,4}}))?"
    rf"\.(?:task|({_NUMBER})\.({_WORD})\.({_NUMBER})\.running)"
)
_DOCUMENT = re.compile(
    rf"([a-z_]{{1,32}}~[A-Za-z0-9_.~:%-]{{0,140}})\.({_WORD})\.(-?[0-9]{{1,18}}|never)\.doc"
)
_DEAD = re.compile(rf"({_ID})\.dead")
_OF_WRITE = re.compile(rf"(?:(.+)\.)?({_WORD})\.(old|open|done)")
_WHOLE_ID = re.compile(_ID)


class RowName(msgspec.Struct, frozen=True, gc=False):
    """The name of a live task. What it says in addition to the record changes by a rename alone.

    `marks`: "a" if documents are attached, "c" after a cancellation was requested. `parked` is the
    position of the gate that the task is parked under. A held task has `token`, `owner`, `started`.
    """

    key: str
    content: str
    version: int = 0
    marks: str = ""
    parked: int | None = None
    token: int = 0
    owner: str = ""
    started: int = 0

    def __str__(self) -> str:
        parked = "" if self.parked is None else f"p{self.parked}"
        start = f"{self.key}.{self.content}.{self.version}{self.marks}{parked}"
        if not self.owner:
            return f"{start}.task"
        return f"{start}.{self.token}.{self.owner}.{self.started}.running"


class DocumentName(msgspec.Struct, frozen=True, gc=False):
    """The name of a document; `key` is that of `document_key`."""

    key: str
    content: str
    due: int | None = None

    def __str__(self) -> str:
        return f"{self.key}.{self.content}.{'never' if self.due is None else self.due}.doc"

    @property
    def kind(self) -> str:
        """The kind of the document."""
        return self.key.partition("~")[0]

    @property
    def is_plain(self) -> bool:
        """Whether the document's key is here as it is: neither quoted nor cut."""
        return "%" not in self.key and "~~" not in self.key


class DeadName(msgspec.Struct, frozen=True, gc=False):
    """The name of a dead letter, which lies in `dead/` unless a write has taken it."""

    task_id: str
    content: str = ""

    def __str__(self) -> str:
        return f"{self.task_id}.dead"

    @property
    def key(self) -> str:
        """A dead letter has another key than any task: an id contains no `~`, but may end with `.dead`."""
        return f"dead~{self.task_id}"


Name = RowName | DocumentName | DeadName


class WriteName(msgspec.Struct, frozen=True, gc=False):
    """A name of a write that has not ended, or of the write itself.

    `ending` is "new" for a name that it is about to add, and "old" for one that it has taken; "done" if
    taking it has committed the write. A write of several names is itself "open" or "done".
    """

    write: str
    ending: str
    inner: Name | None = None

    def __str__(self) -> str:
        if self.inner is None:
            return f"{self.write}.{self.ending}"
        return (
            f"{self.inner}.new"
            if self.ending == "new"
            else f"{self.inner}.{self.write}.{self.ending}"
        )


AnyName = RowName | DocumentName | WriteName


def path_of(name: Name | WriteName) -> str:
    """The path of a name, relative to the store's folder."""
    return f"dead/{name}" if isinstance(name, DeadName) else f"tasks/{name}"


@lru_cache(maxsize=8192)
def document_key(kind: str, key: str) -> str:
    """The kind and the key as one word. A long key is cut, and followed by its hash.

    >>> document_key("gate", "running:a b")
    'gate~running:a%20b'
    """
    quoted = quote(key, safe=":", errors="surrogatepass")
    if len(quoted) > _LONGEST_KEY:
        digest = hashlib.sha256(quoted.encode()).hexdigest()
        quoted = f"{quoted[: _LONGEST_KEY - 32]}~~{digest[:32]}"
    return f"{kind}~{quoted}"


def write_of(content: str) -> str:
    """The write that made a content: a write with many records has several files.

    >>> write_of("abc-1"), write_of("abc-1_2")
    ('abc-1', 'abc-1')
    """
    return content.partition("_")[0]


def parse(name: str) -> AnyName | None:
    """The parsed name; None for a name that is not of this store.

    >>> parse("a.b.c-1.2ap0.task")
    RowName(key='a.b', content='c-1', version=2, marks='a', parked=0, token=0, owner='', started=0)
    >>> str(parse("a.c-1.0.task.d-2.old"))
    'a.c-1.0.task.d-2.old'
    """
    if name.endswith(".new"):
        inner = _current(name[:-4])
        return None if inner is None else WriteName(write_of(inner.content), "new", inner)
    of_write = _OF_WRITE.fullmatch(name)
    if of_write is None:
        return _current(name)
    taken, write, ending = of_write.groups()
    if taken is None:
        return None if ending == "old" else WriteName(write, ending)
    dead = _DEAD.fullmatch(taken)
    source = _current(taken) if dead is None else DeadName(dead[1])
    return None if source is None or ending == "open" else WriteName(write, ending, source)


def _current(name: str) -> RowName | DocumentName | None:
    row = _ROW.fullmatch(name)
    if row is not None:
        key, content, version, marks, parked, token, owner, started = row.groups()
        gate = None if parked is None else int(parked)
        if owner is None:
            return RowName(key, content, int(version), marks, gate)
        return RowName(key, content, int(version), marks, gate, int(token), owner, int(started))
    document = _DOCUMENT.fullmatch(name)
    if document is None:
        return None
    return DocumentName(
        document[1], document[2], None if document[3] == "never" else int(document[3])
    )


def result_path(task_id: str) -> str:
    """The path of the record of a task that has ended."""
    return f"results/{task_id}.result"


def dead_path(task_id: str) -> str:
    """The path of a dead letter."""
    return f"dead/{task_id}.dead"


def part_path(key: str, write: str, ending: str = "part") -> str:
    """The path of a new record that a write has prepared."""
    return f"parts/{key}.{write}.{ending}"


def id_of(name: str, ending: str) -> str | None:
    """The id in a name of the form `<id><ending>`; None for other names.

    >>> id_of("a.b.dead", ".dead"), id_of("a b.dead", ".dead")
    ('a.b', None)
    """
    task_id = name.removesuffix(ending)
    return task_id if task_id != name and _WHOLE_ID.fullmatch(task_id) else None


# Rows


def row_of(name: RowName, record: Row) -> Row:
    """The row of the task with that name and record."""
    row = copy_of(record)
    row.attached = row.attached or "a" in name.marks
    row.cancel_requested = row.cancel_requested or "c" in name.marks
    if name.owner:
        if record.owner is None and record.token < name.token:
            row.status = TaskStatus.RUNNING
            row.owner, row.token, row.started_at = name.owner, name.token, name.started
        if (row.owner, row.token) != (name.owner, name.token):
            raise NotARecord("the record is not of the claim in its name")
        row.parked = None
    else:
        try:
            row.parked = None if name.parked is None else row.gates[name.parked].key
        except IndexError:
            raise NotARecord("the record has no gate of the number in its name") from None
    return row


def name_of(row: Row, content: str, version: int = 0, marks: str = "") -> RowName:
    """The name of a row whose record is in that content."""
    parked = None
    if row.parked is not None:
        parked = [gate.key for gate in row.gates].index(row.parked)
    if row.owner is None:
        return RowName(row.id, content, version, marks, parked)
    return RowName(row.id, content, version, marks, parked, row.token, row.owner, row.started_at)


def next_name(before: RowName, record: Row, row: Row) -> RowName | None:
    """The name that turns the record into the row; None if the row needs a new record."""
    marks = ("a" if row.attached else "") + ("c" if row.cancel_requested else "")
    name = name_of(row, before.content, before.version + 1, marks)
    try:
        same = row_of(name, record)
    except NotARecord:
        return None
    # The row may have been read without its body.
    same.body = row.body
    return name if same == row else None
