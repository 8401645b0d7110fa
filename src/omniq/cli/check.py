"""`omniq check`: what is stored that the code here cannot run."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Option
from omniq.cli.options import Url
from omniq.cli.parsing import count_of
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.cli.schema import HasSchema
from omniq.errors import SettingsError, StorageRefused
from omniq.operations.check import CheckProblem, CheckReport
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.queue.deploy_check import check_deploy
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.worker.import_path import use_current_folder
from omniq.worker.process import console


def check(
    modules: Annotated[
        list[str] | None,
        Argument(
            metavar="MODULE",
            help="The modules that `omniq worker` is given. Default: the setting modules.",
        ),
    ] = None,
    url: Url = None,
    ignore_dead: Annotated[
        bool, Option("--ignore-dead", help="Leave dead letters out; nothing but a retry runs them.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Say before a deploy what is stored that the new code cannot run.

    Imports the modules as `omniq worker` does, and compares every waiting and running task, dead letter and
    schedule with their functions: whether the function is there, takes the arguments and their types, and has
    upcasters for their version. Runs no task and changes nothing. Exits with 1 if something cannot run, and with
    2 if a module cannot be imported.
    """
    settings = Settings.load(url=url)
    chosen = modules or list(settings.modules)
    if not chosen:
        raise SettingsError(
            "name the modules whose functions the workers will run: omniq check app.tasks; or set them in "
            'pyproject.toml: [tool.omniq] modules = ["app.tasks"], or OMNIQ_MODULES=app.tasks'
        )
    use_current_folder(chosen, None if modules else settings.modules_folder())

    async def work(task_queue: AsyncTaskQueue) -> CheckReport:
        with output.progress_bar("checking") as progress:
            return await check_deploy(
                task_queue.storage,
                task_queue.schedules,
                chosen,
                dead=not ignore_dead,
                on_progress=progress,
            )

    _refuse_missing_tables(settings)
    report = with_queue(url, work)
    if as_json:
        output.print_json(report)
    else:
        output.show(*_page(report))
    return 0 if report.ok else console.FAILURE


def _refuse_missing_tables(settings: Settings) -> None:
    """Raise `CommandFailed` for a database without the tables: to open it as a storage would create them."""
    storage = open_storage(settings=settings)
    if not isinstance(storage, HasSchema):
        return
    try:
        asyncio.run(storage.check_schema())
    except StorageRefused as error:
        raise CommandFailed(str(error), console.NOT_FOUND) from error


def _page(report: CheckReport) -> list[output.Renderable]:
    page: list[output.Renderable] = []
    for func_path, problems in groupby(report.problems, key=lambda each: each.func_path):
        page.append(output.text(func_path or "function not known", "bold"))
        for each in problems:
            page += _lines(each)
    if report.omitted:
        page.append(f"and {count_of(report.omitted, 'other record')} that cannot be run")
    read = [
        count_of(report.tasks, "task"),
        count_of(report.dead_letters, "dead letter"),
        count_of(report.schedules, "schedule"),
        f"{count_of(report.declared, 'schedule')} of the code",
        count_of(report.checkpoints, "checkpoint"),
    ]
    verdict = output.text(
        "the code can run all of it" if report.ok else "the code cannot run all of it",
        "green" if report.ok else "red",
    )
    if page:
        page.append("")
    page.append(output.Text.of(f"checked {', '.join(read)}: ", verdict))
    return page


def _lines(problem: CheckProblem) -> list[output.Renderable]:
    example = f", such as {problem.example}" if problem.example != problem.func_path else ""
    kind = f"{problem.problem}: " if problem.problem not in problem.detail else ""
    return [
        output.line(f"  {count_of(problem.count, problem.record)}{example}"),
        output.line(f"    {kind}{problem.detail}"),
        output.line(f"    → {problem.advice}"),
    ]
