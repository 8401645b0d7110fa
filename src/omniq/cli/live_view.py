"""Views that are refreshed until the user presses q or Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.keyboard import quit_key
from omniq.cli.screen import full_screen
from omniq.clock import Clock
from omniq.errors import StorageError

Watch = Annotated[
    bool, Option("--watch", "-w", help="Refresh until q or Ctrl-C; in a pipe, print once.")
]

Interval = Annotated[
    float,
    Option("--interval", "-i", min=0.1, metavar="S", help="Seconds between refreshes."),
]


async def live(
    clock: Clock, interval: float, page: Callable[[], Awaitable[Iterable[output.Renderable]]]
) -> None:
    """Show the page on the whole screen, made again and again."""
    with quit_key() as pressed, full_screen() as screen:
        while not pressed.done():
            try:
                shown = await page()
            except StorageError as error:
                # The view survives a restart of the server.
                shown = [output.block(f"the storage does not answer, trying again: {error}")]
            screen.update(shown)
            await clock.wait(pressed, interval)


async def stream(
    clock: Clock,
    interval: float,
    turn: Callable[[], Awaitable[None]],
    *,
    seconds: float | None = None,
) -> None:
    """Let `turn` print something, again and again, also in a pipe; `seconds`: no longer than that."""
    end = None if seconds is None else clock.monotonic() + seconds
    with quit_key() as pressed:
        while not pressed.done() and (end is None or clock.monotonic() < end):
            await turn()
            sys.stdout.flush()
            await clock.wait(pressed, interval)


def is_screen() -> bool:
    """Whether there is a screen for a live view."""
    return sys.stdout.isatty()
