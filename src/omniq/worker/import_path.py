"""Where the processes of a worker import modules from.

The modules that a command names are taken from the current folder, if they lie there. Every other
import finds that folder last: a file in it, such as `uvloop.py`, must not take the place of an
installed package. With PYTHONSAFEPATH it is not searched for other imports at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_MARK = "omniq modules of the command: "
"""What an entry of `sys.path` begins with that stands for some modules of a folder.

As an entry it is passed on to child processes with the rest of the path.
"""


def use_current_folder(names: Iterable[str], folder: Path | None = None) -> None:
    """Import these modules, or the packages they are in, from this folder if they lie there.

    It is the current folder, or that of the settings file which names the modules.
    """
    place = os.getcwd() if folder is None else str(folder)
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if sys.path and sys.path[0] in ("", place) and place not in given:
        # `python -m` has put it first.
        del sys.path[0]
    if not sys.flags.safe_path and place not in sys.path:
        sys.path.append(place)
    packages = sorted({name.partition(".")[0] for name in names})
    sys.path.insert(0, f"{_MARK}{','.join(packages)} in {place}")
    _install()


def named_folder() -> Path | None:
    """The folder of the modules that a command or a settings file names; None in other programs."""
    folders = [_split(entry)[1] for entry in sys.path if entry.startswith(_MARK)]
    return Path(folders[0]) if folders else None


def use_path(entries: list[str]) -> None:
    """Use the import path of the parent process."""
    sys.path[:] = entries
    _install()


class _NamedModules:
    """Finds some modules in a folder, and no others."""

    def __init__(self, entry: str) -> None:
        if not entry.startswith(_MARK):
            raise ImportError(entry)
        names, self._folder = _split(entry)
        self._names = frozenset(names.split(","))

    def find_spec(self, fullname: str, target: ModuleType | None = None, /) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        return PathFinder.find_spec(fullname, [self._folder], target)


def _split(entry: str) -> tuple[str, str]:
    """The names and the folder of such an entry."""
    names, _, folder = entry.removeprefix(_MARK).partition(" in ")
    return names, folder


def _install() -> None:
    if _NamedModules not in sys.path_hooks:
        sys.path_hooks.insert(0, _NamedModules)
        sys.path_importer_cache.clear()
