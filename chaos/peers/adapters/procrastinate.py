"""Procrastinate: `task.defer` and `app.run_worker`, optionally with its recipe for stalled jobs."""

from __future__ import annotations

from collections.abc import Iterator

from procrastinate import App, JobContext, PsycopgConnector

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks

_OF_A_WORKER = ("update_heartbeat_interval", "stalled_worker_timeout")
_RECIPE = "periodic retry_stalled_jobs"

app = App(connector=PsycopgConnector(conninfo=URL))


@app.task(name="work_on")
async def work_on(task_id: str, seconds: float) -> None:
    await run_async(task_id, seconds)


async def retry_stalled_jobs(context: JobContext, timestamp: int) -> None:
    """The periodic task of its production guide."""
    since = SETTINGS["seconds_since_heartbeat"]
    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=since):
        await app.job_manager.retry_job(job)


if _RECIPE in SETTINGS:
    stalled = app.task(queueing_lock="retry_stalled_jobs", pass_context=True)(retry_stalled_jobs)
    app.periodic(cron=SETTINGS[_RECIPE])(stalled)


def produce() -> None:
    with app.open():
        app.schema_manager.apply_schema()
        for task_id, seconds in tasks():
            work_on.defer(task_id=task_id, seconds=seconds)
            acknowledged(task_id)


def work() -> None:
    options = {name: SETTINGS[name] for name in _OF_A_WORKER if name in SETTINGS}
    app.run_worker(concurrency=CONCURRENCY, **options)


def left() -> Iterator[tuple[str, str]]:
    # Without the recipe, a dead worker's jobs stay marked as running until an operator acts.
    abandoned = "held" if _RECIPE in SETTINGS else "failed"
    states = {"doing": abandoned, "failed": "failed"}
    with app.open():
        for job in app.job_manager.list_jobs(task="work_on"):
            if job.status != "succeeded":
                yield states.get(job.status, "held"), job.task_kwargs["task_id"]
