"""Django's own tests of its tasks framework pass with omniq's backend."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.every_python import interpreters

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that Django 6 runs on, with what omniq and Django need."""
    newest = list(interpreters().items())[-1]
    if tuple(map(int, newest[0].split("."))) < (3, 12):
        pytest.skip("Django 6 needs Python 3.12 or later")
    subprocess.run([newest[1], "-m", "venv", tmp_path / "venv"], check=True)
    inside = tmp_path / "venv" / "bin" / "python"
    pip(inside, "install", "asgiref", "sqlparse", "-e", str(ROOT))
    return inside


def pip(python: Path, *arguments: str, folder: Path | None = None) -> None:
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} does not work here: {done.stderr[-300:]}")


def test_the_backend_passes_the_tests_of_django(python: Path, tmp_path: Path) -> None:
    pip(python, "download", "--no-binary", ":all:", "--no-deps", "django>=6,<7", folder=tmp_path)
    (archive,) = tmp_path.glob("[dD]jango-6*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()

    done = subprocess.run(
        [python, "-m", "tests.integrations.django_suite", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stdout.endswith(" run, 0 failed\n"), done.stdout + done.stderr
