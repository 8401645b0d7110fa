"""A URL to a storage object. Backends are imported only when their URL asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote

import msgspec

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import SettingsError
from omniq.serialization import Serializer
from omniq.settings import Settings, mask_url
from omniq.storage.base import BaseStorage

_KNOWN = (
    "memory://, file:folder, file:///absolute/folder, sqlite:///file.db, sqlite:////absolute.db"
)


class _Request(msgspec.Struct, frozen=True):
    """What a backend's opener needs: where, and with what."""

    path: str
    settings: Settings
    serializer: Serializer | None
    clock: Clock
    max_pending: int | None


def open_storage(
    url: str | None = None,
    *,
    settings: Settings | None = None,
    serializer: Serializer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> BaseStorage:
    """The storage that the URL names, not opened yet: use it as `async with open_storage(url)`.

    Without a URL: `OMNIQ_URL`, then the configuration files, then SQLite in `.omniq/omniq.db`.
    Options in the query string (`durability`, `max_pending`, `lease`, `result_ttl`) come first.
    """
    settings = settings or Settings.load()
    url = url or settings.url or f"sqlite:///{settings.base_dir}/omniq.db"
    scheme = url.partition(":")[0].lower()
    opener = _OPENERS.get(scheme)
    if opener is None:
        raise SettingsError(
            f"storage URL {mask_url(url)}: unknown kind {scheme!r}; known: {_KNOWN}"
        )
    path, options = _split(url)
    max_pending = _take_int(url, options, "max_pending")
    return opener(
        _Request(path, _with_options(url, settings, options), serializer, clock, max_pending)
    )


def _split(url: str) -> tuple[str, dict[str, str]]:
    """The path and the options of a URL that names something on this machine."""
    rest, _, query = url.partition(":")[2].partition("?")
    if rest.startswith("//"):
        # file:///abs/dir has an empty host and an absolute path; sqlite:///x.db is relative to
        # the current folder, sqlite:////x.db absolute, as elsewhere in the Python world.
        rest = rest[2:]
        if url.lower().startswith("sqlite:"):
            if not rest.startswith("/"):
                raise SettingsError(
                    f"storage URL {url}: write sqlite:///file.db or sqlite:////abs.db"
                )
            rest = rest[1:]
        elif rest and not rest.startswith("/"):
            raise SettingsError(
                f"storage URL {url}: write file:{rest} for a folder here, or file:///{rest}"
            )
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs):
        raise SettingsError(f"storage URL {url}: an option is given twice")
    return unquote(rest), options


def _take_int(url: str, options: dict[str, str], name: str) -> int | None:
    text = options.pop(name, None)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(
            f"storage URL {mask_url(url)}: {name}={text}: expected a whole number above 0"
        )
    return int(text)


def _with_options(url: str, settings: Settings, options: dict[str, str]) -> Settings:
    unknown = options.keys() - {"durability", "lease", "result_ttl"}
    if unknown:
        raise SettingsError(
            f"storage URL {mask_url(url)}: unknown option {sorted(unknown)[0]!r}; "
            "known: durability, lease, max_pending, result_ttl"
        )
    return settings.overridden(f"storage URL {mask_url(url)}", options) if options else settings


def _memory(request: _Request) -> BaseStorage:
    from omniq.storage.memory import MemoryStorage

    if request.path:
        raise SettingsError("a memory:// URL has no path; each memory:// is a store of its own")
    return MemoryStorage(
        serializer=request.serializer,
        clock=request.clock,
        settings=request.settings,
        max_pending=request.max_pending,
    )


def _file(request: _Request) -> BaseStorage:
    from omniq.storage.file import FileStorage

    return FileStorage(
        _needed_path(request, "file:folder or file:///absolute/folder"),
        serializer=request.serializer,
        clock=request.clock,
        settings=request.settings,
        max_pending=request.max_pending,
    )


def _sqlite(request: _Request) -> BaseStorage:
    from omniq.storage.sqlite import SQLiteStorage

    return SQLiteStorage(
        _needed_path(request, "sqlite:///file.db or sqlite:////absolute.db"),
        serializer=request.serializer,
        clock=request.clock,
        settings=request.settings,
        max_pending=request.max_pending,
    )


def _needed_path(request: _Request, example: str) -> Path:
    if not request.path.strip("/"):
        raise SettingsError(f"the storage URL names no path: write {example}")
    return Path(request.path)


_OPENERS: dict[str, Callable[[_Request], BaseStorage]] = {
    "memory": _memory,
    "file": _file,
    "sqlite": _sqlite,
}
