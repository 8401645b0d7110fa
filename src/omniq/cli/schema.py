"""`omniq schema`: the tables of a PostgreSQL store."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

import typer

from omniq.cli.options import Url
from omniq.errors import SettingsError
from omniq.settings import Settings, mask_url
from omniq.storage import open_storage
from omniq.storage.urls import storage_url

app = typer.Typer(name="schema", help="Set up a PostgreSQL database, and keep it up to date.")


@runtime_checkable
class HasSchema(Protocol):
    """A storage whose tables are made by migrations. Need not be open."""

    def schema_sql(self) -> str:
        """All SQL that sets up an empty database."""

    async def check_schema(self) -> int:
        """The version of the schema; raises when it is not the one that is needed."""

    async def upgrade_schema(self) -> tuple[int, int]:
        """Bring it to the newest version: the version before, and the one after."""


@app.command()
def install(url: Url = None) -> None:
    """Set up an empty database. Does nothing where that is done already."""
    _tell_upgrade(*asyncio.run(_storage(url).upgrade_schema()))


@app.command()
def upgrade(url: Url = None) -> None:
    """Bring the tables to the version that this omniq needs. Safe while others do the same."""
    _tell_upgrade(*asyncio.run(_storage(url).upgrade_schema()))


@app.command()
def check(url: Url = None) -> None:
    """Say which version the tables are at; exits with 1 when this omniq cannot use them."""
    typer.echo(f"version {asyncio.run(_storage(url).check_schema())}")


@app.command()
def sql(url: Url = None) -> None:
    """Print the SQL that sets up an empty database, to be read or run by hand."""
    typer.echo(_storage(url).schema_sql(), nl=False)


def _tell_upgrade(before: int, after: int) -> None:
    done = (
        "is at" if before == after else "set up at" if before == 0 else f"upgraded from {before} to"
    )
    typer.echo(f"{done} version {after}")


def _storage(url: str | None) -> HasSchema:
    settings = Settings.load(url=url)
    storage = open_storage(settings=settings)
    if not isinstance(storage, HasSchema):
        raise SettingsError(
            f"storage URL {mask_url(storage_url(settings))}: only postgresql:// has a schema; "
            "give its URL with --url"
        )
    return storage
