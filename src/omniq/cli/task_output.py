"""`omniq tasks output`: what a task has logged and streamed, and what it goes on to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Option
from omniq.cli.keyboard import quit_key
from omniq.cli.options import Json, Url
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.errors import StorageError
from omniq.operations.find_tasks import full_id
from omniq.operations.output_stream import OutputStream
from omniq.operations.output_view import OutputPart, newest_output, parts_of
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.tasks.task_output import OutputChunk
from omniq.text.escaping import visible
from omniq.worker.process import console

_COLOURS = {"debug": "dim", "info": "", "warning": "yellow", "error": "red"}
_PAUSE = 1.0


def task_output(
    task_id: Annotated[
        str, Argument(metavar="ID", help="Id of the task, or its beginning.", complete="task")
    ],
    url: Url = None,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Go on with what comes, until the task ends.")
    ] = False,
    tail: Annotated[
        int,
        Option(
            "--tail", "-n", min=1, metavar="N", help="Begin with the newest N lines and chunks."
        ),
    ] = 1_000,
    as_json: Json = False,
) -> None:
    """Print what a task has logged and streamed, of all its runs. Ends with q or Ctrl-C while it follows."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        found = await full_id(storage, task_id)
        if await storage.read_output(found, tail=1) is None:
            raise CommandFailed(f"task {found}: no such task on record", console.NOT_FOUND)
        printer = _Printer(as_json)
        if follow:
            stream = OutputStream(storage, found, logs=True, all_runs=True, tail=tail)
            await _follow(task_queue, stream, printer)
        else:
            chunks = await newest_output(storage, found, tail)
            printer.print(chunks)
            if not chunks and not as_json:
                output.print_note("no output")
        printer.end()

    with_queue(url, work)


async def _follow(task_queue: AsyncTaskQueue, stream: OutputStream, printer: _Printer) -> None:
    with quit_key() as pressed:
        while not pressed.done():
            turn = asyncio.ensure_future(stream.next())
            await asyncio.wait((turn, pressed), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                turn.cancel()
                return
            try:
                chunks = turn.result()
            except StorageError as error:
                # The stream survives a restart of the server.
                output.print_note(f"the storage does not answer, trying again: {error}")
                await task_queue.storage.clock.wait(pressed, _PAUSE)
                continue
            if chunks is None:
                return
            printer.print(chunks)
            sys.stdout.flush()


class _Printer:
    """Prints chunks as they come. Text is not ended by a line: more of it may follow."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._is_in_line = False

    def print(self, chunks: Sequence[OutputChunk]) -> None:
        if self._as_json:
            for chunk in chunks:
                output.print_json(chunk)
            return
        for part in parts_of(chunks):
            if part.kind == "text":
                text = visible(part.text, keep="\n\t")
                sys.stdout.write(text)
                self._is_in_line = not text.endswith("\n")
            else:
                self.end()
                output.show(shown_part(part))

    def end(self) -> None:
        """End the line."""
        if self._is_in_line:
            sys.stdout.write("\n")
            self._is_in_line = False


def shown_part(part: OutputPart) -> output.Renderable:
    """A part of the output, with line ends in text and none elsewhere."""
    match part.kind:
        case "text":
            return output.block(part.text)
        case "line":
            level = output.text(f"{part.level:<7} ", _COLOURS[part.level or "info"])
            return output.Text.of(f"{part.at:%H:%M:%SZ} ", level, output.line(part.text))
        case "run" | "missed":
            return output.text(f"-- {part.text}", "dim")
        case "value":
            return output.line(part.text)
