"""Refuses a store that other users may write to, since its contents decide what workers run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omniq.errors import StorageRefused
from omniq.settings import DEFAULT_FOLDER, Settings
from omniq.settings.places import PlaceRules

_SIDE_FILES = ("", "-wal", "-shm", "-journal")
"""What SQLite reads beside a database. A log that another user has written replaces its contents."""


def store_rules(settings: Settings) -> PlaceRules:
    """The rules for the files and folders of a store.

    Root, too, opens only its own stores, unless the setting says otherwise: the owner of a store
    chooses what its workers run.
    """
    is_root = os.geteuid() == 0
    return PlaceRules(
        refusal=StorageRefused,
        danger="choose what your workers run",
        mend_owner=", or set OMNIQ_ROOT_OPENS_ANY_STORE=true" if is_root else "",
        any_owner=is_root and settings.root_opens_any_store,
    )


def make_store_folder(folder: Path, rules: PlaceRules) -> None:
    """Create the folder and those above it, for this user only; refuse it if others may change it.

    Checked before and after: what is created lies in a folder that only this user can change.
    """
    rules.check_folder(folder)
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
        if missing.name == DEFAULT_FOLDER:
            # As ruff, mypy and pytest do: a store must not be committed by accident.
            (missing / ".gitignore").write_text("*\n")
    rules.check_folder(folder)


def check_database(path: Path, rules: PlaceRules) -> None:
    """Refuse a database, or a file that SQLite reads beside it, that others may write to."""
    # SQLite follows a link to the database, and looks for its logs beside the target.
    target = path.resolve()
    rules.check_folder(path.parent)
    rules.check_folder(target.parent)
    for suffix in _SIDE_FILES:
        place = target.with_name(target.name + suffix)
        try:
            facts = os.lstat(place)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise rules.refusal(f"{place}: exists and is not a file; move it away")
        rules.check(facts, place)
