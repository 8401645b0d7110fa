"""Output of the commands: tables and progress bars for people, JSON for programs, confirmations.

Text from the storage reaches a terminal only as text: never as markup, colour or control sequence.
Only the requested output goes to stdout; progress bars and questions go to stderr. `rich` is
imported on first use, because most commands of a script do not need it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from omniq.cli.queue_session import CommandFailed
from omniq.escaping import visible
from omniq.models import TaskStatus
from omniq.operations.bulk_actions import BulkReport, OnProgress, no_progress
from omniq.operations.redaction import redacted
from omniq.to_json import plain
from omniq.worker.process import console

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

    Cell = str | int | Text

_PIPE_WIDTH = 10_000
_GAP = 2
_SHORT_ID = 12
_MIN_COLUMNS = 3
_MIN_LAST_WIDTH = 20
_MAX_CELL = 120
_MAX_VALUE = 4_000
_MAX_REFUSALS = 10

# Not escaped by JSON, but interpreted by a terminal: DEL, C1 controls, direction marks, line separators.
_CONTROL = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")

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

    In a pipe no line is cut: a program that reads a table gets all of it.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    is_tty = stream.isatty()
    return Console(
        file=stream,
        width=None if is_tty or os.environ.get("COLUMNS") else _PIPE_WIDTH,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def text(value: object, style: str = "") -> Text:
    """Text from the storage, on one line and cut to a maximum length, never as markup."""
    from rich.text import Text

    shown = visible(str(value))
    if len(shown) > _MAX_CELL:
        shown = shown[: _MAX_CELL - 1] + "…"
    return Text(shown, style=style)


def line(content: str) -> Text:
    """Text that may come from the storage, on one line of any length."""
    from rich.text import Text

    return Text(visible(content))


def status_text(status: TaskStatus) -> Text:
    return text(status.value, _COLOURS[status])


class Listing:
    """Rows under named columns, the more important ones first.

    A narrow screen omits the last columns; if not even three fit, each row is printed as a list of
    all its cells. The first column identifies the row. It is not cut, except for ids of tasks, which
    a narrow screen shows up to where they differ: commands accept the beginning of an id. A column
    called `>name` is aligned right.
    """

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, has_task_ids: bool = False
    ) -> None:
        from rich.text import Text

        self._columns = columns
        self._has_task_ids = has_task_ids
        self._rows = [
            [cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows
        ]

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        rows, width = self._rows, options.max_width
        if self._has_task_ids and self._fitting(rows, width) < len(self._columns):
            rows = self._with_short_ids()
        count = self._fitting(rows, width)
        if count >= min(_MIN_COLUMNS, len(self._columns)):
            yield self._table(rows, count)
        else:
            yield from self._stacked()

    def _with_short_ids(self) -> list[list[Text]]:
        ids = sorted({row[0].plain for row in self._rows})
        length = _SHORT_ID
        while any(one[: length - 1] == other[: length - 1] for one, other in pairwise(ids)):
            length += 1
        return [[first[:length], *rest] for first, *rest in self._rows]

    def _fitting(self, rows: list[list[Text]], width: int) -> int:
        """How many of the columns fit, at least one."""
        counts = range(len(self._columns), 1, -1)
        return next((count for count in counts if self._needed(rows, count) <= width), 1)

    def _needed(self, rows: list[list[Text]], count: int) -> int:
        """The width of the first `count` columns, the last of them at its narrowest."""
        widths = [
            max([len(name.lstrip(">")), *(row[number].cell_len for row in rows)])
            for number, name in enumerate(self._columns[:count])
        ]
        return sum(widths[:-1]) + min(widths[-1], _MIN_LAST_WIDTH) + _GAP * (count - 1)

    def _table(self, rows: list[list[Text]], count: int) -> RenderableType:
        from rich.table import Table

        made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for number, column in enumerate(self._columns[:count]):
            made.add_column(
                column.removeprefix(">"),
                justify="right" if column.startswith(">") else "left",
                no_wrap=number < count - 1,
                overflow="fold",
            )
        for row in rows:
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
    """Names and values, one pair per line; pairs without a value are omitted."""
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


def block(content: str) -> Text:
    """Several lines from the storage, such as a traceback, never as markup."""
    from rich.text import Text

    return Text(visible(content, keep="\n\t").rstrip("\n"))


def value_text(value: Any) -> Text:
    """A value as JSON, without what looks like a secret, cut to a maximum length."""
    from rich.text import Text

    shown = visible(json.dumps(plain(redacted(value)), ensure_ascii=False))
    if len(shown) > _MAX_VALUE:
        shown = f"{shown[:_MAX_VALUE]}… ({len(shown):,} characters; --json has all)"
    return Text(shown)


def print_rich(*things: RenderableType) -> None:
    """Print tables and text for people, on stdout."""
    screen = terminal()
    for thing in things:
        screen.print(thing)


def print_line(content: str) -> None:
    """Print one line for people, on stdout."""
    sys.stdout.write(visible(content) + "\n")


def print_note(content: str) -> None:
    """Print one line beside the output, on stderr."""
    console.write(visible(content) + "\n")


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """Print for programs: one JSON document on one line."""
    line = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    (stream or sys.stdout).write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """A progress bar on stderr, if that is a terminal."""
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
    """Raise `CommandFailed` unless the user confirms. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(
            f"{question} Add --yes to confirm without a terminal", console.BAD_USAGE
        )
    console.write(f"{visible(question)} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("nothing was done")


def print_report(done: BulkReport, what: str, as_json: bool) -> None:
    """Print the report of a bulk action; raises `CommandFailed` if an item was refused."""
    if as_json:
        print_json({"done": done.done, "refused": done.refused})
    else:
        print_line(f"{what}: {done.done:,}")
        for task_id, why in list(done.refused.items())[:_MAX_REFUSALS]:
            print_note(f"  {task_id}: {why}")
    if done.refused:
        count = len(done.refused)
        raise CommandFailed(f"{count:,} of {done.done + count:,} could not be done")
