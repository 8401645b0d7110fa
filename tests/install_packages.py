"""Install each built package on every Python >= 3.11 of this machine and run a task: `make package`.

Usage: `python -m tests.install_packages FOLDER`, with the wheel and the sdist in FOLDER. Each is
installed without the development dependencies in a fresh environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.every_python import ROOT, interpreters

TASKS = """
from omniq import task

@task
def add(a: int, b: int) -> int:
    return a + b
"""

PROGRAM = """
from pathlib import Path

import omniq
from sample_tasks import add

source = Path(omniq.__file__).resolve()
assert "site-packages" in source.parts, source
with omniq.TaskQueue("sqlite:///tasks.db") as queue, queue.worker():
    assert queue.enqueue(add, 1, 2).result(timeout=30) == 3
print(omniq.__version__)
"""


def check(python: Path, package: Path) -> str:
    """Install the package with that interpreter, run a task, and return the version installed."""
    uv = shutil.which("uv", path=str(ROOT / ".venv" / "bin")) or "uv"
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "env")
        inside = environment / "bin" / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", inside, package], check=True)
        Path(folder, "sample_tasks.py").write_text(TASKS, encoding="utf-8")
        ran = subprocess.run(
            [inside, "-c", PROGRAM], cwd=folder, check=True, capture_output=True, text=True
        )
        command = subprocess.run(
            [environment / "bin" / "omniq", "--version"],
            cwd=folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert command.stdout.split() == ["omniq", *ran.stdout.split()], command.stdout
        return ran.stdout.strip()


def main(folder: Path) -> int:
    packages = sorted([*folder.glob("omniq-*.whl"), *folder.glob("omniq-*.tar.gz")])
    if len(packages) != 2:
        raise SystemExit(f"expected one wheel and one sdist of omniq in {folder}, found {packages}")
    for version, python in interpreters().items():
        for package in packages:
            print(f"Python {version:5} {package.name}: omniq {check(python, package)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
