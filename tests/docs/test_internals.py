"""The map in docs/internals.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
BACKENDS = ("memory", "file", "sqlite", "postgres", "redis", "nats", "s3")

PATHS = sorted(set(re.findall(r"[\w/<>]*\w/(?=`)|[\w/<>]*\w\.py", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_the_path_exists(path):
    places = [ROOT / "src" / "omniq" / path, ROOT / path]
    if "/" not in path:
        places += [ROOT / "src" / "omniq" / "storage" / name / path for name in BACKENDS]
    if path.startswith("<backend>/"):
        places = [ROOT / "src/omniq/storage" / path.replace("<backend>", name) for name in BACKENDS]
    is_template = "<name>" in path

    assert is_template or any(place.exists() for place in places)


def test_the_pattern_finds_paths():
    assert {"storage/base.py", "worker/demand.py", "tasks/", "storage/engine.py"} <= set(PATHS)


def test_every_package_and_root_module_with_rules_is_on_the_map():
    packages = {f"{path.parent.name}/" for path in (ROOT / "src" / "omniq").glob("*/__init__.py")}

    assert packages <= set(PATHS)


PACKAGES = {
    path.parent: path.read_text(encoding="utf-8").split('"""')[1]
    for path in sorted((ROOT / "src" / "omniq").rglob("__init__.py"))
    # Django asks for these two folders, which have one command.
    if "management" not in path.parts
}


@pytest.mark.parametrize(
    "folder", [folder for folder in PACKAGES if folder.name != "omniq"], ids=lambda path: path.name
)
def test_the_docstring_of_a_package_lists_its_modules(folder):
    listed = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", PACKAGES[folder])}
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}

    assert modules | packages <= listed
