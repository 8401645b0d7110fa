"""`omniq schema`: the tables of a PostgreSQL storage, and restored storages of any kind."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

import typer

from omniq.cli.options import Url
from omniq.errors import SettingsError
from omniq.masking import mask_url
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.urls import storage_url

app = typer.Typer(
    name="schema",
    help="Create and upgrade the tables of a PostgreSQL storage; report a restored storage.",
)


@runtime_checkable
class HasSchema(Protocol):
    """A storage whose tables are created by migrations. It need not be open."""

    def schema_sql(self) -> str:
        """The SQL that sets up an empty database."""

    async def check_schema(self) -> int:
        """The version of the schema; raises if this omniq cannot use it."""

    async def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade to the newest version; return the versions before and after."""


@app.command()
def install(url: Url = None) -> None:
    """Create the tables in a database; does nothing if they exist."""
    _print_upgrade(*asyncio.run(_storage(url).upgrade_schema()))


@app.command()
def upgrade(url: Url = None) -> None:
    """Upgrade the tables to the version that this omniq needs. Safe to run concurrently."""
    _print_upgrade(*asyncio.run(_storage(url).upgrade_schema()))


@app.command()
def check(url: Url = None) -> None:
    """Print the version of the tables; exits with 1 if this omniq cannot use them."""
    typer.echo(f"version {asyncio.run(_storage(url).check_schema())}")


@app.command()
def sql(url: Url = None) -> None:
    """Print the SQL that sets up an empty database, to review or run manually."""
    typer.echo(_storage(url).schema_sql(), nl=False)


@app.command()
def restored(url: Url = None) -> None:
    """Report that any storage was restored from a backup. Run it before the first worker starts.

    Fencing tokens continue above all that were given before, also those that the backup does not know.
    Tasks that were running in the backup wait again, charged nothing; a task that may run only once
    becomes a dead letter, because it may have run.
    """
    epoch = asyncio.run(_mark_restored(Settings.load(url=url)))
    typer.echo(f"the storage is now in epoch {epoch}")


async def _mark_restored(settings: Settings) -> int:
    async with open_storage(settings=settings) as storage:
        return await storage.mark_restored()


def _print_upgrade(before: int, after: int) -> None:
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
