"""Registers the commands. A command or a command group is one module and one line here."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq._version import __version__
from omniq.cli import (
    dashboard,
    dead,
    demo,
    doctor,
    enqueue,
    explain,
    purge,
    queues,
    schedules,
    schema,
    stats,
    tasks,
    worker,
)

app = typer.Typer(
    name="omniq",
    help="A task queue: run workers, inspect and manage tasks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"omniq {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Settings file, instead of omniq.toml and pyproject.toml of the project; "
            "default: OMNIQ_CONFIG. Accepted anywhere on the line.",
            show_default=False,
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; accepted anywhere on the line.")
    ] = False,
) -> None:
    """A task queue: run workers, inspect and manage tasks."""


# In the order in which a new user needs them.
app.command("worker")(worker.worker)
app.command("enqueue", context_settings={"ignore_unknown_options": True})(enqueue.enqueue)
app.command("stats")(stats.stats)
app.command("explain")(explain.explain)
for group in (tasks.app, dead.app, queues.app, schedules.app, queues.workers):
    app.add_typer(group)
app.command("breakers")(queues.breakers)
app.command("purge")(purge.purge)
app.command("dashboard")(dashboard.dashboard)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(schema.app, no_args_is_help=True)


def usage_message(error: Exception) -> str | None:
    """The usage error in one line; None for any other error.

    Empty when only the help was requested, and has been shown.
    """
    # Tested by its method, not by its class: some versions of typer contain a copy of click.
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    if not (message := str(describe()).rstrip(".")):
        return ""
    context = getattr(error, "ctx", None)
    command = "omniq" if context is None else context.command_path
    return f"{message}; see {command} --help"
