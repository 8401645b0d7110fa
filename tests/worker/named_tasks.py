"""Functions with names, for tests of `@task(name=…, aliases=…)`."""

from __future__ import annotations

import os

from omniq import TaskContext, task


@task(name="mail.send", aliases=["old_shop.mails.send_mail"])
async def send(to: str) -> str:
    return f"sent to {to}"


@task(name="mail.archive", executor="process")
def archive(ctx: TaskContext, number: int) -> tuple[str, int, int]:
    return ctx.func_path, number, os.getpid()


@task(name="mail.report", max_retries=0)
def write_report() -> str:
    raise ValueError("no report")


# A second name in the module is not a second function.
send_again = send
