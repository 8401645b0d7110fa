"""Hooks of mkdocs: the search finds guides first, and links to the repository's files leave no page dead.

In the repository a page links to `../../SECURITY.md`, which works there; on the site it links to the
file in the repository.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

BOOSTS = {"guides": 4.0, "dashboard": 2.0, "concepts": 1.5}
"""How much more the words of a page count, by folder; pages at the top count most."""

_TOP = 6.0
# A word in a title counts a thousand times as much as one in a text, and each method is a title.
_REFERENCE = 0.0005

INTERNALS = (
    "internals.md",
    "decisions/",
    "reference/canvas.md",
    "reference/chaos.md",
    "reference/fault-comparison.md",
    "reference/faults.md",
    "reference/requirements.md",
)
"""Pages for people who change omniq: they have a tab, and are not in the search."""

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)(#[^)\s]*)?(\))")


def is_internal(path: str) -> bool:
    """Whether a page is for people who change omniq."""
    return path.startswith(INTERNALS)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Set the page's weight in the search, and complete its links."""
    path = page.file.src_uri
    page.meta["search"] = {"exclude": True} if is_internal(path) else {"boost": _boost(path)}

    def complete(link: re.Match[str]) -> str:
        target = repository_path(path, link[2])
        if target is None:
            return link[0]
        anchor = link[3] or ""
        return f"{link[1]}{config.repo_url}/blob/main/{target}{anchor}{link[4]}"

    return _LINK.sub(complete, markdown)


def repository_path(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page names; None for one inside `docs`."""
    parts: list[str] = ["docs", *PurePosixPath(page).parent.parts]
    for part in PurePosixPath(link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return None if parts[:1] == ["docs"] else "/".join(parts)


def _boost(path: str) -> float:
    folder = path.partition("/")[0] if "/" in path else ""
    return _TOP if not folder else BOOSTS.get(folder, _REFERENCE)
