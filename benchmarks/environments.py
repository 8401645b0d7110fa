"""Virtual environments for the programs that omniq is compared with. Created once, then reused.

    python = environment("rq", ["rq==2.12.0"])    # the path of an interpreter that has it
    python = environment("omniq", ["-e", "."])    # paths are relative to the repository

They are in `benchmarks/.environments`, outside version control. Remove that folder to create them
again. uv installs the packages if it is available, since it is fast; otherwise pip does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / ".environments"
_ROOT = Path(__file__).parents[1]
# Compiled, as pip does it: compiling at each start would count as memory of the process.
_INSTALL = ("pip", "install", "-q", "--compile-bytecode")


class EnvironmentFailed(Exception):
    """The packages could not be installed; the message has the end of the installer's output."""


def environment(name: str, requirements: list[str]) -> Path:
    """Return the interpreter of an environment with exactly these packages and their dependencies.

    Other requirements give another environment. Two concurrent callers get the same one.
    """
    digest = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:8]
    folder = FOLDER / f"{name}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            # Remove the remains of an interrupted attempt.
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            _install(python, requirements)
            complete.touch()
    return python


def _install(python: Path, requirements: list[str]) -> None:
    beside = Path(sys.executable).parent / "uv"
    try:
        _run([str(beside), *_INSTALL, "--python", str(python), *requirements])
    except (OSError, EnvironmentFailed):
        _run([str(python), "-m", "pip", "install", "-q", *requirements])


def _run(command: list[str]) -> None:
    # The new environment must not import packages of this one.
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=_ROOT, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentFailed(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
