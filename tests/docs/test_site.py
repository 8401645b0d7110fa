"""The built site: its search finds guides first, no link leaves it, and commands are copied without prompts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml

from tests.browser import chromium
from tests.docs import blocks, site_hooks

pytestmark = [pytest.mark.deep, pytest.mark.timeout(240)]

WORDS = ("retry", "timeout", "cron", "version", "pydantic", "startup", "logging")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", str(folder)],
        cwd=blocks.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_the_reference_has_the_methods_of_a_queue(site: Path) -> None:
    assert "enqueue_many" in (site / "reference" / "queues.html").read_text(encoding="utf-8")


class Links(HTMLParser):
    """The addresses that a page names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found |= {value for name, value in attributes if name in ("href", "src") and value}


def test_no_link_of_a_page_leaves_the_site_or_leads_nowhere(site: Path) -> None:
    lost = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its addresses are those of the server
            continue
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        for link in links.found:
            parts = urlsplit(urljoin(page.as_uri(), link))
            target = Path(unquote(parts.path))
            if parts.scheme == "file" and not (target.is_relative_to(site) and target.exists()):
                lost.append(f"{page.relative_to(site)}: {link}")

    assert lost == []


def test_every_page_is_in_the_navigation() -> None:
    text = (blocks.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", text))

    docs = blocks.ROOT / "docs"
    assert named == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}


def test_internals_are_in_a_tab_and_not_in_the_search() -> None:
    tabs: list[dict[str, Any]] = yaml.safe_load(
        (blocks.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    )["nav"]

    pages = {
        name: re.findall(r"[\w/-]+\.md", str(entries))
        for tab in tabs
        for name, entries in tab.items()
    }
    internal = {page for found in pages.values() for page in found if site_hooks.is_internal(page)}
    assert internal == set(pages["Internals"])


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Any]:
    """A page of a browser that shows the site."""
    if reason := chromium.missing():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium.PATH, args=["--no-sandbox"]
            )
            context = browser.new_context(
                base_url=f"http://127.0.0.1:{server.server_address[1]}",
                permissions=["clipboard-read", "clipboard-write"],
            )
            yield context.new_page()
            browser.close()
        server.shutdown()


@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_a_guide_first(page: Any, word: str) -> None:
    page.goto(f"/index.html?q={word}")

    # Until the query is taken, the results are those of an empty one.
    first = page.locator('.md-search-result__item > a[href*="?h="]:not([href$="?h="])').first
    first.wait_for(state="attached")

    assert re.search(r"/(guides/|tutorial|installation|quickstart)", first.get_attribute("href"))


def test_a_command_is_copied_without_its_prompt(page: Any) -> None:
    page.goto("/tutorial.html")

    page.locator(".highlight:has(.gp) button").first.click()

    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == "pip install omniq\nmkdir shop\ncd shop"


@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_scrolls_sideways_and_its_pictures_can_be_read(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for name in ("index", "tutorial", "concepts/life-cycle", "concepts/leases"):
        page.goto(f"/{name}.html")

        sideways = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
        sizes = page.evaluate(
            "[...document.querySelectorAll('article img[src$=\".svg\"]')]"
            ".map(each => each.clientWidth / each.naturalWidth)"
        )

        assert sideways <= 0
        # Texts of 13 units in the pictures are then at least 9 pixels high.
        assert all(size > 0.65 for size in sizes), f"{name}: {sizes}"
