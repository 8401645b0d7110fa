"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="URL of the storage, such as sqlite:///tasks.db; default: OMNIQ_URL, then omniq.toml "
        "or pyproject.toml, then .omniq/omniq.db in the project's folder.",
        show_default=False,
    ),
]

Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON: one document, or one line for each item."),
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

Limit = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of items.")
]
