"""omniq needs few, known packages, and none of its regular expressions can be made slow."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from omniq.clock import SYSTEM_CLOCK

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "omniq"


def core_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=\[ ]", each)[0] for each in project["dependencies"]]


@pytest.mark.security("S25")
def test_the_core_requires_few_packages_each_with_a_minimum_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert len(project["dependencies"]) <= 5
    extras = project["optional-dependencies"].values()
    every = [*project["dependencies"], *(each for extra in extras for each in extra)]
    assert [each for each in every if ">=" not in each and not each.startswith("omniq[")] == []


@pytest.mark.security("S25")
def test_a_bill_of_materials_can_be_made_from_the_installed_packages():
    """Every package that the core requires has a name, a version and a licence."""
    wanted, bill = core_dependencies(), {}
    while wanted:
        found = distribution(wanted.pop())
        name = found.metadata["Name"]
        if name in bill:
            continue
        metadata = found.metadata.json
        licence = metadata.get("license_expression") or metadata.get("license")
        classes = [each for each in metadata.get("classifier", []) if "License" in each]
        bill[name] = {"version": found.version, "licence": licence or classes}
        wanted += [
            re.split(r"[<>=!~\[; (]", each)[0]
            for each in found.requires or ()
            if "extra ==" not in each and "sys_platform" not in each and "python_version" not in each
            and "platform_system" not in each
        ]  # fmt: skip

    assert {"msgspec", "loguru", "typer", "rich", "cronsim"} <= set(bill)
    assert [
        name for name, facts in bill.items() if not facts["version"] or not facts["licence"]
    ] == []
    assert json.dumps(bill)
    assert len(bill) <= 15


@pytest.mark.security("S25")
@pytest.mark.deep
@pytest.mark.timeout(300)
def test_no_installed_package_has_a_known_vulnerability():
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner", "off"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    if "No module named" in done.stderr or done.returncode not in (0, 1):
        pytest.skip(f"pip-audit cannot ask: {done.stderr[-200:]}")

    assert done.returncode == 0, done.stdout


def patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Every compiled pattern in a module of omniq."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if not any(
            isinstance(node, ast.Import) and node.names[0].name == "re" for node in tree.body
        ):
            continue
        name = ".".join(["omniq", *path.relative_to(SRC).with_suffix("").parts])
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found.append((f"{name}.{key}", value))
    return found


def test_the_patterns_are_found():
    assert "omniq.models._ID" in dict(patterns())


TEETH = [
    "a",
    "a" * 9,
    "1",
    "0",
    " ",
    ".",
    "-",
    "_",
    "/",
    ":",
    "@",
    "://a:",
    "=",
    "&",
    "?",
    "&a=",
    "ab.",
    "A",
    "*",
    ",",
]


@pytest.mark.security("S26")
@pytest.mark.parametrize(
    ("name", "pattern"), patterns(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_no_regular_expression_is_slow_on_adversarial_text(name, pattern):
    """A pattern with catastrophic backtracking takes hours on these; a safe one, milliseconds."""
    for tooth in TEETH:
        for tail in ("", "!", "\0", "\n", "@!"):
            text = tooth * (3_000 // len(tooth)) + tail
            began = SYSTEM_CLOCK.monotonic()
            pattern.fullmatch(text)
            pattern.search(text[:300] + tail)
            assert SYSTEM_CLOCK.monotonic() - began < 10, (name, tooth, tail)
