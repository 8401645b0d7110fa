"""What commands show: tables and bars for people, JSON for programs, and questions.

Text from the storage reaches a terminal only as text: never as markup, colour or control sequence.
Nothing but JSON or what was asked for goes to stdout; bars and questions go to stderr. `rich` is
imported when something is shown, since most commands of a script show nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from omniq.cli.queue_session import CommandFailed
from omniq.models import TaskStatus
from omniq.operations.bulk_actions import BulkReport, OnProgress, no_progress
from omniq.operations.redaction import redacted
from omniq.to_json import plain
from omniq.worker.process import console
from omniq.worker.process.console import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

    Cell = str | int | Text

_WIDE = 10_000
_GAP = 2
_FEWEST_COLUMNS = 3
_NARROW_LAST = 20
_LONGEST_CELL = 120
_LONGEST_VALUE = 4_000
_MOST_REFUSALS = 10

# Raw in JSON, and obeyed by a terminal: DEL, C1 controls, direction marks, line separators.
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")

_COLOURS = {
    TaskStatus.PENDING: "yellow",
    TaskStatus.RUNNING: "cyan",
    TaskStatus.RETRYING: "magenta",
    TaskStatus.SUCCESS: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.CANCELLED: "dim",
}


def terminal(stream: TextIO | None = None) -> Console:
    """A console on stdout or another stream. Plain without a terminal or with NO_COLOR.

    In a pipe nothing is cut to a width: a program that reads a table gets all of it.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    is_tty = stream.isatty()
    return Console(
        file=stream,
        width=None if is_tty or os.environ.get("COLUMNS") else _WIDE,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def text(value: object, style: str = "") -> Text:
    """Text from the storage, on one line, as it is and no more."""
    from rich.text import Text

    shown = visible(str(value))
    if len(shown) > _LONGEST_CELL:
        shown = shown[: _LONGEST_CELL - 1] + "…"
    return Text(shown, style=style)


def line(words: str) -> Text:
    """Words that may come from the storage, on one line of any length."""
    from rich.text import Text

    return Text(visible(words))


def status_text(status: TaskStatus) -> Text:
    return text(status.value, _COLOURS[status])


class Listing:
    """Rows under named columns, the more important ones first.

    On a narrow screen the last columns are left out; where not even three have room, rows stand
    one below the other with all they have. The first column names the row and is never cut; one
    called `>name` is flush right.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        from rich.text import Text

        self._columns = columns
        self._rows = [
            [cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows
        ]

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._columns), 0, -1):
            if self._needed(count) <= options.max_width:
                break
        if count >= min(_FEWEST_COLUMNS, len(self._columns)):
            yield self._table(count)
        else:
            yield from self._stacked()

    def _needed(self, count: int) -> int:
        """How wide the first columns are, the last of them at its narrowest."""
        widths = [
            max([len(name.lstrip(">")), *(row[number].cell_len for row in self._rows)])
            for number, name in enumerate(self._columns[:count])
        ]
        return sum(widths[:-1]) + min(widths[-1], _NARROW_LAST) + _GAP * (count - 1)

    def _table(self, count: int) -> RenderableType:
        from rich.table import Table

        made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for number, column in enumerate(self._columns[:count]):
            made.add_column(
                column.removeprefix(">"),
                justify="right" if column.startswith(">") else "left",
                no_wrap=number < count - 1,
                overflow="fold",
            )
        for row in self._rows:
            made.add_row(*row[:count])
        return made

    def _stacked(self) -> Iterator[Text]:
        from rich.text import Text

        for first, *rest in self._rows:
            yield Text.assemble(first, style="bold", overflow="fold")
            for column, cell in zip(self._columns[1:], rest, strict=True):
                if cell.plain:
                    yield Text.assemble(f"  {column.lstrip('>')} ", cell, overflow="fold")


def key_values(pairs: Sequence[tuple[str, Cell]]) -> RenderableType:
    """Names and values, one pair a line; those without a value are left out."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in pairs:
        cell = value if isinstance(value, Text) else text(value)
        if cell.plain:
            made.add_row(name, cell)
    return made


def block(words: str) -> Text:
    """Several lines from the storage, such as a traceback, as they are and no more."""
    from rich.text import Text

    return Text(visible(words, keep="\n\t").rstrip("\n"))


def value_text(value: Any) -> Text:
    """A value as JSON, as it was passed but for what looks like a secret, bounded."""
    from rich.text import Text

    shown = visible(json.dumps(plain(redacted(value)), ensure_ascii=False))
    if len(shown) > _LONGEST_VALUE:
        shown = f"{shown[:_LONGEST_VALUE]}… ({len(shown):,} characters; --json has all)"
    return Text(shown)


def print_rich(*things: RenderableType) -> None:
    """Print for people, on stdout."""
    screen = terminal()
    for thing in things:
        screen.print(thing)


def print_line(words: str) -> None:
    """One line for people, on stdout."""
    sys.stdout.write(visible(words) + "\n")


def print_note(words: str) -> None:
    """One line beside the output, on stderr."""
    console.write(visible(words) + "\n")


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """Print for programs: one JSON document on one line."""
    line = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    (stream or sys.stdout).write(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """A progress bar on stderr, which is there only while a terminal is."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=terminal(sys.stderr), transient=True
    ) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def confirm(question: str, yes: bool) -> None:
    """Go on only if somebody agrees. Without anybody to ask, `--yes` must have been given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(f"{question} Say --yes to do it without being asked", console.BAD_USAGE)
    console.write(f"{visible(question)} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("nothing was done")


def print_report(done: BulkReport, what: str, as_json: bool) -> None:
    """Say what became of a bulk action; fails when something was refused."""
    if as_json:
        print_json({"done": done.done, "refused": done.refused})
    else:
        print_line(f"{what}: {done.done:,}")
        for task_id, why in list(done.refused.items())[:_MOST_REFUSALS]:
            print_note(f"  {task_id}: {why}")
    if done.refused:
        count = len(done.refused)
        raise CommandFailed(f"{count:,} of {done.done + count:,} could not be done")
