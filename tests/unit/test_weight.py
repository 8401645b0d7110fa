"""What `pip install omniq` puts on a disk: few distributions, few megabytes."""

from __future__ import annotations

import marshal
import tomllib
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from omniq import __version__

ROOT = Path(__file__).parents[2]
MEGABYTE = 1_000_000


def wheel_files() -> list[Path]:
    """The files of the wheel, by the rules of pyproject.toml."""
    wheel = _project("pyproject.toml")["tool"]["hatch"]["build"]["targets"]["wheel"]
    left_out = [pattern.removeprefix("/") for pattern in wheel["exclude"]]
    return [
        path
        for package in wheel["packages"]
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(_matches(path.relative_to(ROOT), pattern) for pattern in left_out)
    ]


def _matches(path: Path, pattern: str) -> bool:
    return fnmatch(str(path), pattern) or str(path).startswith(f"{pattern}/")


def _project(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def installed_size(path: Path) -> int:
    """The bytes of a file, and of what pip compiles from it."""
    size = path.stat().st_size
    if path.suffix == ".py":
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        size += len(marshal.dumps(code))
    return size


@pytest.mark.slow
def test_an_installation_is_at_most_eleven_megabytes():
    """Decision 0023 has what it was before NATS, S3, workflows, the history and flow control, and what would halve it."""
    own = sum(installed_size(path) for path in wheel_files())
    others = 0
    for requirement in _project("pyproject.toml")["project"]["dependencies"]:
        for file in distribution(requirement.partition(">=")[0]).files or ():
            path = Path(str(file.locate()))
            if path.is_file() and "__pycache__" not in path.parts:
                others += installed_size(path)

    assert own + others <= 11 * MEGABYTE


def test_the_wheel_for_authors_of_a_storage_has_what_the_other_leaves_out():
    contract = _project("distributions/omniq-contract/pyproject.toml")
    forced = contract["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    testing = ROOT / "src" / "omniq" / "testing"
    in_wheel = set(wheel_files())
    left_out = {path for path in testing.rglob("*.py") if path not in in_wheel}

    assert f"omniq=={__version__}" in contract["project"]["dependencies"]
    included = {
        path
        for source in forced
        for path in _files((ROOT / "distributions" / "omniq-contract" / source).resolve())
    }
    assert left_out == included


def _files(path: Path) -> list[Path]:
    return [*path.rglob("*.py")] if path.is_dir() else [path]
