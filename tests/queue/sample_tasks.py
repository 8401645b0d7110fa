"""Functions that the tests of the queue enqueue. Nothing here is ever run."""

from omniq import BreakerRule, LinearBackoff, task


@task(queue="mail", priority=5, max_retries=0, timeout=30)
def send(to: str, subject: str = "hello") -> None:
    """A sync task with options."""


@task
async def fetch(url: str) -> int:
    """An async task without options."""
    return len(url)


@task
def plain(value: object = None) -> object:
    """Not decorated at all."""
    return value


@task(unique=True)
def once(*args: object, **kwargs: object) -> None:
    """One at a time for the same arguments."""


@task(unique=lambda user, _page: f"user-{user}")
def crawl(user: int, _page: int) -> None:
    """One at a time for each user."""


@task(unique=lambda visitor: f"visitor-{visitor['id']}")
def visit(visitor: dict[str, int]) -> None:
    """One at a time for each visitor."""


@task(
    rate="100/m",
    max_running=3,
    limit_key="api",
    breaker=["smtp", BreakerRule(name="dns", max_failures=2)],
    retry=LinearBackoff(step=2.0),
    expires=60,
    result_ttl=0,
    metadata={"team": "blue"},
)
def limited() -> None:
    """Has every other option."""


@task(cron="0 12 * * *", tz="Europe/Berlin")
def nightly() -> None:
    """Repeats."""
