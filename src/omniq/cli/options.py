"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from omniq.cli.command import Option

Url = Annotated[
    str | None,
    Option(
        "--url",
        help="URL of the storage, such as sqlite:///tasks.db; default: OMNIQ_URL, then omniq.toml "
        "or pyproject.toml, then .omniq/omniq.db in the project's folder.",
    ),
]

Json = Annotated[
    bool, Option("--json", help="Print JSON: one document, or one line for each item.")
]

Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]

PauseReason = Annotated[
    str, Option("--reason", metavar="TEXT", help="Why, for those who see the pause.")
]

PauseSpan = Annotated[
    str | None,
    Option("--for", metavar="SPAN", help="End the pause after this time, such as 2h."),
]

Limit = Annotated[
    int,
    Option("--limit", "-n", metavar="N", min=1, max=10_000, help="Maximum number of items."),
]

Queue = Annotated[str | None, Option("--queue", "-q", help="Only of this queue.", complete="queue")]

Func = Annotated[
    str | None,
    Option("--func", "-f", help="Only of this function: module.function.", complete="function"),
]

Type = Annotated[
    str | None,
    Option(
        "--type",
        "-t",
        help="Only with this task type. Without one, a task has the path of its function.",
    ),
]
