"""One schema of the test server for many tests: created once, emptied between the tests."""

from __future__ import annotations

from uuid import uuid4

import psycopg

from omniq.storage.postgres import PostgresStorage, migrations

_WIPE = (
    "DELETE FROM {0}.live; DELETE FROM {0}.finished; DELETE FROM {0}.dead; "
    "DELETE FROM {0}.leases; DELETE FROM {0}.documents WHERE kind <> 'store'; "
    "UPDATE {0}.documents SET due = 0, data = '\\x{1}' WHERE kind = 'store' AND data <> '\\x{1}'"
)


class Schema:
    """A store's schema on a server."""

    def __init__(self, server_url: str) -> None:
        self.url = server_url
        self.name = f"t_{uuid4().hex[:16]}"
        self._connection = psycopg.connect(server_url, autocommit=True)
        self.execute(migrations.install_sql(self.name))
        self._record = self.value("SELECT encode(data, 'hex') FROM {schema}.documents")

    def new_storage(self, **options: object) -> PostgresStorage:
        """Return an unopened storage object on this schema."""
        return PostgresStorage(self.url, schema=self.name, **options)  # type: ignore[arg-type]

    def execute(self, sql: str) -> None:
        """Run SQL as the server's administrator."""
        self._connection.execute(sql.encode())

    def value(self, sql: str) -> object:
        """Return the first value of the query; {schema} is replaced by this schema's name."""
        row = self._connection.execute(sql.format(schema=f'"{self.name}"').encode()).fetchone()
        return None if row is None else row[0]

    def wipe(self) -> None:
        """Delete all rows. For the few rows of a test that is faster than truncating the tables."""
        self.execute(_WIPE.format(f'"{self.name}"', self._record))

    def drop(self) -> None:
        """Drop the schema."""
        self.execute(f'SET client_min_messages = warning; DROP SCHEMA "{self.name}" CASCADE')
        self._connection.close()
