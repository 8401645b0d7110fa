"""`@task(schedules=[Cron(…), Interval(…)])`: schedules with arguments that stand in the code."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest

from omniq import AsyncTaskQueue, Cron, Interval, InvalidTask, SettingsError, task
from omniq.events import Dispatcher
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.worker.schedule_loop import ScheduleLoop

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        yield queue


class Code:
    """A module that can be rewritten, as between two deployments."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def write(self, source: str, name: str = "code_of_this_week") -> ModuleType:
        self._names.add(name)
        module = sys.modules[name] = ModuleType(name)
        exec(f"from omniq import *\n{source}", vars(module))
        return module

    def remove(self) -> None:
        for name in self._names:
            sys.modules.pop(name, None)


@pytest.fixture
def code() -> Iterator[Code]:
    code = Code()
    yield code
    code.remove()


REPORT = "def report(region, *, full=False): ..."


async def declared(queue: AsyncTaskQueue) -> dict[str, Any]:
    return {schedule.id: schedule for schedule in await queue.schedules.list()}


async def test_each_schedule_calls_the_function_with_its_arguments(queue, code, clock):
    module = code.write(
        "@task(queue='reports', schedules=["
        "Cron('0 3 * * *', tz='Europe/Berlin', args=['eu'], overlap='skip', jitter=0),"
        f"Interval(3600, args=['us'], kwargs={{'full': True}})])\n{REPORT}"
    )
    await queue.schedules.declare(module)
    eu, us = sorted(await queue.schedules.list(), key=lambda each: each.task.args)
    clock.advance(timedelta(days=1))
    await ScheduleLoop(queue.storage, Dispatcher(), 1.0).fire_due()
    fired = sorted((each.args, each.kwargs, each.queue) for each in await queue.list_tasks())

    assert (eu.cron, eu.tz, eu.overlap, eu.declared) == (
        "0 3 * * *",
        "Europe/Berlin",
        "skip",
        True,
    )
    # On the hour, so that all who declare it agree.
    assert (us.interval, us.next_at) == (3600.0, NOON + timedelta(hours=1))
    assert fired == [(("eu",), {}, "reports"), (("us",), {"full": True}, "reports")]


async def test_ids_stay_when_others_are_added_removed_or_moved(queue, code):
    eu, us, asia = (f"Cron('0 {hour} * * *', args=['{name}'])" for hour, name in
                    ((3, "eu"), (4, "us"), (5, "asia")))  # fmt: skip
    await queue.schedules.declare(code.write(f"@task(schedules=[{eu}, {us}])\n{REPORT}"))
    before = await declared(queue)
    await queue.schedules.declare(code.write(f"@task(schedules=[{asia}, {us}])\n{REPORT}"))
    after = await declared(queue)

    def by_region(found: dict[str, Any]) -> dict[str, str]:
        return {schedule.task.args[0]: schedule_id for schedule_id, schedule in found.items()}

    assert by_region(before).keys() == {"eu", "us"}
    assert by_region(after).keys() == {"us", "asia"}
    assert by_region(before)["us"] == by_region(after)["us"]
    assert all(name.startswith("code_of_this_week.report-") for name in before)


async def test_a_changed_time_is_the_same_schedule_and_stays_paused(queue, code):
    source = f"@task(schedules=[Cron('0 3 * * *', args=['eu'])])\n{REPORT}"
    await queue.schedules.declare(code.write(source))
    (schedule_id,) = await declared(queue)
    await queue.schedules.pause(schedule_id)
    await queue.schedules.declare(code.write(source.replace("0 3", "0 9")))
    (schedule,) = await queue.schedules.list()

    assert (schedule.id, schedule.cron, schedule.paused) == (schedule_id, "0 9 * * *", True)


async def test_a_schedule_without_arguments_has_the_id_that_cron_gives(queue, code):
    await queue.schedules.declare(code.write("@task(cron='0 3 * * *')\ndef tidy(): ..."))
    before = await declared(queue)
    await queue.schedules.declare(
        code.write("@task(schedules=[Cron('0 3 * * *'), Cron('0 9 * * SAT')])\ndef tidy(): ...")
    )
    after = await declared(queue)

    assert before.keys() == {"code_of_this_week.tidy"}
    assert before["code_of_this_week.tidy"] == after.pop("code_of_this_week.tidy")
    assert [schedule.cron for schedule in after.values()] == ["0 9 * * SAT"]


async def test_an_id_can_be_given(queue, code):
    source = "@task(schedules=Cron('0 3 * * *', args=['eu'], id='nightly'))\n" + REPORT
    await queue.schedules.declare(code.write(source))
    assert (await declared(queue)).keys() == {"nightly"}

    await queue.schedules.declare(code.write(REPORT))
    assert await declared(queue) == {}


async def test_the_schedules_of_a_named_function_have_its_name_and_go_with_it(queue, code):
    source = "@task(name='reports.daily', cron='0 3 * * *')\ndef daily(): ..."
    await queue.schedules.declare(code.write(source))
    (schedule,) = await queue.schedules.list()

    assert (schedule.id, schedule.task.func_path) == ("reports.daily", "reports.daily")
    await queue.schedules.declare(code.write(""))
    assert await queue.schedules.list() == []


async def test_a_function_that_gets_a_name_leaves_no_second_schedule(queue, code):
    source = "@task({}cron='0 3 * * *')\ndef daily(): ..."
    await queue.schedules.declare(code.write(source.format("")))
    await queue.schedules.declare(code.write(source.format("name='reports.daily', ")))

    assert (await declared(queue)).keys() == {"reports.daily"}


async def test_a_function_that_moves_takes_its_schedule_along(queue, code):
    daily = "@task(aliases=[{}], cron='0 3 * * *')\ndef daily(): ..."
    await queue.schedules.declare(code.write(daily.format(""), "code_of_last_week"))
    code.remove()
    await queue.schedules.declare(code.write(daily.format("'code_of_last_week.daily'")))

    assert (await declared(queue)).keys() == {"code_of_this_week.daily"}


async def test_a_function_that_moves_and_has_no_schedule_any_more_has_none(queue, code):
    daily = "@task(cron='0 3 * * *')\ndef daily(): ..."
    await queue.schedules.declare(code.write(daily, "code_of_last_week"))
    code.remove()
    moved = "@task(aliases=['code_of_last_week.daily'])\ndef daily(): ..."
    await queue.schedules.declare(code.write(moved))

    assert await declared(queue) == {}


async def test_a_static_method_may_have_schedules(queue, code):
    source = "class Mail:\n @staticmethod\n @task(cron='0 3 * * *')\n def tidy(): ..."
    await queue.schedules.declare(code.write(source))
    assert (await declared(queue)).keys() == {"code_of_this_week.Mail.tidy"}

    await queue.schedules.declare(code.write(""))
    assert await declared(queue) == {}


async def test_a_schedule_whose_end_has_passed_does_not_stop_the_worker(queue, code, clock):
    source = (
        "from datetime import UTC, datetime\n"
        "@task(schedules=[Interval(60, end=datetime(2026, 1, {}, tzinfo=UTC))])\ndef tidy(): ..."
    )
    await queue.schedules.declare(code.write(source.format(1)))
    (over,) = await queue.schedules.list()
    await queue.schedules.declare(code.write(source.format(2)))
    (going,) = await queue.schedules.list()
    await queue.schedules.declare(code.write(source.format(1)))
    (ended,) = await queue.schedules.list()

    assert (over.next_at, going.next_at, ended.next_at) == (None, NOON + timedelta(minutes=1), None)


@pytest.mark.parametrize("arguments", ["", "args=['eu', 'us']", "kwargs={'regin': 'eu'}"])
async def test_arguments_that_the_function_does_not_accept_are_refused(queue, code, arguments):
    module = code.write(f"@task(schedules=[Cron('0 3 * * *', {arguments})])\n{REPORT}")
    with pytest.raises(InvalidTask, match=r"code_of_this_week\.report"):
        await queue.schedules.declare(module)

    assert await queue.schedules.list() == []


async def test_one_id_for_two_functions_is_an_error_that_names_both(queue, code):
    module = code.write(
        "@task(schedules=[Interval(60, id='x')])\ndef first(): ...\n"
        "@task(schedules=[Interval(60, id='x')])\ndef second(): ...\n"
    )
    with pytest.raises(SettingsError, match=r"first and code_of_this_week\.second"):
        await queue.schedules.declare(module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cron("0 3 * *"), "cron"),
        (lambda: Cron("0 3 * * *", tz="Mars/Base"), "Mars"),
        (lambda: Cron(5), "text such as"),  # type: ignore[arg-type]
        (lambda: Cron("0 3 * * *", args="eu"), "expected a list"),
        (lambda: Cron("0 3 * * *", kwargs=["eu"]), "dictionary"),  # type: ignore[arg-type]
        (lambda: Cron("0 3 * * *", id="a b"), "id"),
        (lambda: Interval(0), "Interval"),
        (lambda: task(schedules="0 3 * * *"), "expected a list"),  # type: ignore[arg-type]
        (lambda: task(schedules=["0 3 * * *"]), r"Cron\(…\)"),  # type: ignore[list-item]
        (lambda: task(schedules=[Interval(5)], cron="0 3 * * *"), "not both"),
    ],
)
def test_a_wrong_schedule_is_refused_where_it_stands(make, message):
    with pytest.raises(InvalidTask, match=message):
        make()
