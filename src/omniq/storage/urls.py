"""Makes a storage object from a URL. A backend is imported only when a URL names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, unquote

import msgspec

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import SettingsError
from omniq.serialization import Serializer
from omniq.settings import Settings, mask_url
from omniq.storage.base import BaseStorage

_KNOWN = (
    "memory://, file:folder, file:///absolute/folder, sqlite:///file.db, sqlite:////absolute.db, "
    "postgresql://host/database, redis://host/0, rediss://, valkey://"
)
_SETTINGS = frozenset({"durability", "lease", "result_ttl"})


class _Request(msgspec.Struct, frozen=True):
    """The parts of a URL, and the other arguments that a storage is made with.

    `location` is a path on this machine, or the URL of a server without omniq's options;
    `backend_options` are the options that only this kind of storage has.
    """

    location: str
    backend_options: dict[str, str]
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
    Options in the query string (`durability`, `max_pending`, `lease`, `result_ttl`) override the
    settings; a server's URL may have others, which its driver receives.
    """
    settings = settings or Settings.load()
    url = url or storage_url(settings)
    scheme = url.partition(":")[0].lower()
    if scheme not in _OPENERS and scheme not in _SERVERS:
        raise SettingsError(
            f"storage URL {mask_url(url)}: unknown kind {scheme!r}; known: {_KNOWN}"
        )
    if scheme in _SERVERS:
        opener, backend_names = _SERVERS[scheme]
        location, options = _split_server(url, backend_names)
    else:
        opener, backend_names = _OPENERS[scheme], frozenset()
        location, options = _split(url)
    max_pending = _take_int(url, options, "max_pending")
    backend_options = {name: options.pop(name) for name in backend_names & options.keys()}
    settings = _with_options(url, settings, options)
    return opener(_Request(location, backend_options, settings, serializer, clock, max_pending))


def storage_url(settings: Settings) -> str:
    """The URL that these settings name; the embedded default when they name none."""
    return settings.url or f"sqlite:///{settings.base_dir}/omniq.db"


def local_path(url: str) -> Path | None:
    """The file or folder that a URL names on this machine; None for memory and for servers."""
    if url.partition(":")[0].lower() not in ("file", "sqlite"):
        return None
    return Path(_split(url)[0])


def _split_server(url: str, backend_names: frozenset[str]) -> tuple[str, dict[str, str]]:
    """The URL for the driver, and omniq's options."""
    omniq_names = _SETTINGS | backend_names | {"max_pending"}
    base, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    options = [pair for pair in pairs if unquote(pair.partition("=")[0]) in omniq_names]
    driver_query = "&".join(pair for pair in pairs if pair not in options)
    driver_url = f"{base}?{driver_query}" if driver_query else base
    return driver_url, _parse_options(url, "&".join(options))


def _parse_options(url: str, query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs):
        raise SettingsError(f"storage URL {mask_url(url)}: an option is given twice")
    return options


def _split(url: str) -> tuple[str, dict[str, str]]:
    """The path and the options of a URL that names a file or folder on this machine."""
    rest, _, query = url.partition(":")[2].partition("?")
    if rest.startswith("//"):
        # file:///abs/dir has an empty host and an absolute path; sqlite:///x.db is relative to
        # the current folder, sqlite:////x.db absolute, as in SQLAlchemy.
        rest = rest[2:]
        if url.lower().startswith("sqlite:"):
            if not rest.startswith("/"):
                raise SettingsError(
                    f"storage URL {mask_url(url)}: write sqlite:///file.db or sqlite:////abs.db"
                )
            rest = rest[1:]
        elif rest and not rest.startswith("/"):
            raise SettingsError(
                f"storage URL {mask_url(url)}: write file:folder for a relative path, or file:///folder"
            )
    return unquote(rest), _parse_options(url, query)


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
    unknown = options.keys() - _SETTINGS
    if unknown:
        raise SettingsError(
            f"storage URL {mask_url(url)}: unknown option {sorted(unknown)[0]!r}; "
            "known: durability, lease, max_pending, result_ttl"
        )
    return settings.overridden(f"storage URL {mask_url(url)}", options) if options else settings


def _memory(request: _Request) -> BaseStorage:
    from omniq.storage.memory import MemoryStorage

    if request.location:
        raise SettingsError("a memory:// URL has no path; each memory:// is a separate store")
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
    if not request.location.strip("/"):
        raise SettingsError(f"the storage URL names no path: write {example}")
    return Path(request.location)


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Raise `SettingsError` with the extra to install when a driver is missing."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(
            f"this kind of storage is an extra: pip install 'omniq[{name}]'"
        ) from error


def _postgres(request: _Request) -> BaseStorage:
    with _extra("postgres"):
        from omniq.storage.postgres import PostgresStorage

    return PostgresStorage(
        request.location,
        schema=request.backend_options.get("schema", "omniq"),
        poll_only=_is_on(request, "poll_only"),
        pool_size=_number(request, "pool_size", 10),
        serializer=request.serializer,
        clock=request.clock,
        settings=request.settings,
        max_pending=request.max_pending,
    )


def _is_on(request: _Request, name: str) -> bool:
    text = request.backend_options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise SettingsError(f"storage URL: {name}={text}: expected true or false")
    return text == "true"


def _number(request: _Request, name: str, default: int) -> int:
    number = _take_int(request.location, request.backend_options, name)
    return default if number is None else number


def _redis(request: _Request) -> BaseStorage:
    with _extra("redis"):
        from omniq.storage.redis import RedisStorage

    return RedisStorage(
        request.location,
        prefix=request.backend_options.get("prefix", "omniq"),
        serializer=request.serializer,
        clock=request.clock,
        settings=request.settings,
        max_pending=request.max_pending,
    )


_OPENERS: dict[str, Callable[[_Request], BaseStorage]] = {
    "memory": _memory,
    "file": _file,
    "sqlite": _sqlite,
}

# Each with the options that only this kind of storage has.
_SERVERS: dict[str, tuple[Callable[[_Request], BaseStorage], frozenset[str]]] = {
    "postgresql": (_postgres, frozenset({"schema", "poll_only", "pool_size"})),
    "postgres": (_postgres, frozenset({"schema", "poll_only", "pool_size"})),
    "redis": (_redis, frozenset({"prefix"})),
    "rediss": (_redis, frozenset({"prefix"})),
    "valkey": (_redis, frozenset({"prefix"})),
    "valkeys": (_redis, frozenset({"prefix"})),
}
