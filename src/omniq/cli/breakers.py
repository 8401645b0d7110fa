"""`omniq breakers`: list the circuit breakers of a storage, and close them."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Group
from omniq.cli.options import Json, Url
from omniq.cli.parsing import relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.operations.health import breakers_of
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

app = Group("breakers", "List the circuit breakers that all workers share, and close them.")


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """List the circuit breakers that all workers share, each with its state, since when, and why."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await breakers_of(task_queue.storage)
        if as_json:
            for breaker in found:
                output.print_json(breaker)
            return
        if not found:
            output.print_note("no breaker has been used yet")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                breaker.name,
                output.text(breaker.state, "green" if breaker.state == "closed" else "red"),
                breaker.failures,
                relative_time(breaker.opened_at, now),
                breaker.reason,
                breaker.probe or "",
            )
            for breaker in found
        ]
        columns = ("breaker", "state", ">failures", "opened", "because of", "probed by")
        output.show(output.Listing(columns, rows))

    with_queue(url, work)


@app.command()
def close(
    names: Annotated[
        list[str], Argument(metavar="NAME", help="Names of breakers.", complete="breaker")
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Close breakers without waiting for a probe: their tasks are claimed again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for name in names:
            if not await task_queue.breakers.close(name):
                raise CommandFailed(
                    f"breaker {name}: no claimed task has named it; omniq breakers lists those in use",
                    console.NOT_FOUND,
                )
            if as_json:
                output.print_json({"breaker": name, "state": "closed"})
            else:
                output.print_line(f"closed: {name}")

    with_queue(url, work)
