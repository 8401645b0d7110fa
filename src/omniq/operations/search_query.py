"""A search for tasks as one line of text: words, and qualifiers such as `queue:mail` or `arg.order:17`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from omniq.errors import InvalidValue
from omniq.models import TaskStatus
from omniq.tasks.durations import UNIT_SECONDS
from omniq.text.masking import is_secret_name

QUALIFIERS = {
    "fn": "a part of the function's path",
    "queue": "the queue",
    "arg.NAME": "an argument by name, or by position: arg.0",
    "meta.NAME": "a metadata value",
    "error": "a part of the error of a task that failed or is retried",
    "id": "the beginning of the id",
    "worker": "a worker's id, of running tasks and failed attempts",
    "type": "the task type",
    "status": "the status",
    "since": "enqueued after: 15m, 2h, 7d, or an instant",
    "until": "enqueued before",
}
"""What a search can name, with a description of each."""

_ALIASES = {"function": "fn", "func": "fn", "q": "queue", "is": "status", "metadata": "meta"}
_TERM = re.compile(
    r'(?:(?P<name>[A-Za-z]+(?:\.[^\s:"]+)?):)?(?:"(?P<quoted>[^"]*)"|(?P<plain>\S+))'
)
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_MAX_AGE_SECONDS = 50 * 365 * 86_400
_MAX_TERMS = 20


class TaskSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks. All conditions must hold; `words` are each in the function, id, queue or arguments.

    `since` and `until` bound the time of enqueue, `metadata` and `args` map names to texts. `prefix` is the
    beginning of the id. `func_path` is the whole path, `function` a part of it.
    """

    status: TaskStatus | None = None
    queue: str | None = None
    func_path: str | None = None
    function: str = ""
    prefix: str = ""
    since: datetime | None = None
    until: datetime | None = None
    metadata: dict[str, str] = {}
    args: dict[str, str] = {}
    error: str = ""
    worker: str = ""
    task_type: str | None = None
    words: tuple[str, ...] = ()

    @property
    def reads_failures(self) -> bool:
        """Whether it depends on how runs failed."""
        return bool(self.error or self.worker)

    @property
    def selects_all(self) -> bool:
        """Whether it has no condition that a task could fail."""
        words = tuple(word for word in self.words if word)
        return msgspec.structs.replace(self, words=words) == TaskSearch()

    @property
    def is_filtered_here(self) -> bool:
        """Whether there are conditions that no storage checks."""
        return bool(
            self.function
            or self.metadata
            or self.args
            or self.words
            or self.task_type is not None
            or self.reads_failures
        )


def parse_search(text: str, now: datetime) -> TaskSearch:
    """The search that the text describes; raises `InvalidValue` for an unknown qualifier.

    >>> search = parse_search('fn:charge arg.order:17 "out of stock"', datetime.now(UTC))
    >>> search.function, search.args, search.words
    ('charge', {'order': '17'}, ('out of stock',))
    """
    found: dict[str, Any] = {"metadata": {}, "args": {}, "words": []}
    for number, term in enumerate(_TERM.finditer(text)):
        if number >= _MAX_TERMS:
            raise InvalidValue(f"the search has more than {_MAX_TERMS} terms")
        quoted = term["quoted"]
        _add(found, term["name"], term["plain"] if quoted is None else quoted, now)
    return TaskSearch(**{**found, "words": tuple(found["words"])})


def _add(found: dict[str, Any], name: str | None, value: str, now: datetime) -> None:
    if name is None:
        found["words"].append(value)
        return
    kind, _, key = name.partition(".")
    kind = _ALIASES.get(kind.lower(), kind.lower())
    match kind:
        case "arg" | "meta" if key:
            check_searchable(name, key)
            found["args" if kind == "arg" else "metadata"][key] = value
        case "fn":
            found["function"] = value
        case "id":
            found["prefix"] = value
        case "queue" | "error" | "worker":
            found[kind] = value
        case "type":
            found["task_type"] = value
        case "status":
            found["status"] = _status(value)
        case "since" | "until":
            found[kind] = instant_of(kind, value, now)
        case _:
            known = ", ".join(f"{each}:" for each in QUALIFIERS)
            raise InvalidValue(
                f'{name}: is not known; use one of {known} or put the text into quotes: "{name}:{value}"'
            )


def check_searchable(name: str, key: str) -> None:
    """Raise `InvalidValue` for the name of a value that is hidden."""
    if any(is_secret_name(part) for part in key.split(".")):
        # A filter would show which guess of a hidden value is right.
        raise InvalidValue(f"{name}: is hidden, so tasks cannot be found by it")


def _status(value: str) -> TaskStatus:
    try:
        return TaskStatus(value.lower())
    except ValueError:
        raise InvalidValue(f"status {value}: expected one of {', '.join(TaskStatus)}") from None


def instant_of(name: str, text: str, now: datetime) -> datetime:
    """The instant that the text names, either directly or as an age."""
    if age := _AGE.fullmatch(text.strip()):
        return now - timedelta(seconds=min(int(age[1]) * UNIT_SECONDS[age[2]], _MAX_AGE_SECONDS))
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidValue(
            f"{name} {text}: expected an instant such as 2026-01-31T12:00Z, or 15m, 2h, 7d"
        ) from None
    if not 1970 < instant.year < 9000:
        raise InvalidValue(f"{name}: expected a year after 1970 and before 9000")
    return instant.replace(tzinfo=instant.tzinfo or UTC)


def quoted(value: str) -> str:
    """The value as it is written in a search.

    >>> quoted("mail"), quoted("out of stock")
    ('mail', '"out of stock"')
    """
    return value if re.fullmatch(r'[^\s"]+', value) else '"' + value.replace('"', " ") + '"'
