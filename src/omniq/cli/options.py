"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Where the tasks live, such as sqlite:///tasks.db; else OMNIQ_URL, else what "
        "omniq.toml or pyproject.toml say, else .omniq/omniq.db task_queue.",
        show_default=False,
    ),
]

Json = Annotated[
    bool,
    typer.Option("--json", help="For programs: one JSON document, or one line for each item."),
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before doing it.")]

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")]
