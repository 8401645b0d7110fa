"""Virtual environments for programs that omniq is measured beside: made once, then found again.

    python = environment("rq", ["rq==2.12.0"])    # the path of an interpreter that has it
    python = environment("omniq", ["-e", "."])    # paths are those of the repository

They lie in `benchmarks/.environments`, outside version control; remove that folder to have them
made anew. uv is used where it is there, since it is quick, and pip where it is not.
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
# Compiled, as pip does it: what is compiled at each start counts as the memory of whoever starts.
_INSTALL = ("pip", "install", "-q", "--compile-bytecode")


class EnvironmentFailed(Exception):
    """What was asked for could not be installed; the end of the installer's words is in the message."""


def environment(name: str, requirements: list[str]) -> Path:
    """The interpreter of an environment with exactly these packages and what they need.

    Other requirements are another environment. Two callers at once get the same one.
    """
    wanted = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:8]
    place = FOLDER / f"{name}-{wanted}"
    python, complete = place / "bin" / "python", place / "complete"
    if complete.exists():
        return python
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            # What an interrupted attempt left behind is of no use.
            _run([sys.executable, "-m", "venv", "--clear", str(place)])
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
    # What is importable here is none of the new environment's business.
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=_ROOT, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentFailed(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
