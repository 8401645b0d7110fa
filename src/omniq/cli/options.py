"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Where the tasks live, such as sqlite:///tasks.db; else OMNIQ_URL, else what "
        "omniq.toml or pyproject.toml say, else .omniq/omniq.db here.",
        show_default=False,
    ),
]
