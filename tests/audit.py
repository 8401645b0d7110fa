"""Look for known vulnerabilities, unsafe code and unsafe workflows: `make audit`.

Usage: `python -m tests.audit FOLDER`, with the programs pip-audit, bandit and zizmor in FOLDER.

The pinned versions of `requirements/` and the lowest versions that `pyproject.toml` allows are
compared with the advisories that pip-audit can reach. Without a network it exits with 0 although it
has audited nothing; so its report is counted, and the older advisories of the package safety-db are
used in its place. Exit codes: 0 nothing found, 1 something found, 3 no package could be audited.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTHING_AUDITED = 3

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_LOWEST = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([^\s;,]+)")

_READ_DATABASE = """
import importlib.metadata, json
# Not imported: its module reads a file of the current folder.
package = importlib.metadata.distribution("safety-db")
path = next(each for each in package.files if each.name == "insecure_full.json")
print(json.dumps([package.version, json.loads(path.read_text("utf-8"))]))
"""

_COMPARE = """
import json, sys
from packaging.specifiers import InvalidSpecifier, SpecifierSet
found = []
for name, version, ranges in json.load(sys.stdin):
    for each in ranges:
        try:
            is_hit = SpecifierSet(each).contains(version, prereleases=True)
        except InvalidSpecifier:
            continue
        if is_hit:
            found.append([name, version, each])
print(json.dumps(found))
"""


def pinned() -> dict[str, str]:
    """Every package of `requirements/`, with its version."""
    return {
        name.lower(): version
        for path in sorted((ROOT / "requirements").glob("*.txt"))
        for name, version in _PINNED.findall(path.read_text(encoding="utf-8"))
    }


def lowest() -> dict[str, str]:
    """Every package that users may install with omniq, with the lowest version that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    for extra, packages in extras.items():
        if extra not in ("dev", "docs"):
            wanted += packages
    return {match[1].lower(): match[2] for each in wanted if (match := _LOWEST.match(each))}


class Audit:
    """Runs each check with the programs of a folder and collects what they found."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.findings: list[str] = []
        self.audited = 0

    def check_packages(self, packages: Iterable[tuple[str, str]], what: str) -> None:
        """Compare versions of packages with the known vulnerabilities."""
        wanted = sorted(packages)
        done, found = self._ask_service(wanted)
        source = "advisories on the network"
        if not done:
            done, found, source = self._ask_database(wanted)
        self.audited += done
        self.findings += found
        print(f"{what}: {done} of {len(wanted)} audited ({source}), {len(found)} vulnerable")

    def _ask_service(self, packages: list[tuple[str, str]]) -> tuple[int, list[str]]:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("".join(f"{name}=={version}\n" for name, version in packages))
            file.flush()
            options = [
                "--disable-pip",
                "--no-deps",
                "--progress-spinner",
                "off",
                "--format",
                "json",
            ]
            ran = self._run("pip-audit", "--requirement", file.name, *options)
        try:
            report = json.loads(ran.stdout)["dependencies"]
        except (ValueError, KeyError):
            return 0, []
        audited = [each for each in report if "skip_reason" not in each]
        found = [
            f"{each['name']} {each['version']}: {vulnerability['id']}"
            for each in audited
            for vulnerability in each["vulns"]
        ]
        return len(audited), found

    def _ask_database(self, packages: list[tuple[str, str]]) -> tuple[int, list[str], str]:
        read = self._run("python", "-c", _READ_DATABASE)
        if read.returncode:
            return 0, [], "no database"
        version, known = json.loads(read.stdout)
        ranges = {
            name.lower(): [text for advisory in advisories for text in advisory["specs"]]
            for name, advisories in known.items()
            if not name.startswith("$")
        }
        asked = [(name, version, ranges.get(name, [])) for name, version in packages]
        compared = self._run("python", "-c", _COMPARE, given=json.dumps(asked))
        if compared.returncode:
            return 0, [], "no database"
        found = [f"{name} {text}: {bad}" for name, text, bad in json.loads(compared.stdout)]
        return len(packages), found, f"safety-db {version}"

    def check_code(self) -> None:
        """Look for unsafe Python code; only findings of high severity count."""
        ran = self._run("bandit", "-q", "-r", str(ROOT / "src"), "--severity-level", "high")
        self._report("code", ran)

    def check_workflows(self) -> None:
        """Look for unsafe workflows; only findings of high severity count."""
        folder = ROOT / ".github" / "workflows"
        ran = self._run("zizmor", "--offline", "--min-severity", "high", str(folder))
        self._report("workflows", ran)

    def _report(self, what: str, ran: subprocess.CompletedProcess[str]) -> None:
        if ran.returncode:
            print(ran.stdout, ran.stderr, sep="\n")
            self.findings.append(what)
        print(f"{what}: {'unsafe' if ran.returncode else 'nothing of high severity'}")

    def _run(
        self, program: str, *arguments: str, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self._programs / program), *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def main(programs: Path) -> int:
    audit = Audit(programs)
    audit.check_packages(pinned().items(), "pinned versions")
    audit.check_packages(lowest().items(), "lowest versions")
    audit.check_code()
    audit.check_workflows()
    for finding in audit.findings:
        print(f"found: {finding}")
    if not audit.audited:
        print("no package could be audited: there is neither a network nor a database")
        return NOTHING_AUDITED
    return 1 if audit.findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
