"""Dead letters grouped by function and reason: thousands of them usually have a few causes."""

from __future__ import annotations

from datetime import datetime

import msgspec

from omniq.models import DeadLetter
from omniq.operations.formatting import letter_line
from omniq.storage.base import BaseStorage

_PAGE = 1_000
_MAX_READ = 10_000


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letters of one function with one failure reason. `error` is that of the newest."""

    func_path: str
    reason: str
    count: int
    first_failure: datetime
    last_failure: datetime
    error: str


class DeadGroups(msgspec.Struct, frozen=True):
    """The groups, largest first. `letters` were read; `is_cut`: there are more."""

    groups: tuple[DeadGroup, ...]
    letters: int
    is_cut: bool


async def dead_groups(storage: BaseStorage) -> DeadGroups:
    """Group all dead letters, or the first ten thousand, by function and reason."""
    groups: dict[tuple[str, str], DeadGroup] = {}
    count, after = 0, ""
    while count < _MAX_READ:
        page = await storage.list_dead(limit=_PAGE, after=after)
        for letter in page:
            key = (letter.func_path, letter.failure_reason)
            groups[key] = _add(groups.get(key), letter)
        count += len(page)
        if len(page) < _PAGE:
            break
        after = page[-1].task_id
    ordered = sorted(groups.values(), key=lambda each: (-each.count, each.func_path, each.reason))
    return DeadGroups(tuple(ordered), count, count >= _MAX_READ)


def _add(group: DeadGroup | None, letter: DeadLetter) -> DeadGroup:
    if group is None:
        return DeadGroup(
            func_path=letter.func_path,
            reason=letter.failure_reason,
            count=1,
            first_failure=letter.first_failure,
            last_failure=letter.last_failure,
            error=letter_line(letter),
        )
    is_newer = letter.last_failure >= group.last_failure
    return msgspec.structs.replace(
        group,
        count=group.count + 1,
        first_failure=min(group.first_failure, letter.first_failure),
        last_failure=max(group.last_failure, letter.last_failure),
        error=letter_line(letter) if is_newer else group.error,
    )
