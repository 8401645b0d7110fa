"""Notices that Python files have changed, for `omniq worker --reload`.

It compares the times and sizes of the files again and again: that works on every system and file system,
also in containers whose folders are mounted.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from omniq.clock import Clock

_PAUSE = 0.4
_SETTLED = 0.15
"""Seconds without a further change after which a change is reported: editors write several files."""

_SHARE = 20
"""A search through many files takes at most one part in `_SHARE` of the time."""

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}

_Files = dict[str, tuple[int, int]]


class Place(NamedTuple):
    """A folder with Python files; `is_deep`: and the folders in it."""

    folder: Path
    is_deep: bool = True


def places_of(modules: Iterable[str]) -> list[Place]:
    """The current folder, and those that the modules are in; an installed package alone."""
    found = dict.fromkeys([_place(Path.cwd())])
    # Integrations name a module of omniq that sets them up.
    for name in {module.partition(".")[0] for module in modules} - {"omniq"}:
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
            for folder in (spec and spec.submodule_search_locations) or ():
                found[Place(Path(folder))] = None
            if spec is not None and spec.origin is not None:
                file = Path(spec.origin)
                parent = file.parent.parent if spec.submodule_search_locations else file.parent
                if _SKIPPED.isdisjoint(parent.parts):
                    found[_place(parent)] = None
    return list(found)


def _place(folder: Path) -> Place:
    """A home folder has too many files, as has every folder above it."""
    home = Path(os.path.expanduser("~"))
    return Place(folder, is_deep=folder != home and folder not in home.parents)


class FileWatch:
    """Calls `on_change` with the names of files that were changed, added or removed. In its thread."""

    def __init__(
        self, places: Sequence[Place], on_change: Callable[[list[str]], object], clock: Clock
    ) -> None:
        self._places = places
        self._on_change = on_change
        self._clock = clock
        self._known = self._search()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omniq-reload", daemon=True)

    def start(self) -> None:
        """Watch from now on; changes since the object was made count, too."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            began = self._clock.monotonic()
            found = self._search()
            pause = max(_PAUSE, (self._clock.monotonic() - began) * _SHARE)
            if found != self._known:
                found = self._settled(found)
                changed = sorted(
                    path
                    for path in {**self._known, **found}
                    if self._known.get(path) != found.get(path)
                )
                self._known = found
                if changed:
                    self._on_change(changed)

    def _settled(self, found: _Files) -> _Files:
        """What is there once nothing changes any more."""
        while not self._stopping.wait(_SETTLED):
            before, found = found, self._search()
            if found == before:
                break
        return found

    def _search(self) -> _Files:
        found: _Files = {}
        seen: set[str] = set()
        for place in self._places:
            for entry in _python_files(str(place.folder), place.is_deep, seen):
                with suppress(OSError):
                    facts = entry.stat()
                    found[entry.path] = facts.st_mtime_ns, facts.st_size
        return found


def _python_files(folder: str, is_deep: bool, seen: set[str]) -> Iterator[os.DirEntry[str]]:
    if folder in seen:
        return
    seen.add(folder)
    try:
        entries = list(os.scandir(folder))
    except OSError:
        # It was removed, or may not be read.
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.name.endswith(".py"):
            yield entry
        elif is_deep and entry.is_dir(follow_symlinks=False):
            yield from _python_files(entry.path, True, seen)
