"""Command groups whose name alone lists what the group is about: `omniq tasks` is `omniq tasks list`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class _ListGroup(TyperGroup):
    """Runs the command `list` when the arguments name no command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-")
        if not args or (is_option and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def list_group(name: str, help: str) -> typer.Typer:
    """A group of commands of which one is `list`; options without a command are those of `list`."""
    return typer.Typer(name=name, help=help, cls=_ListGroup)
