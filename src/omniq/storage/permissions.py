"""Who else may write to a store on this machine: what stands in it decides what workers run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omniq.errors import StorageRefused


def refuse_shared(place: Path) -> None:
    """Refuse a file or folder that belongs to somebody else, or that anybody may change.

    One of a group may be shared with that group; where only the owner of an entry may replace it,
    as in /tmp, anybody may add to a folder.
    """
    try:
        facts = os.stat(place)
    except FileNotFoundError:
        return
    if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        raise StorageRefused(
            f"{place}: anybody on this machine may write to it, and so choose what your workers "
            f"run; say chmod o-w {place}"
        )
    # Root may look after everybody's stores, and what is root's can be trusted.
    if facts.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise StorageRefused(
            f"{place}: belongs to another user (number {facts.st_uid}), who chooses what is run"
        )
