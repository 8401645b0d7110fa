"""Run the tests on every Python >= 3.11 of this machine: `make test-all`.

Each has an environment of its own under `.venv/all`. Arguments go to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from omniq.testing.server_programs import redis_program

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv" / "all"
OLDEST = (3, 11)
ASK = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2], sys.implementation.name)"


def candidates() -> Iterator[Path]:
    """Interpreters on the PATH, and those that pyenv has."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from Path(folder).glob("python3.[0-9][0-9]")
    yield Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/3.[0-9][0-9].*/bin/python"), reverse=True)


def interpreters() -> dict[str, Path]:
    """One interpreter for each version that omniq works on."""
    found: dict[str, Path] = {}
    for python in candidates():
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        version, _, kind = asked.stdout.strip().partition(" ")
        if kind == "cpython" and tuple(map(int, version.split("."))) >= OLDEST:
            found.setdefault(version, python)
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def environment(version: str, python: Path) -> Path:
    """The interpreter of an environment with everything that the tests need."""
    folder = ENVIRONMENTS / version
    inside = folder / "bin" / "python"
    if subprocess.run([inside, "-c", ""], check=False).returncode if inside.exists() else True:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
    uv = shutil.which("uv", path=str(ROOT / ".venv" / "bin"))
    pip: list[str | Path] = (
        [uv, "pip", "install", "--python", inside] if uv else [inside, "-m", "pip", "install"]
    )
    subprocess.run([*pip, "-q", "-e", f"{ROOT}[dev]"], check=True)
    return inside


def servers_path() -> str:
    """A PATH on which a Python finds the Redis of this one, where there is no wheel of its own."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(redis_program().parent)])


def main(arguments: list[str]) -> int:
    """Print how it went on each; the exit code says whether it went well on all."""
    went: dict[str, bool] = {}
    for version, python in interpreters().items():
        print(f"== Python {version} ({python})", flush=True)
        tests: list[str | Path] = [environment(version, python), "-m", "pytest", "-q", "-n", "2"]
        done = subprocess.run(
            [*tests, "--dist", "loadfile", *arguments],
            cwd=ROOT,
            check=False,
            env={**os.environ, "PATH": servers_path()},
        )
        went[version] = done.returncode == 0
    for version, well in went.items():
        print(f"Python {version:5} {'passed' if well else 'FAILED'}")
    return int(not (went and all(went.values())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
