"""Output of the commands: tables for people, JSON for programs, confirmations.

Text from the storage reaches a terminal only as text, never as a control sequence. Only the requested
output goes to stdout; progress bars, questions and notes go to stderr.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, TextIO

from omniq.cli.queue_session import CommandFailed
from omniq.cli.screen import progress_bar, width_for
from omniq.cli.tables import Cell, Listing, Pairs, Renderable, lines_of, text
from omniq.cli.text import Text, has_colours
from omniq.models import TaskStatus
from omniq.operations.bulk_actions import BulkReport
from omniq.operations.redaction import redacted
from omniq.text.escaping import visible
from omniq.text.to_json import plain
from omniq.worker.process import console

__all__ = [
    "Cell",
    "Listing",
    "Renderable",
    "Text",
    "block",
    "confirm",
    "key_values",
    "line",
    "print_json",
    "print_line",
    "print_note",
    "print_pause",
    "print_report",
    "progress_bar",
    "show",
    "status_text",
    "text",
    "value_text",
]

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

key_values = Pairs


def line(content: str) -> Text:
    """Text that may come from the storage, on one line of any length."""
    return Text(visible(content))


def status_text(status: TaskStatus) -> Text:
    return text(status.value, _COLOURS[status])


def block(content: str) -> Text:
    """Several lines from the storage, such as a traceback."""
    return Text(visible(content, keep="\n\t").rstrip("\n").expandtabs())


def value_text(value: Any) -> Text:
    """A value as JSON, without what looks like a secret, cut to a maximum length."""
    shown = visible(json.dumps(plain(redacted(value)), ensure_ascii=False))
    if len(shown) > _MAX_VALUE:
        shown = f"{shown[:_MAX_VALUE]}… ({len(shown):,} characters; --json has all)"
    return Text(shown)


def show(*things: Renderable) -> None:
    """Print tables and text for people, on stdout."""
    stream = sys.stdout
    width, colours = width_for(stream), has_colours(stream)
    for thing in things:
        stream.write("".join(f"{each.rendered(colours)}\n" for each in lines_of(thing, width)))


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


def print_pause(kind: str, name: str, *, is_paused: bool, as_json: bool) -> None:
    """Print that a queue, a worker or a schedule is paused or resumed."""
    if as_json:
        print_json({kind: name, "paused": is_paused})
    else:
        print_line(f"{'paused' if is_paused else 'resumed'}: {name}")


def print_report(done: BulkReport, what: str, as_json: bool) -> None:
    """Print the report of a bulk action; raises `CommandFailed` if an item was refused."""
    if as_json:
        more = {"more_refused": done.more_refused} if done.more_refused else {}
        print_json({"done": done.done, "refused": done.refused, **more})
    else:
        print_line(f"{what}: {done.done:,}")
        for task_id, why in list(done.refused.items())[:_MAX_REFUSALS]:
            print_note(f"  {task_id}: {why}")
    if done.refused:
        count = done.refused_count
        raise CommandFailed(f"{count:,} of {done.done + count:,} could not be done")
