"""Makes a storage object from a URL. A backend is imported only when a URL names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import SettingsError
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage, StorageOptions
from omniq.text.masking import mask_url

_KNOWN = (
    "memory://, file:folder, file:///absolute/folder, sqlite:///file.db, sqlite:////absolute.db, "
    "postgresql://host/database, redis://host/0, rediss://, valkey://, "
    "redis+sentinel://host1,host2/service, redis+cluster://host1,host2, nats://host/store, "
    "s3://bucket/prefix"
)
WORKER_URL = "worker:"
"""What OMNIQ_URL is in a child process that runs tasks, in place of a URL with a password.

Without it a queue would open the default storage, and its tasks would wait there for ever.
"""

_NO_FOLDER = re.compile(r"^file:(//)?(?=\?|$)", re.IGNORECASE)
_SETTINGS = frozenset({"durability", "lease", "max_pending", "result_ttl"})
"""The options that the URL of every kind of storage may have. They are settings too."""


def open_storage(
    url: str | None = None,
    *,
    settings: Settings | None = None,
    serializer: Serializer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> BaseStorage:
    """The storage that the URL names, not opened yet: use it as `async with open_storage(url)`.

    Without a URL: `OMNIQ_URL`, then the configuration files, then SQLite in `.omniq/omniq.db`.
    Options in the query string override the settings of the same name: `durability`, `max_pending`,
    `lease`, `result_ttl`, for PostgreSQL also `schema`, `poll_only`, `pool_size`, for Redis `prefix`. A
    server's URL may have others: those of its driver, and for S3 `endpoint` and `region`.
    """
    settings = settings or Settings.load()
    is_own = url is not None and url != settings.url
    is_url_given = is_own or settings.sources.get("url") == "argument"
    url = storage_url(settings, url)
    scheme = url.partition(":")[0].lower()
    if scheme not in _KINDS:
        raise SettingsError(f"storage URL {mask_url(url)}: {_unknown_kind(scheme, url)}")
    opener, own_names = _KINDS[scheme]
    location, options = _split(url) if own_names is None else _split_server(url, own_names)
    settings = _for_kind(url, settings, own_names or frozenset(), is_url_given=is_url_given)
    common: StorageOptions = {
        "serializer": serializer,
        "clock": clock,
        "settings": _with_options(url, settings, options, own_names or frozenset()),
    }
    return opener(location, common)


def storage_url(settings: Settings, url: str | None = None) -> str:
    """This URL, or that of the settings; without one, SQLite in `base_dir`. `file:` is `base_dir`."""
    if not isinstance(url, str | None):
        raise SettingsError(
            f"storage URL: expected text such as 'sqlite:///tasks.db', not {type(url).__name__}"
        )
    # What is read from a file, as a secret often is, ends with a line break.
    url = (
        url or settings.url or ""
    ).strip() or f"sqlite:///{quote(str(settings.base_dir))}/omniq.db"
    return _NO_FOLDER.sub(f"file:{quote(str(settings.base_dir))}", url)


def local_path(url: str) -> Path | None:
    """The file or folder that a URL names on this machine; None for memory and for servers."""
    if url.partition(":")[0].lower() not in ("file", "sqlite"):
        return None
    return Path(_split(url)[0])


def _unknown_kind(scheme: str, url: str) -> str:
    """Why there is no such storage. SQLAlchemy names a driver behind "+"."""
    if f"{scheme}:" == WORKER_URL:
        return (
            "a child process of a worker does not know its storage; enqueue with ctx.enqueue, or give "
            "the queue a URL"
        )
    kind = scheme.partition("+")[0]
    if kind in _KINDS:
        rest = mask_url(url).partition(":")[2]
        return f"omniq has its own driver; write {kind}:{rest}"
    return f"unknown kind {scheme!r}; known: {_KNOWN}"


def _split_server(url: str, own_names: frozenset[str]) -> tuple[str, dict[str, str]]:
    """The URL for the driver, and omniq's options."""
    omniq_names = _SETTINGS | own_names
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
    if url.lower().startswith("sqlite:") and rest.startswith("/"):
        # sqlite:///x.db is relative to the current folder, sqlite:////x.db absolute, as in SQLAlchemy.
        if not rest.startswith("///"):
            name = mask_url(url).partition(":")[2].partition("?")[0].lstrip("/")
            raise SettingsError(
                f"storage URL {mask_url(url)}: write sqlite:///{name} for a path that begins in the "
                f"current folder, or sqlite:////{name} for an absolute one"
            )
        rest = rest[3:]
    elif rest.startswith("//"):
        # file:///abs/dir has an empty host and an absolute path.
        rest = rest[2:]
        if rest and not rest.startswith("/"):
            raise SettingsError(
                f"storage URL {mask_url(url)}: write file:folder for a relative path, or file:///folder"
            )
    return unquote(rest), _parse_options(url, query)


def _for_kind(
    url: str, settings: Settings, own_names: frozenset[str], *, is_url_given: bool
) -> Settings:
    """The settings without those that only another kind of storage has. Raises `SettingsError` for one.

    A program that names its URL may have a second storage of another kind. What the environment and
    the files say is then for that one, and is ignored here.
    """
    sources = settings.sources
    others = [
        name
        for name in sorted(KIND_SETTINGS - own_names)
        if sources.get(name, "default") != "default"
    ]
    for name in others:
        if not is_url_given or sources[name] == "argument":
            kinds = [kind for kind, (_, names) in _KINDS.items() if names and name in names]
            raise SettingsError(
                f"{name}={getattr(settings, name)} ({sources[name]}): only {kinds[0]}:// has this "
                f"setting, and the storage is {mask_url(url)}; remove it, or set OMNIQ_URL to the "
                "storage you mean"
            )
    if not others:
        return settings
    defaults = Settings().shown()
    return settings.overridden("default", {name: defaults[name] for name in others})


def _with_options(
    url: str, settings: Settings, options: dict[str, str], own_names: frozenset[str]
) -> Settings:
    known = _SETTINGS | own_names
    unknown = options.keys() - known
    if unknown:
        raise SettingsError(
            f"storage URL {mask_url(url)}: unknown option {sorted(unknown)[0]!r}; "
            f"known: {', '.join(sorted(known))}"
        )
    return settings.overridden(f"storage URL {mask_url(url)}", options) if options else settings


def _memory(location: str, options: StorageOptions) -> BaseStorage:
    from omniq.storage.memory import MemoryStorage

    if location:
        raise SettingsError("a memory:// URL has no path; each memory:// is a separate store")
    return MemoryStorage(**options)


def _file(location: str, options: StorageOptions) -> BaseStorage:
    from omniq.storage.file import FileStorage

    return FileStorage(_path(location, "file:folder or file:///absolute/folder"), **options)


def _sqlite(location: str, options: StorageOptions) -> BaseStorage:
    from omniq.storage.sqlite import SQLiteStorage

    return SQLiteStorage(_path(location, "sqlite:///file.db or sqlite:////absolute.db"), **options)


def _path(location: str, example: str) -> Path:
    if not location.strip("/"):
        raise SettingsError(f"the storage URL names no path: write {example}")
    return Path(location)


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Raise `SettingsError` with the extra to install when a driver is missing."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(
            f"this kind of storage is an extra: pip install 'omniq[{name}]'"
        ) from error


def _postgres(url: str, options: StorageOptions) -> BaseStorage:
    with _extra("postgres"):
        from omniq.storage.postgres import PostgresStorage

    return PostgresStorage(url, **options)


def _redis(url: str, options: StorageOptions) -> BaseStorage:
    with _extra("redis"):
        from omniq.storage.redis import RedisStorage

    return RedisStorage(url, **options)


def _nats(url: str, options: StorageOptions) -> BaseStorage:
    with _extra("nats"):
        from omniq.storage.nats import NatsStorage

    return NatsStorage(url, **options)


def _s3(url: str, options: StorageOptions) -> BaseStorage:
    with _extra("s3"):
        from omniq.storage.s3 import S3Storage

    return S3Storage(url, **options)


_Opener = Callable[[str, StorageOptions], BaseStorage]
"""Makes a storage from a path on this machine or a URL for the driver, and its options."""

_POSTGRES = (_postgres, frozenset({"schema", "poll_only", "pool_size"}))
_REDIS = (_redis, frozenset({"prefix"}))
_KINDS: dict[str, tuple[_Opener, frozenset[str] | None]] = {
    "memory": (_memory, None),
    "file": (_file, None),
    "sqlite": (_sqlite, None),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "redis": _REDIS,
    "rediss": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    **{
        f"{scheme}+{kind}": _REDIS
        for scheme in ("redis", "rediss", "valkey", "valkeys")
        for kind in ("sentinel", "cluster")
    },
    "nats": (_nats, frozenset()),
    "s3": (_s3, frozenset()),
}
"""Each scheme with the options that only its kind of storage has; None where the URL is a path."""

KIND_SETTINGS = frozenset(name for _, names in _KINDS.values() for name in names or ())
"""The settings that only some kinds of storages have."""
