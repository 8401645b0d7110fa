"""The SQL files of the PostgreSQL backend, with a store's own names filled in."""

from __future__ import annotations

from functools import cache
from importlib import resources

_FOLDER = resources.files("omniq.storage.postgres") / "sql"


@cache
def statement(schema: str, name: str) -> str:
    """The SQL of `sql/postgres/<name>.sql`, without the comments at its head."""
    text = _filled(_FOLDER.joinpath(f"{name}.sql").read_text(encoding="utf-8"), schema)
    lines = text.splitlines()
    while lines and lines[0].startswith("--"):
        del lines[0]
    return "\n".join(lines).strip()


@cache
def migrations() -> tuple[str, ...]:
    """The names of the migrations, in order: the first makes version 1."""
    names = (path.name for path in _FOLDER.iterdir() if path.name[:4].isdecimal())
    return tuple(sorted(name.removesuffix(".sql") for name in names))


def migration(schema: str, name: str) -> str:
    """The text of a migration."""
    return _filled(_FOLDER.joinpath(f"{name}.sql").read_text(encoding="utf-8"), schema)


def functions(schema: str) -> str:
    """All functions of the newest version; each replaces the one that was there."""
    folder = _FOLDER / "functions"
    files = sorted(folder.iterdir(), key=lambda path: path.name)
    return _filled("\n".join(path.read_text(encoding="utf-8") for path in files), schema)


def channel(schema: str) -> str:
    """The channel on which a store's storages are told things."""
    return f"omniq_{schema}"


def _filled(text: str, schema: str) -> str:
    return text.replace("{schema}", f'"{schema}"').replace("{channel}", channel(schema))


class Names:
    """SQL with the names of one store in it: `names("SELECT … FROM {schema}.live")`."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._known: dict[str, str] = {}

    def __call__(self, sql: str) -> str:
        known = self._known.get(sql)
        if known is None:
            known = self._known[sql] = _filled(sql, self._schema)
        return known

    def file(self, name: str) -> str:
        """The SQL of a file."""
        return statement(self._schema, name)
