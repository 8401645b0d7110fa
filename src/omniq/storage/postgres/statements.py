"""Statements: reads the SQL files, fills in the name of a store's schema, and runs statements."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from typing import Any

Fetch = Callable[..., Awaitable[list[Any]]]
"""Runs a statement with its parameters, and returns all rows."""

SEARCH_PATH = "pg_catalog, pg_temp"
"""Where unqualified names are found: a function that another user has created in `public` must not be called."""

# Claims and writes must use the indexes, however small the tables were when a statement was planned: a queue
# can grow a thousandfold before the table is analyzed.
PLANNER_SETTINGS = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    # For each given task one lookup, also where a plan was made while the table was empty.
    "random_page_cost": "0.1",
}

_FOLDER = resources.files("omniq.storage.postgres") / "sql"
_PINNED = f"SET search_path = {SEARCH_PATH}"
_SETTINGS = " ".join(
    (_PINNED, *(f"SET {name} = {value}" for name, value in PLANNER_SETTINGS.items()))
)


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


def _filled(text: str, schema: str) -> str:
    for name, value in (
        ("{schema}", f'"{schema}"'),
        ("{settings}", _SETTINGS),
        ("{pinned}", _PINNED),
    ):
        text = text.replace(name, value)
    return text


@cache
def filled(schema: str, sql: str) -> str:
    """The SQL with the schema's name for {schema}."""
    return _filled(sql, schema)


@cache
def call_of(schema: str, function: str, width: int, file: str = "") -> str:
    """A statement that selects from a function with that many parameters.

    With `file`, the statement in that file, with the other one in the place of {query}.
    """
    parameters = ", ".join(f"${number}" for number in range(1, width + 1))
    call = _filled(f"SELECT * FROM {{schema}}.{function}({parameters})", schema)
    return statement(schema, file).replace("{query}", call) if file else call


class Statements:
    """Runs statements on one store.

    `fetch` may run one twice if its reply is lost. `fetch_once` raises `ReplyLost` then: it is not known whether
    the statement was run.
    """

    def __init__(self, schema: str, fetch: Fetch, fetch_once: Fetch) -> None:
        self.schema = schema
        self._fetch = fetch
        self._fetch_once = fetch_once

    def fetch(self, sql: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Run SQL with {schema} in it."""
        return self._fetch(filled(self.schema, sql), *parameters)

    def file(self, name: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Run the SQL of a file."""
        return self._fetch(statement(self.schema, name), *parameters)

    def call(self, function: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Call a function."""
        return self._fetch(call_of(self.schema, function, len(parameters)), *parameters)

    def call_once(self, function: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Call a function that must not run twice."""
        return self._fetch_once(call_of(self.schema, function, len(parameters)), *parameters)

    def with_gates(self, function: str, *parameters: Any) -> Awaitable[list[Any]]:
        """Call a function that returns tasks; the states of their gates follow."""
        sql = call_of(self.schema, function, len(parameters), "with_gates")
        return self._fetch(sql, *parameters)
