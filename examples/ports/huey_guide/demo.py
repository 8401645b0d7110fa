from urllib.error import HTTPError
from urllib.request import urlopen

from omniq import Retry, TaskContext, task


@task
def add(a: int, b: int) -> int:
    return a + b


@task(cron="*/3 * * * *")
def every_three_minutes() -> None:
    print("This task runs every three minutes")


@task(max_retries=2, retry=[0.1, 0.1])
def flaky_task(ctx: TaskContext) -> str:
    if ctx.attempt == 1:
        raise Exception("failing!")
    return "OK"


@task
def fetch_api_data(url: str) -> int:
    try:
        with urlopen(url) as response:
            return len(response.read())
    except HTTPError as error:
        raise Retry(delay=60) from error


@task(priority=10)
def send_email(to: str, subject: str) -> str:
    return f"{subject}, {to}"


@task(max_running=1)
def rebuild_index() -> None: ...
