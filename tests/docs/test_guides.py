"""The code in the documentation runs, block by block, and prints what the page says it prints."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from omniq import Settings, TaskQueue
from omniq.models import LEGAL_TRANSITIONS
from tests.docs import blocks

DOCS = blocks.ROOT / "docs"
PAGES = sorted(
    page
    for folder in (DOCS, DOCS / "concepts", DOCS / "guides")
    for page in folder.glob("*.md")
    if blocks.BLOCK.search(page.read_text(encoding="utf-8"))
)
TEXTS = [*blocks.ROOT.glob("*.md"), *DOCS.rglob("*.md")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, request) -> None:
    environment = {}
    if "DATABASE_URL" in page.read_text(encoding="utf-8"):
        environment["DATABASE_URL"] = request.getfixturevalue("postgres_url")
    if "NATS_URL" in page.read_text(encoding="utf-8"):
        environment["NATS_URL"] = request.getfixturevalue("nats_url")
    if "TASKS_URL" in page.read_text(encoding="utf-8"):
        environment["TASKS_URL"] = request.getfixturevalue("s3_url")
    scripts = blocks.write(page, tmp_path)
    for script, printed in scripts:
        if not blocks.is_test(script):
            said = blocks.run(script, **environment)
            assert not printed or said == printed, script.read_text()
    tests = [script for script, _ in scripts if blocks.is_test(script)]
    if tests:
        blocks.run(*tests, **environment)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as mkdocs and GitHub write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s]+", "-", each) for each in words}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(blocks.ROOT)))
def test_every_link_has_a_target(text: Path) -> None:
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", code.sub("", text.read_text(encoding="utf-8")))
    lost = []
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = (text.parent / target) if target else text
        if not found.exists() or (anchor and anchor not in anchors(found)):
            lost.append(link)

    assert not lost


def commands() -> list[tuple[str, str]]:
    """Return every command line of omniq in the docs, with the page that has it."""
    found = []
    for text in TEXTS:
        for code in re.findall(
            r"^```(?:console|ini|yaml)\n(.*?)^```", text.read_text(), re.M | re.S
        ):
            lines = [re.sub(r"[\[\],\"]", "", line) for line in code.splitlines()]
            calls = [re.search(r"(?:\$ |bin/|command: )(omniq .*)", line) for line in lines]
            found += [(text.name, call[1].partition("#")[0]) for call in calls if call]
    return found


def test_every_command_in_the_docs_exists_with_its_options() -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = re.split(r"^## `omniq ", page, flags=re.M)[1:]
    known = {section.split("`")[0].split(" [")[0].rstrip("…"): section for section in sections}
    known = {re.sub(r" [A-Z_…\s]+$", "", name): section for name, section in known.items()}

    unknown = []
    for where, call in commands():
        words = call.split()[1:]
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
        options = [word for word in words if word.startswith("--") and word != "--help"]
        if words[0] not in ("--help", "--version") and (
            name is None or any(o not in known[name] for o in options)
        ):
            unknown.append(f"{where}: {call}")

    assert not unknown
    assert len(commands()) > 20


def test_the_settings_for_a_small_deployment_load_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "guides" / "small-deployments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "omniq.toml").write_text(block)
    monkeypatch.chdir(tmp_path)
    settings = Settings.load()
    with TaskQueue() as queue:
        pool = queue.worker()

        assert queue.storage.capabilities.name == "sqlite"
        assert queue.storage.max_pending == 100
        assert pool.stats().workers_count == 3
    assert (settings.default_timeout, settings.shutdown_timeout) == (300.0, 30.0)
    assert settings.call_timeout == 10.0
    explained = re.findall(r"^\| `(\w+) = (\w+)` \|", page, re.M)
    shown = dict(re.findall(r"^(\w+) = (\d+)$", block, re.M))
    assert dict(explained) == shown


def test_the_manifests_are_valid_for_kubernetes() -> None:
    page = (DOCS / "guides" / "production.md").read_text(encoding="utf-8")

    manifests = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S)]

    assert [manifest["kind"] for manifest in manifests] == ["Deployment", "ScaledObject"]


def test_the_life_cycle_diagram_has_exactly_the_allowed_transitions() -> None:
    picture = (DOCS / "concepts" / "life-cycle.svg").read_text(encoding="utf-8")

    drawn = set(re.findall(r'id="(\w+-\w+)"', picture))

    legal = {
        f"{status.value}-{after.value}"
        for status, allowed in LEGAL_TRANSITIONS.items()
        for after in allowed
    }
    assert drawn == legal


def test_the_settings_page_lists_every_setting_with_its_default() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `OMNIQ_\w+` \| (.*?) \|", page, re.M))

    defaults = {field.name: field.default for field in fields(Settings) if field.init}

    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        if default not in (None, ()):
            # The page may say 30 for 30.0.
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            assert rows[name].strip("`") in (shown, shown.removesuffix(".0"))
