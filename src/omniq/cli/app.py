"""The table of commands. A command or a command group is one module and one line here.

A module is imported when its command is used: the start of `omniq enqueue` does not pay for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from omniq._version import __version__
from omniq.cli.command import Group, HelpRequested

# In the order in which a new user needs them.
_COMMANDS = {
    "worker": ("omniq.cli.worker:worker", "Run the tasks of these modules until stopped."),
    "enqueue": (
        "omniq.cli.enqueue:enqueue",
        "Enqueue a call of a function and print the task's id.",
    ),
    "stats": ("omniq.cli.stats:stats", "Show queues, rates, latencies, workers and failures."),
    "explain": (
        "omniq.cli.explain:explain",
        "Say why a task does not run, which worker runs it, or how it ended.",
    ),
    "tasks": ("omniq.cli.tasks:app", "List, show, run, change, cancel, delete and retry tasks."),
    "flows": (
        "omniq.cli.flows:app",
        "List, show, cancel and retry flows; send the events that tasks wait for.",
    ),
    "dead": (
        "omniq.cli.dead:app",
        "List dead letters: tasks that failed for good. Retry or delete them.",
    ),
    "queues": ("omniq.cli.queues:app", "List, pause, resume and purge queues."),
    "functions": (
        "omniq.cli.functions:app",
        "List the functions that are paused; pause and resume functions.",
    ),
    "schedules": ("omniq.cli.schedules:app", "List, add, pause and trigger schedules."),
    "workers": (
        "omniq.cli.workers:app",
        "List, pause, resume, stop and ping workers; list what they can run.",
    ),
    "breakers": (
        "omniq.cli.breakers:app",
        "List the circuit breakers that all workers share, and close them.",
    ),
    "limits": (
        "omniq.cli.limits:app",
        "List the limits that all workers share; change, reset, hold and release them.",
    ),
    "events": (
        "omniq.cli.events:events",
        "Print what happens to tasks, workers, queues and breakers, as it happens.",
    ),
    "check": (
        "omniq.cli.check:check",
        "Say before a deploy what is stored that the new code cannot run.",
    ),
    "purge": (
        "omniq.cli.purge:purge",
        "Delete finished tasks and their results. Waiting and running tasks are not affected.",
    ),
    "dashboard": (
        "omniq.cli.dashboard:dashboard",
        "Show the queue in a browser, where operators can also manage it.",
    ),
    "demo": (
        "omniq.cli.demo:demo",
        "Show omniq at work in less than a minute, without a server; one worker is killed.",
    ),
    "host": (
        "omniq.cli.host:host",
        "Run the calls of all processes of a nats:// store, and nothing else, until stopped.",
    ),
    "doctor": ("omniq.cli.doctor:doctor", "Check the storage and the settings."),
    "schema": (
        "omniq.cli.schema:app",
        "Create and upgrade tables, sign what an older omniq has stored, report a restored storage.",
    ),
    "completion": (
        "omniq.cli.completion:completion",
        "Print the script that completes commands, options and names in your shell.",
    ),
}

app = Group("omniq", "A task queue: run workers, inspect and manage tasks.", _COMMANDS)

_OPTIONS = (
    (
        "    --config FILE",
        "Settings file, instead of omniq.toml and pyproject.toml of the project; "
        "default: OMNIQ_CONFIG. Accepted anywhere on the line.",
    ),
    ("    --debug", "Show tracebacks; accepted anywhere on the line."),
    ("    --version", "Print the version and exit."),
)
"""Options of all commands; `main` has read --config and --debug before."""


def run(arguments: Sequence[str]) -> object:
    """Run the command that the arguments name; returns what it returns."""
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"omniq {__version__}\n")
        return 0
    try:
        return app.run(arguments, "omniq")
    except HelpRequested as asked:
        # Not needed by any command, nor by a worker, which runs for months.
        from omniq.cli.help_page import print_help

        print_help(asked.command, asked.path, _OPTIONS if asked.command is app else ())
        return asked.code
