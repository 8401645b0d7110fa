"""Refuses a store that other users may write to, since its contents decide what workers run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omniq.errors import StorageRefused


def refuse_shared(place: Path) -> None:
    """Raise `StorageRefused` for a file or folder of another user, or that every user may write to.

    Write access for a group is accepted. So is a folder that every user may add to, when only the
    owner of an entry may replace it, as in /tmp.
    """
    try:
        facts = os.stat(place)
    except FileNotFoundError:
        return
    if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        raise StorageRefused(
            f"{place}: every user of this machine may write to it, and so choose what your workers "
            f"run; run chmod o-w {place}"
        )
    # Root may maintain the stores of all users, and a store of root can be trusted.
    if facts.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise StorageRefused(
            f"{place}: belongs to another user (uid {facts.st_uid}), who could choose what your "
            "workers run; use a store of your own, or change its owner"
        )
