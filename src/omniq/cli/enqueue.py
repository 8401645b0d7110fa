"""`omniq enqueue`: store a call for a worker to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

from omniq.cli import output
from omniq.cli.command import Argument, Option
from omniq.cli.options import Json, Url
from omniq.cli.parsing import (
    parse_duration,
    parse_instant,
    parse_json_value,
    parse_pairs,
    parse_retry,
)
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.errors import ForbiddenFunction, FunctionNotFound, InvalidTask, SettingsError
from omniq.models import OnConflict, TaskResult, TaskStatus, check_func_path
from omniq.operations.formatting import as_argument
from omniq.queue.async_queue import AsyncTaskQueue, EnqueueOptions
from omniq.scheduling.schedules import check_call
from omniq.settings import Settings
from omniq.tasks.function_lookup import MARKED
from omniq.tasks.functions import resolve, why_not_elsewhere
from omniq.tasks.options import SequenceOnFailure, option_help
from omniq.tasks.passed_functions import PASSED
from omniq.worker.import_path import use_current_folder
from omniq.worker.process.module_import import import_with_tasks


def enqueue(
    func: Annotated[str, Argument(metavar="FUNC", help="Path of the function: module.function.")],
    args: Annotated[
        list[str] | None,
        Argument(metavar="ARGS", help="""Its arguments as JSON: 1 true '"text"'."""),
    ] = None,
    kwargs: Annotated[
        list[str] | None,
        Option("--kwargs", "-k", metavar="NAME=JSON", help="A keyword argument; repeatable."),
    ] = None,
    url: Url = None,
    queue: Annotated[
        str | None, Option("--queue", "-q", help=option_help("queue"), complete="queue")
    ] = None,
    priority: Annotated[
        int | None, Option("--priority", "-p", help=option_help("priority"))
    ] = None,
    delay: Annotated[
        str | None, Option("--delay", metavar="SPAN", help=option_help("delay"))
    ] = None,
    eta: Annotated[str | None, Option("--eta", metavar="WHEN", help=option_help("eta"))] = None,
    interval: Annotated[
        str | None, Option("--interval", metavar="SPAN", help=option_help("interval"))
    ] = None,
    cron: Annotated[str | None, Option("--cron", metavar="EXPR", help=option_help("cron"))] = None,
    tz: Annotated[str | None, Option("--tz", help=option_help("tz"))] = None,
    reschedule_on_failure: Annotated[
        bool, Option("--reschedule-on-failure", help=option_help("reschedule_on_failure"))
    ] = False,
    max_retries: Annotated[
        int | None, Option("--max-retries", help=option_help("max_retries"))
    ] = None,
    retry: Annotated[
        str | None, Option("--retry", metavar="SPANS", help=option_help("retry"))
    ] = None,
    timeout: Annotated[
        str | None, Option("--timeout", metavar="SPAN", help=option_help("timeout"))
    ] = None,
    expires: Annotated[
        str | None, Option("--expires", metavar="SPAN", help=option_help("expires"))
    ] = None,
    unique: Annotated[
        str | None, Option("--unique", metavar="KEY", help=option_help("unique"))
    ] = None,
    on_conflict: Annotated[
        str | None,
        Option("--on-conflict", metavar="keep|replace|extend", help=option_help("on_conflict")),
    ] = None,
    max_wait: Annotated[
        str | None, Option("--max-wait", metavar="SPAN", help=option_help("max_wait"))
    ] = None,
    unique_for: Annotated[
        str | None, Option("--unique-for", metavar="SPAN", help=option_help("unique_for"))
    ] = None,
    sequence: Annotated[
        str | None, Option("--sequence", metavar="KEY", help=option_help("sequence"))
    ] = None,
    sequence_on_failure: Annotated[
        str | None,
        Option(
            "--sequence-on-failure",
            metavar="continue|halt",
            help=option_help("sequence_on_failure"),
        ),
    ] = None,
    fair_key: Annotated[
        str | None, Option("--fair-key", metavar="KEY", help=option_help("fair_key"))
    ] = None,
    fair_weight: Annotated[
        float | None, Option("--fair-weight", metavar="N", help=option_help("fair_weight"))
    ] = None,
    ageing: Annotated[
        str | None, Option("--ageing", metavar="SPAN", help=option_help("ageing"))
    ] = None,
    task_id: Annotated[str | None, Option("--id", help=option_help("task_id"))] = None,
    task_type: Annotated[
        str | None, Option("--task-type", metavar="TYPE", help=option_help("task_type"))
    ] = None,
    version: Annotated[
        int | None, Option("--arguments-version", metavar="N", help=option_help("version"))
    ] = None,
    metadata: Annotated[
        list[str] | None,
        Option(
            "--metadata", "-m", metavar="NAME=JSON", help=option_help("metadata") + " Repeatable."
        ),
    ] = None,
    wait: Annotated[
        str | None,
        Option("--wait", metavar="SPAN", help="Wait this long for the result, and print it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Enqueue a call of a function and print the task's id.

    The function's module need not be importable here. If it is, the options of its `@task` apply, and
    a missing function, or an argument that it does not accept, is refused.
    """
    values = [parse_json_value("argument", text) for text in args or ()]
    named = parse_pairs("--kwargs", kwargs or ())
    options: EnqueueOptions = {
        "queue": queue,
        "priority": priority,
        "delay": parse_duration("--delay", delay),
        "eta": parse_instant("--eta", eta),
        "interval": parse_duration("--interval", interval),
        "cron": cron,
        "tz": tz,
        "reschedule_on_failure": reschedule_on_failure or None,
        "max_retries": max_retries,
        "retry": parse_retry("--retry", retry),
        "expires": parse_duration("--expires", expires),
        "unique": unique,
        "on_conflict": cast(OnConflict | None, on_conflict),
        "max_wait": parse_duration("--max-wait", max_wait),
        "unique_for": parse_duration("--unique-for", unique_for),
        "sequence": sequence,
        "sequence_on_failure": cast(SequenceOnFailure | None, sequence_on_failure),
        "fair_key": fair_key,
        "fair_weight": fair_weight,
        "ageing": parse_duration("--ageing", ageing),
        "task_id": task_id,
        "task_type": task_type,
        "version": version,
        "metadata": parse_pairs("--metadata", metadata or ()) or None,
    }
    if timeout is not None:
        # A timeout that is not given is the default, and not the same as none.
        is_none = timeout.strip().lower() == "none"
        options["timeout"] = None if is_none else parse_duration("--timeout", timeout)
    wait_seconds = parse_duration("--wait", wait)
    function = function_at(func)
    check_call(function, values, named)

    async def work(task_queue: AsyncTaskQueue) -> None:
        handle = await task_queue.options(**options).enqueue(function, *values, **named)
        if wait_seconds is None:
            output.print_json({"id": handle.id}) if as_json else output.print_line(handle.id)
            return
        if not as_json:
            output.print_note(handle.id)
        show_result(
            handle.id, await task_queue.get_result(handle.id, wait_seconds), wait_seconds, as_json
        )

    with_queue(url, work, creates=True)


def function_at(path: str) -> Callable[..., Any] | str:
    """Return the function if its module is importable here, else its path.

    With the function, the options of its `@task` are known.
    """
    check_func_path(path)
    use_current_folder([path])
    try:
        function = resolve(path)
        if warning := why_not_elsewhere(function, path):
            output.print_note(warning)
            PASSED.add(path)
        return function
    except FunctionNotFound as error:
        if (named := _named_function(path)) is not None:
            return named
        if isinstance(error, ForbiddenFunction):
            raise InvalidTask(str(error)) from error
        if isinstance(error.__cause__, AttributeError) and str(error).endswith(
            str(error.__cause__)
        ):
            # The module is importable here and does not have the function.
            raise InvalidTask(str(error)) from error
        why = "its module is not here" if error.elsewhere else str(error)
        output.print_note(f"{path}: {why}; enqueued unchecked, without the options of its @task")
        return path


def _named_function(name: str) -> Callable[..., Any] | None:
    """The function of that name in the modules that the settings name, for a name of `@task(name=…)`."""
    settings = Settings.load()
    if not settings.modules:
        return None
    use_current_folder(settings.modules, settings.modules_folder())
    for module in settings.modules:
        try:
            import_with_tasks(module)
        except SettingsError as error:
            # The function may be in another module, and this machine need not have any.
            output.print_note(str(error))
    paths = MARKED.paths_of(name)
    return resolve(paths[0]) if paths else None


def show_result(
    task_id: str, result: TaskResult | None, wait_seconds: float, as_json: bool
) -> None:
    """Print the result of a task; fails unless the task succeeded."""
    if result is None:
        raise CommandFailed(
            f"task {task_id} did not end within {wait_seconds:g} s; see omniq explain {as_argument(task_id)}"
        )
    if as_json:
        output.print_json(result)
    elif result.status is TaskStatus.SUCCESS:
        output.show(output.value_text(result.result))
    if result.status is not TaskStatus.SUCCESS:
        error = result.error
        why = result.reason or "" if error is None else f"{error.error_type}: {error.message}"
        raise CommandFailed(f"task {task_id} {result.status}: {why}")
