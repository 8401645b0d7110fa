"""Dead letters grouped by their error: thousands of them usually have a few causes.

Two belong together if they have the same type of error, the same message but for numbers and ids, and failed in
the same function of the application.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timedelta
from functools import lru_cache

import msgspec

from omniq.models import DeadLetter
from omniq.operations.formatting import error_line, letter_line
from omniq.operations.newest import dead_newest_first, take
from omniq.storage.base import BaseStorage

_MAX_READ = 10_000
_DAY = timedelta(days=1)
_BARS = 24

_VARIABLE = re.compile(
    r"[\w.+-]+@[\w-]+\.[\w.]+"  # an address
    r"|\b0x[0-9a-fA-F]+\b"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}\b"
    r"|\b[0-9A-HJKMNP-TV-Z]{26}\b"
    r"|\b[0-9a-fA-F]*\d[0-9a-fA-F]{7,}\b"
    r"|\d+"
)
_FRAME = re.compile(r'^ *File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
_NOT_USERS = ("site-packages/", "dist-packages/", "/omniq/", "/lib/python", "<")
_MAX_MESSAGE = 300


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letters with one error. `error` is that of the newest; `id` identifies the group.

    `place` is the innermost function of the application. `last_day` counts the failures of each of the last
    24 hours, the newest last.
    """

    id: str
    error_type: str
    message: str
    place: str
    error: str
    count: int
    first_failure: datetime
    last_failure: datetime
    functions: tuple[str, ...]
    reasons: tuple[str, ...]
    last_day: tuple[int, ...]


class DeadGroups(msgspec.Struct, frozen=True):
    """The groups, latest failure first. `letters` were read; `is_cut`: there are older ones."""

    groups: tuple[DeadGroup, ...]
    letters: int
    is_cut: bool


async def dead_groups(storage: BaseStorage) -> DeadGroups:
    """Group all dead letters, or the ten thousand that failed last, by their error."""
    now = storage.clock.now()
    found: dict[str, list[DeadLetter]] = {}
    count = 0
    async for letter in take(dead_newest_first(storage), _MAX_READ + 1):
        count += 1
        if count <= _MAX_READ:
            found.setdefault(group_of(letter), []).append(letter)
    groups = [_group(key, letters, now) for key, letters in found.items()]
    return DeadGroups(tuple(groups), min(count, _MAX_READ), count > _MAX_READ)


def group_of(letter: DeadLetter) -> str:
    """The id of the group that a dead letter belongs to."""
    return fingerprint(letter.error_details)[0]


@lru_cache(maxsize=4_096)
def fingerprint(details: str) -> tuple[str, str, str, str]:
    """The id of the group, the type of error, the message without what varies, and the place.

    >>> fingerprint("ValueError: order 17 of a@b.de")[1:]
    ('ValueError', 'order … of …', '')
    """
    kind, _, message = error_line(details).partition(": ")
    message = _VARIABLE.sub("…", message[:_MAX_MESSAGE])
    frames = _FRAME.findall(details)
    users = [frame for frame in frames if not any(part in frame[0] for part in _NOT_USERS)]
    place = "" if not users else f"{users[-1][0].rpartition('/')[2]} in {users[-1][1]}"
    digest = hashlib.sha256("\0".join((kind, message, place)).encode(errors="replace")).hexdigest()
    return digest[:16], kind, message, place


def _group(key: str, letters: list[DeadLetter], now: datetime) -> DeadGroup:
    _, kind, message, place = fingerprint(letters[0].error_details)
    last_day = [0] * _BARS
    for letter in letters:
        hours = (now - letter.last_failure) // (_DAY / _BARS)
        if 0 <= hours < _BARS:
            last_day[_BARS - 1 - hours] += 1
    return DeadGroup(
        id=key,
        error_type=kind.rpartition(".")[2],
        message=message,
        place=place,
        error=letter_line(letters[0]),
        count=len(letters),
        first_failure=min(letter.first_failure for letter in letters),
        last_failure=letters[0].last_failure,
        functions=tuple(dict.fromkeys(letter.func_path for letter in letters)),
        reasons=tuple(dict.fromkeys(letter.failure_reason for letter in letters)),
        last_day=tuple(last_day),
    )
