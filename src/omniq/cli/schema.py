"""`omniq schema`: the tables of a PostgreSQL storage; older and restored storages of any kind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Protocol, runtime_checkable

from omniq.cli import output
from omniq.cli.command import Group, Option
from omniq.cli.options import Json, Url, Yes
from omniq.cli.parsing import count_of, relative_time
from omniq.cli.queue_session import CommandFailed, check_exists
from omniq.cli.schedules import timing
from omniq.errors import SettingsError
from omniq.models import Schedule
from omniq.operations.redaction import without_secrets
from omniq.settings import Settings
from omniq.signing import is_sealed
from omniq.storage import BaseStorage, open_storage
from omniq.storage.sealed_documents import OlderDocument
from omniq.storage.urls import storage_url
from omniq.text.masking import mask_url

app = Group(
    name="schema",
    help="Create and upgrade tables, sign what an older omniq has stored, report a restored storage.",
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
def install(url: Url = None, as_json: Json = False) -> None:
    """Create the tables in a database; does nothing if they exist.

    With `--json` it prints the version before, which is 0 without tables, and after.
    """
    before, after = asyncio.run(_storage(url).upgrade_schema())
    if as_json:
        output.print_json({"before": before, "after": after})
    else:
        _print_upgrade(before, after)


@app.command()
def upgrade(
    url: Url = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Upgrade a storage to what this omniq needs: its tables, and the seals of what an older omniq stored.

    Other storages than PostgreSQL upgrade themselves when they are opened, also by this command. With
    a key, it lists the schedules and checkpoints that an older omniq has stored, and signs them if
    you confirm: until then they wait. Safe to run concurrently.
    """
    settings = Settings.load(url=url)
    check_exists(storage_url(settings))
    storage = open_storage(settings=settings)
    if isinstance(storage, HasSchema):
        if dry_run:
            asyncio.run(storage.check_schema())
        else:
            _print_upgrade(*asyncio.run(storage.upgrade_schema()))
    asyncio.run(_seal_older(storage, dry_run=dry_run, yes=yes))


async def _seal_older(storage: BaseStorage, *, dry_run: bool, yes: bool) -> None:
    """Show what an older omniq has stored without a seal; seal it if the user confirms."""
    if not is_sealed(storage.serializer):
        output.print_line("no key is set: schedules and checkpoints are stored without a seal")
        return
    async with storage:
        older = await storage.older_documents()
        if not older:
            output.print_line("all schedules and checkpoints are sealed")
            return
        _show_older(older, storage.clock.now())
        trusted = [each for each in older if not each.problem]
        if dry_run or not trusted:
            return
        output.confirm(
            f"Sign {count_of(len(trusted), 'record')} that anyone with access to the storage may have "
            "changed?",
            yes,
        )
        sealed = [await storage.seal_older(each) for each in trusted]
    output.print_line(f"signed: {sum(sealed)}")
    if not all(sealed):
        raise CommandFailed("some were changed meanwhile, and are not signed; run it again")


def _show_older(older: Sequence[OlderDocument], now: datetime) -> None:
    """Print everything that a signature would make trusted; nothing is left out on a narrow screen."""
    for each in older:
        pairs: list[tuple[str, output.Cell]] = [
            (each.kind, output.line(each.id)),
            ("function", output.line(each.func_path)),
            ("refused", each.problem),
        ]
        if each.schedule is not None:
            pairs += _facts_of_schedule(each.schedule, now)
        if each.checkpoint is not None:
            done = ", ".join(each.checkpoint.done())
            pairs += [("done", output.line(done)), ("sleeps", ", ".join(each.checkpoint.sleeps))]
        output.show(output.key_values(pairs), "")


def _facts_of_schedule(schedule: Schedule, now: datetime) -> list[tuple[str, output.Cell]]:
    task = without_secrets(schedule.task)
    return [
        ("when", output.line(timing(schedule))),
        ("next", "paused" if schedule.paused else relative_time(schedule.next_at, now)),
        ("arguments", output.value_text(task.args) if task.args else ""),
        ("keywords", output.value_text(task.kwargs) if task.kwargs else ""),
        ("queue", task.queue),
        ("missed", schedule.missed),
        ("overlap", schedule.overlap),
    ]


@app.command()
def check(url: Url = None, as_json: Json = False) -> None:
    """Print the version of the tables; exits with 1 if this omniq cannot use them."""
    version = asyncio.run(_storage(url).check_schema())
    if as_json:
        output.print_json({"version": version})
    else:
        output.print_line(f"version {version}")


@app.command()
def sql(url: Url = None) -> None:
    """Print the SQL that sets up an empty database, to review or run manually."""
    sys.stdout.write(_storage(url).schema_sql())


@app.command()
def restored(url: Url = None, as_json: Json = False) -> None:
    """Report that any storage was restored from a backup. Run it before the first worker starts.

    Fencing tokens continue above all that were given before, also those that the backup does not know.
    Tasks that were running in the backup wait again, charged nothing; a task that may run only once
    becomes a dead letter, because it may have run.
    """
    epoch = asyncio.run(_mark_restored(Settings.load(url=url)))
    if as_json:
        output.print_json({"epoch": epoch})
    else:
        output.print_line(f"the storage is now in epoch {epoch}")


async def _mark_restored(settings: Settings) -> int:
    async with open_storage(settings=settings) as storage:
        return await storage.mark_restored()


def _print_upgrade(before: int, after: int) -> None:
    done = (
        "is at" if before == after else "set up at" if before == 0 else f"upgraded from {before} to"
    )
    output.print_line(f"{done} version {after}")


def _storage(url: str | None) -> HasSchema:
    settings = Settings.load(url=url)
    storage = open_storage(settings=settings)
    if not isinstance(storage, HasSchema):
        raise SettingsError(
            f"storage URL {mask_url(storage_url(settings))}: only postgresql:// has a schema; "
            "give its URL with --url"
        )
    return storage
