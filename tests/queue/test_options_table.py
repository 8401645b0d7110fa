"""Every face has exactly the options that the table gives it, and the docs are made from the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, get_overloads

import pytest

from omniq import Cron, ErrorRules, Limit, TaskQueue, task
from omniq.cli.enqueue import enqueue
from omniq.cli.schedules import add
from omniq.queue.async_queue import EnqueueOptions
from omniq.scheduling.schedules import ScheduleOptions
from omniq.tasks.options import OPTIONS, TaskOptions, names_on, option_help
from tests.queue.options_page import DETAILS, EXAMPLES, PAGE, page

NO_OPTIONS = {"func", "args", "kwargs", "url", "wait", "as_json", "schedule_id"}
"""Parameters of the commands that are not options of a task."""


def test_the_decorator_takes_the_options_of_the_table() -> None:
    _, with_options = get_overloads(task)

    assert set(inspect.signature(with_options).parameters) == names_on("@task")
    assert {field.name for field in fields(TaskOptions)} == names_on("@task")


def test_the_typed_dictionaries_have_the_options_of_the_table() -> None:
    assert set(EnqueueOptions.__annotations__) == names_on("options")
    assert set(ScheduleOptions.__annotations__) == names_on("schedules.add")


@pytest.mark.parametrize(
    ("command", "names"),
    [(enqueue, names_on("omniq enqueue")), (add, names_on("omniq schedules add"))],
    ids=["enqueue", "schedules add"],
)
def test_a_command_has_the_options_of_the_table_and_their_help(
    command: Callable[..., Any], names: set[str]
) -> None:
    parameters = inspect.signature(command, eval_str=True).parameters

    assert parameters.keys() - NO_OPTIONS == names
    for name in names:
        (option,) = parameters[name].annotation.__metadata__
        assert option.help.startswith(option_help(name))


def test_every_option_says_what_it_does_in_one_line() -> None:
    for option in OPTIONS.values():
        assert option.help.endswith(".")
        assert "\n" not in option.help


def test_the_page_about_options_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "the options have changed: python -m tests.queue.options_page"
    )


def test_the_page_has_an_example_of_every_option() -> None:
    assert EXAMPLES.keys() == OPTIONS.keys()
    assert DETAILS.keys() <= OPTIONS.keys()
    for name, example in EXAMPLES.items():
        assert f"{name}=" in example


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_page_run(name: str) -> None:
    def hook(task: Any, outcome: Any) -> None: ...

    with TaskQueue("memory://") as queue:
        names = {
            "queue": queue,
            "handle": queue.enqueue("shop.order"),
            "connection": object(),
            "send": "shop.send",
            "log_result": hook,
            "count_failure": hook,
            "call_someone": hook,
            **{
                each.__name__: each for each in (task, ErrorRules, Cron, Limit, datetime, timedelta)
            },
            "UTC": UTC,
        }
        made = eval(EXAMPLES[name].removeprefix("@"), names)

    assert made is not None
