"""The command line: `omniq`, and `python -m omniq`.

This is the edge of the process. An error is one line on stderr and an exit code: 0 done, 1 failed,
2 usage error, 3 not found, 130 interrupted. `--debug`, anywhere on the line, also shows the
traceback; `--config FILE`, also anywhere, names the settings file.

The commands, in the order of `app`, which registers them:

- `worker`: `omniq worker`; `worker_exec`: how it is executed
- `enqueue`: `omniq enqueue`
- `stats`: `omniq stats`, once or live
- `explain`: `omniq explain`
- `tasks`, `dead`, `queues`, `schedules`, `workers`, `breakers`: the command groups of these names
- `functions`, `flows`: `omniq functions`, `omniq flows`
- `limits`, `events`: `omniq limits`, `omniq events`
- `purge`: `omniq purge`
- `dashboard`: `omniq dashboard`
- `demo`: `omniq demo`; `demo_tasks`: the tasks that it runs
- `doctor`: `omniq doctor`
- `check`: `omniq check`
- `host`: `omniq host`, for stores on NATS
- `schema`: `omniq schema`

What they share:

- `command`: makes commands from functions; `help_page`: what `--help` prints; `completion`: what shells offer
- `queue_session`: opens the storage, runs the command, closes the storage
- `options`: options that several commands have
- `parsing`: durations, instants and JSON values as users type them
- `output`: what commands print: tables, JSON and confirmation questions
- `bulk`: changes of all tasks that match
- `task_page`, `task_output`: everything about one task, and what it has logged and streamed
- `live_view`: views that are refreshed; `keyboard`: the keys of a live view
- `text`, `tables`, `screen`: styled text, tables at any width, live views and progress bars
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from omniq.errors import OmniqError, SettingsError
from omniq.settings import CONFIG_VARIABLE
from omniq.worker.process import console

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Set by the script of a shell; see `completion`.
    if (shell := os.environ.get("_OMNIQ_COMPLETE")) is not None:
        _complete(given, shell)
    debug, given = _take_debug(given)
    console.escape_unencodable_output()
    if arguments is None:
        warnings.showwarning = console.show_warning
    try:
        config, given = _take_config(given)
        if config is not None:
            # Processes of a worker inherit it.
            os.environ[CONFIG_VARIABLE] = os.path.abspath(config)
        code = _run(given, is_own_process=arguments is None)
    except OmniqError as error:
        code = console.report_error(error)
        # A command may set a more specific exit code on its error.
        code = getattr(error, "code", code)
        if debug:
            console.write(traceback.format_exc())
    except BrokenPipeError:
        # The reader of the output has closed it, as in `omniq tasks list | head`.
        code = 0
    except OSError as error:
        code = console.report_error(_describe(error))
        if debug:
            console.write(traceback.format_exc())
    except KeyboardInterrupt:
        code = _INTERRUPTED
    console.flush()
    sys.exit(code)


def _run(arguments: list[str], *, is_own_process: bool) -> int:
    if is_own_process and arguments[:1] == ["worker"] and os.name == "posix":
        console.end_by_sigterm()
    # Imported here, so that Ctrl-C during the import shows no traceback.
    from omniq.cli.app import run

    returned = run(arguments)
    return returned if isinstance(returned, int) else 0


def _describe(error: OSError) -> str:
    """What the system has refused, where no part of omniq says more."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder no longer exists; change to another one"
    if error.filename is None:
        return f"{type(error).__name__}: {error}; --debug shows where"
    return f"{error.filename}: {error.strerror}; check the path and its permissions"


def _complete(words: list[str], shell: str) -> NoReturn:
    """Answer a shell that completes a command line. It shows no errors."""
    from omniq.cli.completion import print_candidates

    warnings.simplefilter("ignore")
    print_candidates(words, shell)
    console.flush()
    sys.exit(0)


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether --debug is given, and the other arguments. Arguments after `--` are left as they are.

    >>> _take_debug(["worker", "tasks", "--debug"])
    (True, ['worker', 'tasks'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(ours) < end, ours + arguments[end:]


def _take_config(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The file that --config names, and the other arguments; those after `--` are left as they are.

    >>> _take_config(["worker", "tasks", "--config", "prod.toml"])
    ('prod.toml', ['worker', 'tasks'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    config: str | None = None
    ours: list[str] = []
    given = iter(arguments[:end])
    for argument in given:
        name, equals, value = argument.partition("=")
        if name != "--config":
            ours.append(argument)
            continue
        config = value if equals else next(given, "")
        if not config:
            raise SettingsError("--config needs the name of a file")
    return config, ours + arguments[end:]
