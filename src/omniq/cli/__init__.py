"""The command line: `omniq`, and `python -m omniq`.

This is the edge of the process. Whatever goes wrong is one line on stderr and an exit code: 0 done,
1 it could not be done, 2 it was asked for wrongly, 3 what was named is not there, 130 interrupted.
`--debug`, anywhere on the line, shows the traceback as well.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from omniq.errors import OmniqError
from omniq.worker.process import console

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, given = _take_debug(given)
    console.tolerate_any_text()
    try:
        code = _run(given, is_own_process=arguments is None)
    except OmniqError as error:
        code = console.complain(error)
        # A command that knows better has put its own code on the error.
        code = getattr(error, "code", code)
        if debug:
            console.write(traceback.format_exc())
    except KeyboardInterrupt:
        code = _INTERRUPTED
    console.flush()
    sys.exit(code)


def _run(arguments: list[str], *, is_own_process: bool) -> int:
    # Here and not above: Ctrl-C while this is being imported is no reason for a traceback.
    from omniq.cli import worker_exec

    given = worker_exec.received_command() if is_own_process else None
    if given is not None:
        given.run()
    answer = _understand(arguments)
    if isinstance(answer, worker_exec.WorkerCommand):
        if is_own_process:
            worker_exec.exec_worker(answer)
        answer.run()
    return answer if isinstance(answer, int) else 0


def _understand(arguments: list[str]) -> object:
    """Do what the command says; an exit code, or what a worker is to do."""
    from omniq.cli.app import app, usage_message

    try:
        return app(arguments, prog_name="omniq", standalone_mode=False)
    except Exception as error:
        message = usage_message(error)
        if message is None:
            raise
        if message:
            console.complain(message)
        return console.BAD_USAGE


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether --debug is there, and the rest. After `--` everything belongs to the command.

    >>> _take_debug(["worker", "tasks", "--debug"])
    (True, ['worker', 'tasks'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(ours) < end, ours + arguments[end:]
