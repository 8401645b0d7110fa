"""omniq needs few, known packages, and none of its regular expressions can be made slow."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path
from typing import Any

import pytest

from omniq.clock import SYSTEM_CLOCK
from tests import audit

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

    assert {"msgspec", "loguru", "cronsim"} <= set(bill)
    assert [
        name for name, facts in bill.items() if not facts["version"] or not facts["licence"]
    ] == []
    assert json.dumps(bill)
    # With omniq itself, and two more that loguru needs on Windows, they are six.
    assert len(bill) <= 3


def fake_programs(folder: Path, **programs: str) -> Path:
    """Programs for `make audit` that print a text, or fail if there is none."""
    for name in ("pip-audit", "python", "bandit", "zizmor"):
        text = programs.get(name.replace("-", "_"))
        body = "exit 1" if text is None else f"cat <<'END'\n{text}\nEND"
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)
    return folder


SKIPPED = json.dumps({"dependencies": [{"name": "a", "skip_reason": "not found"}] * 9})
AUDITED = json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": []}]})
VULNERABLE = json.dumps(
    {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]}
)


@pytest.mark.security("S25")
@pytest.mark.parametrize(
    ("reply", "code"),
    [(SKIPPED, 3), ("", 3), ("no JSON", 3), (None, 3), (AUDITED, 0), (VULNERABLE, 1)],
)
def test_an_audit_that_could_audit_nothing_says_so(reply, code, tmp_path, capsys):
    """Without a network pip-audit succeeds, and has skipped every package."""
    clean = {"bandit": "", "zizmor": ""}
    programs = fake_programs(tmp_path, **clean, **({} if reply is None else {"pip_audit": reply}))

    assert audit.main(programs) == code
    assert ("no package could be audited" in capsys.readouterr().out) == (code == 3)


@pytest.mark.security("S25")
@pytest.mark.parametrize("tool", ["bandit", "zizmor"])
def test_a_finding_in_code_or_workflows_fails_the_audit(tool, tmp_path):
    others = {name: "" for name in ("bandit", "zizmor") if name != tool}

    assert audit.main(fake_programs(tmp_path, pip_audit=AUDITED, **others)) == 1


@pytest.mark.security("S25")
def test_workflows_run_only_actions_that_are_pinned_to_a_hash():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))

        assert [each for each in used if not re.search(r"@[0-9a-f]{40}$|^\./", each)] == []


@pytest.mark.security("S25")
def test_every_pinned_requirement_has_a_hash_and_every_lower_bound_is_audited():
    for path in (ROOT / "requirements").glob("*.txt"):
        blocks = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8"))
        pinned = [block for block in blocks if "==" in block.partition("\n")[0]]
        assert pinned
        assert [block for block in pinned if "--hash=sha256:" not in block] == []

    assert {"starlette", "jinja2", "h11", "cryptography", "msgspec"} <= set(audit.lowest())


@pytest.mark.security("S25")
def test_the_plugin_of_pytest_imports_nothing_of_omniq_until_a_fixture_is_used():
    (plugin,) = [each for each in entry_points(group="pytest11") if each.name == "omniq"]
    program = (
        f"import sys, {plugin.value}; print(*[name for name in sys.modules if 'omniq' in name])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert ran.stdout.split() == ["omniq_pytest"]


_IMPORTS_RE = re.compile(r"^(import|from) re\b", re.MULTILINE)


def patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Every compiled pattern in a module of omniq."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        if not _IMPORTS_RE.search(path.read_text()):
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


def own_teeth(pattern: re.Pattern[str]) -> list[str]:
    """The words of the pattern itself, alone and behind each separator that it names."""
    source = str(pattern.pattern)
    words = {word for word in re.findall(r"[A-Za-z0-9]{2,}", source) if len(word) < 30}
    marks = {mark for mark in source if mark in "?&=:/@.;#%-_ "}
    return sorted(words | {mark + word for mark in marks for word in words})[:60]


@pytest.mark.security("S26")
@pytest.mark.parametrize(
    ("name", "pattern"), patterns(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_no_regular_expression_is_slow_on_adversarial_text(name, pattern):
    """A pattern with catastrophic backtracking takes hours on these; a safe one, milliseconds."""
    for tooth in [*TEETH, *own_teeth(pattern)]:
        for tail in ("", "!", "\0", "\n", "@!"):
            text: Any = tooth * (3_000 // len(tooth)) + tail
            short: Any = text[:300] + tail
            if isinstance(pattern.pattern, bytes):
                text, short = text.encode(), short.encode()
            began = SYSTEM_CLOCK.monotonic()
            pattern.fullmatch(text)
            pattern.search(short)
            assert SYSTEM_CLOCK.monotonic() - began < 10, (name, tooth, tail)
