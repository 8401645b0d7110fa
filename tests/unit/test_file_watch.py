"""`--reload` notices changed Python files of the project, and no others."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from omniq.clock import SYSTEM_CLOCK
from omniq.worker.process.file_watch import FileWatch, Place, places_of


@pytest.fixture
def changes(tmp_path):
    """The reports of a watch of the folder, from when the test asks for the first one."""
    reports: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    watch = FileWatch([Place(tmp_path)], reports.put, SYSTEM_CLOCK)
    watch.start()
    yield reports
    watch.stop()


def test_changed_new_and_removed_files_are_reported_together(tmp_path):
    for name in ("changed.py", "removed.py", "same.py"):
        (tmp_path / name).write_text("1")
    reports: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    watch = FileWatch([Place(tmp_path)], reports.put, SYSTEM_CLOCK)
    (tmp_path / "changed.py").write_text("22")
    (tmp_path / "removed.py").unlink()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "new.py").write_text("1")
    watch.start()
    names = reports.get(timeout=20)
    watch.stop()

    assert [Path(name).name for name in names] == ["changed.py", "new.py", "removed.py"]


def test_other_files_and_folders_are_not_watched(tmp_path, changes):
    for name in (".git", "__pycache__", "node_modules", "env"):
        (tmp_path / name).mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    for name in (".git/a.py", "__pycache__/b.py", "node_modules/c.py", "env/d.py", "e.txt"):
        (tmp_path / name).write_text("1")
    (tmp_path / "last.py").write_text("1")

    assert changes.get(timeout=20) == [str(tmp_path / "last.py")]


def test_the_places_are_the_current_folder_and_those_of_the_modules(tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "watched_package").mkdir(parents=True)
    (tmp_path / "elsewhere" / "watched_package" / "__init__.py").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *sys.path])
    places = places_of(["watched_package.tasks", "no_such_module", "msgspec", "omniq.log"])

    folders = {place.folder for place in places}
    assert {tmp_path / "here", tmp_path / "elsewhere"} <= folders
    # Of an installed package, only its own folder; of omniq nothing.
    assert {folder.name for folder in folders} <= {
        "here",
        "elsewhere",
        "watched_package",
        "msgspec",
    }


def test_in_a_home_folder_only_its_own_files_are_watched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert places_of([]) == [Place(tmp_path, is_deep=False)]
