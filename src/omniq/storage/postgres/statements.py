"""Statements: reads the SQL files and fills in the names of a store's schema and channel."""

from __future__ import annotations

from functools import cache
from importlib import resources

_FOLDER = resources.files("omniq.storage.postgres") / "sql"


@cache
def statement(schema: str, name: str) -> str:
    """Return the SQL of `sql/<name>.sql`, without the comments at its beginning."""
    text = _filled(_FOLDER.joinpath(f"{name}.sql").read_text(encoding="utf-8"), schema)
    lines = text.splitlines()
    while lines and lines[0].startswith("--"):
        del lines[0]
    return "\n".join(lines).strip()


@cache
def migrations() -> tuple[str, ...]:
    """The names of the migrations, in order: the first one creates version 1."""
    names = (path.name for path in _FOLDER.iterdir() if path.name[:4].isdecimal())
    return tuple(sorted(name.removesuffix(".sql") for name in names))


def migration(schema: str, name: str) -> str:
    """The SQL of one migration."""
    return _filled(_FOLDER.joinpath(f"{name}.sql").read_text(encoding="utf-8"), schema)


def functions(schema: str) -> str:
    """The SQL that creates all functions of the newest version, or replaces the installed ones."""
    folder = _FOLDER / "functions"
    files = sorted(folder.iterdir(), key=lambda path: path.name)
    return _filled("\n".join(path.read_text(encoding="utf-8") for path in files), schema)


def channel(schema: str) -> str:
    """The notification channel that the storages of a store listen on."""
    return f"omniq_{schema}"


def _filled(text: str, schema: str) -> str:
    return text.replace("{schema}", f'"{schema}"').replace("{channel}", channel(schema))


class SchemaNames:
    """Fills one store's names into SQL: `names("SELECT … FROM {schema}.live")`."""

    def __init__(self, schema: str, *, is_pooled: bool = False) -> None:
        self._schema = schema
        self._is_pooled = is_pooled
        self._cache: dict[str, str] = {}

    def __call__(self, sql: str) -> str:
        filled = self._cache.get(sql)
        if filled is None:
            filled = self._cache[sql] = _filled(sql, self._schema)
        return filled

    def select(self, function: str, width: int, file: str = "", first: str = "text") -> str:
        """A statement that selects from a function with that many parameters; `first` is the first's type.

        With `file`, the statement in that file, with the other one in the place of {query}.
        """
        key = f"{function} {width}"
        filled = self._cache.get(key)
        if filled is None:
            call = f"SELECT * FROM {self._call(function, width, first)}"
            query = self.file(file) if file else "{query}"
            filled = self._cache[key] = _filled(query.replace("{query}", call), self._schema)
        return filled

    def _call(self, function: str, width: int, first: str) -> str:
        """The call of a function with that many parameters, to be used after FROM.

        Behind a pooler, which shares sessions, each call has to have its transaction use the indexes;
        `use_indexes` is called first, because the first parameter depends on it.
        """
        rest = "".join(f", ${number}" for number in range(2, width + 1))
        if not self._is_pooled:
            return f"{{schema}}.{function}($1{rest}) AS called"
        return (
            f"(SELECT called.* FROM {{schema}}.use_indexes() AS is_set, LATERAL "
            f"{{schema}}.{function}(CASE WHEN is_set THEN $1::{first} END{rest}) AS called) AS called"
        )

    def file(self, name: str) -> str:
        """The SQL of the file `sql/<name>.sql`."""
        return statement(self._schema, name)
