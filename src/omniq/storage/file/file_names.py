"""File names: builds and parses them. Ids contain dots, so names are parsed from the right.

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
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DOC_KEY = re.compile(r"[a-z_]{1,32}~[A-Za-z0-9_.~:%-]{0,140}")
_LONGEST_KEY = 96
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}|0")
_DUE = re.compile(r"-?[0-9]{1,18}|never")
_VERSION = re.compile(r"([1-9][0-9]{0,8}|0)(a?c?)(?:p([0-9]{1,4}))?")


class RowName(NamedTuple):
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

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"tasks/{self}"


class DocumentName(NamedTuple):
    """The name of a document; `key` is that of `document_key`."""

    key: str
    content: str
    due: int | None = None

    def __str__(self) -> str:
        return f"{self.key}.{self.content}.{'never' if self.due is None else self.due}.doc"

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"tasks/{self}"

    @property
    def kind(self) -> str:
        """The kind of the document."""
        return self.key.partition("~")[0]


class DeadName(NamedTuple):
    """The name of a dead letter, which lies in `dead/` unless a write has taken it."""

    key: str

    def __str__(self) -> str:
        return f"{self.key}.dead"

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return dead_path(self.key)


Name = RowName | DocumentName | DeadName


class NewName(NamedTuple):
    """A name that a write is about to add."""

    inner: Name
    write: str

    def __str__(self) -> str:
        return f"{self.inner}.new"


class TakenName(NamedTuple):
    """A name that a write has taken; `is_done` if that alone is the commit of the write."""

    inner: Name
    write: str
    is_done: bool = False

    def __str__(self) -> str:
        return f"{self.inner}.{self.write}.{'done' if self.is_done else 'old'}"

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"tasks/{self}"

    @property
    def key(self) -> str:
        """The key of the inner name; a dead letter has another key than its task."""
        return str(self.inner) if isinstance(self.inner, DeadName) else self.inner.key


class Marker(NamedTuple):
    """The name whose rename from `.open` to `.done` commits a write."""

    write: str
    is_done: bool = False

    def __str__(self) -> str:
        return f"{self.write}.{'done' if self.is_done else 'open'}"

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"tasks/{self}"


AnyName = RowName | DocumentName | NewName | TakenName | Marker


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
    rest, _, ending = name.rpartition(".")
    match ending:
        case "task" | "running" | "doc":
            inner = _inner(name)
            return None if isinstance(inner, DeadName) else inner
        case "new":
            inner = _inner(rest)
            if isinstance(inner, RowName | DocumentName):
                return NewName(inner, write_of(inner.content))
        case "old" | "done" | "open":
            inner_name, _, write = rest.rpartition(".")
            if not _WORD.fullmatch(write):
                return None
            if not inner_name:
                return None if ending == "old" else Marker(write, ending == "done")
            inner = _inner(inner_name)
            if inner is not None and ending != "open":
                return TakenName(inner, write, ending == "done")
    return None


def _inner(name: str) -> Name | None:
    rest, _, ending = name.rpartition(".")
    if ending == "dead":
        return DeadName(rest) if _ID.fullmatch(rest) else None
    if ending == "doc":
        parts = rest.rsplit(".", 2)
        if len(parts) != 3 or not (_DOC_KEY.fullmatch(parts[0]) and _DUE.fullmatch(parts[2])):
            return None
        due = None if parts[2] == "never" else int(parts[2])
        return DocumentName(parts[0], parts[1], due) if _WORD.fullmatch(parts[1]) else None
    token = owner = started = ""
    if ending == "running":
        parts = rest.rsplit(".", 3)
        if len(parts) != 4:
            return None
        rest, token, owner, started = parts
        if not (_NUMBER.fullmatch(token) and _WORD.fullmatch(owner) and _NUMBER.fullmatch(started)):
            return None
    elif ending != "task":
        return None
    parts = rest.rsplit(".", 2)
    if len(parts) != 3 or not (_ID.fullmatch(parts[0]) and _WORD.fullmatch(parts[1])):
        return None
    version = _VERSION.fullmatch(parts[2])
    if version is None:
        return None
    parked = None if version[3] is None else int(version[3])
    key, content, number, marks = parts[0], parts[1], int(version[1]), version[2]
    if not owner:
        return RowName(key, content, number, marks, parked)
    return RowName(key, content, number, marks, parked, int(token), owner, int(started))


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
    if not name.endswith(ending):
        return None
    task_id = name[: -len(ending)]
    return task_id if _ID.fullmatch(task_id) else None
