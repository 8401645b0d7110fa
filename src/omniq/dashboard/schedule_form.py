"""The form for a new schedule, or for one that exists, with a preview of its next times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import islice

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from omniq.cron import describe_cron
from omniq.dashboard import searches
from omniq.dashboard.app_state import state_of
from omniq.dashboard.rendering import page, value_text
from omniq.errors import InvalidValue
from omniq.models import Schedule, Task
from omniq.operations.redaction import without_secrets
from omniq.scheduling.due_times import nominal_times
from omniq.tasks.durations import seconds_in

_SHOWN = 5
_EMPTY = {
    "id": "",
    "function": "",
    "cron": "",
    "tz": "",
    "interval": "",
    "args": "[]",
    "kwargs": "{}",
    "queue": "",
    "missed": "once",
    "overlap": "allow",
}


async def edit_schedule(request: Request) -> Response:
    """The form. With fields in the query it shows these, and the next times that they lead to."""
    state = state_of(request)
    await state.sampler.current()
    schedule_id = request.path_params.get("schedule_id", "")
    schedule = await state.queue.schedules.get(schedule_id) if schedule_id else None
    if schedule_id and schedule is None:
        raise HTTPException(404, f"no schedule {schedule_id}")
    stored = {} if schedule is None else _fields_of(schedule)
    typed = {name: text for name, text in request.query_params.items() if name in _EMPTY}
    form = {**_EMPTY, **stored, **typed}
    upcoming: Sequence[datetime] = ()
    error = ""
    try:
        if typed:
            upcoming = preview(form, state.clock.now())
        elif schedule is not None:
            upcoming = await state.queue.schedules.upcoming(schedule_id, _SHOWN)
    except InvalidValue as invalid:
        error = str(invalid)
    return page(
        request,
        "schedule.html",
        400 if error else 200,
        form=form,
        error=error,
        schedule=schedule,
        upcoming=upcoming,
        words=describe_cron(form["cron"]) if form["cron"] and upcoming else "",
        functions=await searches.known_functions(state),
    )


def preview(form: dict[str, str], now: datetime) -> list[datetime]:
    """The next times of a schedule with these fields, if it were added now."""
    if bool(form["cron"]) == bool(form["interval"]):
        raise InvalidValue("give either a cron expression or an interval")
    schedule = Schedule(
        id="preview",
        task=Task(func_path="preview"),
        cron=form["cron"] or None,
        tz=form["tz"] or None,
        interval=seconds_in(form["interval"]) if form["interval"] else None,
        start=now,
    )
    return list(islice(nominal_times(schedule, now), _SHOWN))


def _fields_of(schedule: Schedule) -> dict[str, str]:
    safe = without_secrets(schedule.task)
    return {
        "id": schedule.id,
        "function": schedule.task.func_path,
        "cron": schedule.cron or "",
        "tz": schedule.tz or "",
        "interval": f"{schedule.interval:g}" if schedule.interval else "",
        "args": value_text(list(safe.args)),
        "kwargs": value_text(safe.kwargs),
        "queue": schedule.task.queue,
        "missed": schedule.missed,
        "overlap": schedule.overlap,
    }
